"""Devices by their data sheets, the links between them, and how far sums over a link are hidden by computing.

Data sheets say what a device could do, and `Device.efficiency` which part of its peak large matrix products reach.
Plans can be made from them for machines that are not at hand; a measured profile
(`peft_mux.planning.profiling.backbone`) needs none of this.
"""

from __future__ import annotations

import difflib
import math
import re
from dataclasses import dataclass, replace

from peft_mux.scheduler.plan import Link

MOST_SLOWDOWN = 0.99
"""Computing continues during a sum, however slowly."""


@dataclass(frozen=True, slots=True)
class Overlap:
    """What a profile knows about passes that take turns (M §3.4.2).

    Attributes:
        skew: how much longer than its own time each sum is waited for, as a part of the computing before it: ranks
            never finish at the same time, and one after another all of them wait for the last.
        slowdown: part of its speed that computing loses during a sum, from 0 (the network makes the sums) to 0.99
            (the same cores compute and sum).
        turn_s: seconds of handing the turn to another pass.
        host_s: seconds that each stretch between two sums takes in addition to its part of a layer: a divided layer is
            launched in as many operators as a whole one, and adds its sums.

    Raises:
        ValueError: for numbers out of range.
    """

    skew: float = 0.0
    slowdown: float = 0.0
    turn_s: float = 0.0
    host_s: float = 0.0

    def __post_init__(self) -> None:
        for field in ("skew", "turn_s", "host_s"):
            if not 0 <= getattr(self, field) < math.inf:
                raise ValueError(f"{field} must be 0 or more, and finite, got {getattr(self, field)}. Measure again.")
        if not 0 <= self.slowdown <= MOST_SLOWDOWN:
            raise ValueError(f"slowdown must be 0 to {MOST_SLOWDOWN}, got {self.slowdown}. Measure again.")


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or the cores of one machine.

    Attributes:
        name: the name under which `parse_devices` knows the device.
        memory_bytes: bytes of its memory.
        flops_per_s: peak of dense products in bf16 with fp32 accumulation (on a CPU: fp32).
        memory_bytes_per_s: peak bandwidth of its memory.
        efficiency: the part of `flops_per_s` that large matrix products reach.
        link: the link to another device of its node: a bit less than half of what the maker states for both directions
            together.
    """

    name: str
    memory_bytes: int
    flops_per_s: float
    memory_bytes_per_s: float
    efficiency: float
    link: Link


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal devices in equal nodes.

    Attributes:
        device: what every one of the devices is.
        num_devices: number of devices of all nodes together.
        devices_per_node: number of devices of a node; the last node may hold fewer.
        intra_node: the link between two devices of one node.
        inter_node: the link between two devices of different nodes, through one network port.
        ports_per_node: network ports of a node; `None` for one of each device.
    """

    device: Device
    num_devices: int
    devices_per_node: int
    intra_node: Link
    inter_node: Link
    ports_per_node: int | None = None

    def link(self, first: int, second: int) -> Link:
        """Return the link between two devices, which are numbered node by node from 0."""
        same_node = first // self.devices_per_node == second // self.devices_per_node
        return self.intra_node if same_node else self.inter_node

    def network(self, share: float) -> Link:
        """Return the link of rings that leave their nodes, each with this share of the devices of every node.

        A ring uses many ports at once. Rings that run at the same time share the ports of a node by their ranks.
        """
        bytes_per_s = self.inter_node.bytes_per_s * self._num_ports * share
        return Link(self.inter_node.latency_s, min(bytes_per_s, self.intra_node.bytes_per_s))

    def tensor_link(self, tp: int) -> Link:
        """Return the link of tensor parallel groups of `tp` neighbours: of those on several nodes, if there are any."""
        if self.num_devices <= self.devices_per_node or self.devices_per_node % tp == 0:
            return self.intra_node
        return self.network(math.gcd(tp, self.devices_per_node) / self.devices_per_node)

    def stage_links(self, tp: int, num_stages: int, first: int = 0) -> tuple[Link, ...]:
        """Return the link from each stage of a replica to the next, and from the last to the first.

        All ranks of a stage send at once, each to its counterpart and through one port, which those of a node share if
        ports are fewer.

        Args:
            tp: devices of a stage.
            num_stages: S, stages of the replica.
            first: number of its first device.

        Returns:
            a link for each stage; none for a single stage.
        """
        if num_stages == 1:
            return ()
        senders = min(tp, self.devices_per_node)
        bytes_per_s = self.inter_node.bytes_per_s * min(1.0, self._num_ports / senders)
        between = replace(self.inter_node, bytes_per_s=bytes_per_s)
        starts = [first + stage * tp for stage in range(num_stages)]
        return tuple(
            between
            if any(self.link(start + rank, end + rank) is self.inter_node for rank in range(tp))
            else self.intra_node
            for start, end in zip(starts, (*starts[1:], first), strict=True)
        )

    def slowest_stage_links(self, tp: int, num_stages: int, num_replicas: int, first: int = 0) -> tuple[Link, ...]:
        """Return `stage_links` of the one of equal replicas, from device `first` on, whose messages take longest."""
        # The places of replicas in their nodes repeat after as many replicas as a node has devices.
        every = (
            self.stage_links(tp, num_stages, first + number * tp * num_stages)
            for number in range(min(num_replicas, self.devices_per_node))
        )
        return max(every, key=lambda links: sum(link.transfer_s(_MESSAGE_BYTES) for link in links))

    @property
    def _num_ports(self) -> int:
        return self.ports_per_node or self.devices_per_node


_GB = 10**9
_MESSAGE_BYTES = 10**6
"""Of a message by which links are compared."""
_TERA = 10**12

DEVICES = {
    device.name: device
    for device in (
        # Links: PCIe 4.0 x16 (A10G, A40, L40S, RTX 4090); NVLink 3 of A100 (600 GB/s both ways), A800 (400); NVLink 4
        # (900) and 5 (1,800); Infinity Fabric between two MI300X (128), where sums over all eight use more of them.
        # NVIDIA A10G data sheet (AWS, 2022): 24 GB GDDR6 at 600 GB/s, 70 TFLOP/s dense bf16.
        Device("A10G", 24 * _GB, 70 * _TERA, 600 * _GB, 0.7, Link(10e-6, 25 * _GB)),
        # NVIDIA A40 data sheet: 48 GB GDDR6, 696 GB/s, 149.7 TFLOP/s dense bf16.
        Device("A40", 48 * _GB, 149.7 * _TERA, 696 * _GB, 0.7, Link(10e-6, 25 * _GB)),
        # NVIDIA A100 data sheet: 312 TFLOP/s dense bf16; 40 GB HBM2 at 1,555 GB/s, 80 GB HBM2e (SXM) at 2,039 GB/s.
        Device("A100-40GB", 40 * _GB, 312 * _TERA, 1555 * _GB, 0.8, Link(5e-6, 250 * _GB)),
        Device("A100-80GB", 80 * _GB, 312 * _TERA, 2039 * _GB, 0.8, Link(5e-6, 250 * _GB)),
        # NVIDIA A800: an A100 80 GB with 400 GB/s of NVLink instead of 600 GB/s.
        Device("A800-80GB", 80 * _GB, 312 * _TERA, 2039 * _GB, 0.8, Link(5e-6, 170 * _GB)),
        # NVIDIA H100 SXM data sheet: 80 GB HBM3 at 3.35 TB/s, 989.4 TFLOP/s dense bf16.
        Device("H100-80GB", 80 * _GB, 989.4 * _TERA, 3350 * _GB, 0.7, Link(5e-6, 380 * _GB)),
        # NVIDIA H200 SXM data sheet: 141 GB HBM3e at 4.8 TB/s, 989.4 TFLOP/s dense bf16.
        Device("H200", 141 * _GB, 989.4 * _TERA, 4800 * _GB, 0.75, Link(5e-6, 380 * _GB)),
        # NVIDIA DGX B200 data sheet, an eighth: 180 GB HBM3e at 8 TB/s, 2,250 TFLOP/s dense bf16 (stated: FP8, sparse).
        Device("B200", 180 * _GB, 2250 * _TERA, 8000 * _GB, 0.7, Link(5e-6, 760 * _GB)),
        # NVIDIA L40S data sheet: 48 GB GDDR6 at 864 GB/s, 362.05 TFLOP/s dense bf16.
        Device("L40S", 48 * _GB, 362.05 * _TERA, 864 * _GB, 0.7, Link(10e-6, 25 * _GB)),
        # AMD MI300X data sheet: 192 GB HBM3 at 5.3 TB/s, 1,307.4 TFLOP/s dense bf16, of which published measurements of
        # large products reach about half.
        Device("MI300X", 192 * _GB, 1307.4 * _TERA, 5300 * _GB, 0.5, Link(5e-6, 50 * _GB)),
        # NVIDIA Ada architecture white paper: RTX 4090, 24 GB GDDR6X at 1,008 GB/s, 165.2 TFLOP/s dense bf16.
        Device("RTX4090", 24 * _GB, 165.2 * _TERA, 1008 * _GB, 0.8, Link(10e-6, 25 * _GB)),
        # No data sheet: two server cores with AVX2 in fp32, 2 x 3 GHz x 32 operations, one memory channel.
        Device("cpu", 8 * _GB, 192 * _GB, 20 * _GB, 0.6, Link(50e-6, 2 * _GB)),
    )
}
"""Data-sheet numbers by name."""

_INTER_NODE = Link(15e-6, 25 * _GB)
"""One 200 Gbit/s InfiniBand port a device."""

DEVICES_PER_NODE = 8


def known_device(name: str, memory_bytes: int) -> Device | None:
    """Return the data sheet of a GPU by the name that its driver reports; `None` if there is none.

    Args:
        name: such as "NVIDIA A100-SXM4-80GB" or "NVIDIA GeForce RTX 4090".
        memory_bytes: its memory, which distinguishes devices of one name, such as the A100 with 40 and with 80 GB.
    """
    words = re.findall(r"[a-z0-9]+", name.lower().replace("rtx ", "rtx"))
    named = [device for device in DEVICES.values() if device.name.split("-")[0].lower() in words]
    return min(named, key=lambda device: abs(device.memory_bytes - memory_bytes), default=None)


def parse_devices(text: str | Cluster) -> Cluster:
    """Read a cluster from text such as "4xA100-80GB", "8x8xA100-80GB" for 8 nodes of 8, or "H200" for one device.

    Without a number of nodes, nodes have 8 devices. A cluster is returned unchanged.

    Args:
        text: number of nodes, if any, number of devices and a name of `DEVICES`, with "x" between them; upper and lower
            case are the same.

    Raises:
        ValueError: saying what is allowed, for any other text.
    """
    if isinstance(text, Cluster):
        return text
    match = re.fullmatch(r"\s*(?:(\d+)\s*[xX*]\s*)?(?:(\d+)\s*[xX*]\s*)?([A-Za-z][\w-]*)\s*", text)
    names = {name.lower(): name for name in DEVICES}
    allowed = f'a count, "x" and one of {", ".join(DEVICES)}, such as 4xA100-80GB, or 8x4xA100-80GB for 8 nodes of 4'
    if match is None:
        raise ValueError(f"devices must be {allowed}, got {text!r}.")
    name = match[3].lower()
    if name not in names:
        close = difflib.get_close_matches(name, names, n=1)
        fix = f" Did you mean {names[close[0]]}?" if close else ""
        raise ValueError(f"devices must be {allowed}, got {text!r}, whose device {match[3]!r} is not known.{fix}")
    # A single number is of devices: it matches the first group.
    num_nodes, per_node = (int(match[1]), int(match[2])) if match[2] else (1, int(match[1] or 1))
    count = num_nodes * per_node
    if count < 1:
        raise ValueError(f"devices must be {allowed}, got {text!r}. The count is 1 or more.")
    device = DEVICES[names[name]]
    devices_per_node = per_node if match[2] else min(count, DEVICES_PER_NODE)
    return Cluster(device, count, devices_per_node, device.link, _INTER_NODE)
