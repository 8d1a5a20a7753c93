"""A pair of network namespaces whose link `tc` slows down, for `benchmarks.processes.overlap --netns`; needs root."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class Side(NamedTuple):
    """One end of the link.

    Attributes:
        command: what to put before a command, so that it runs there.
        address: IP address of this end.
        interface: name of the network interface that leads to the other end.
    """

    command: list[str]
    address: str
    interface: str


@contextmanager
def slow_pair(latency_ms: float, mbytes_per_s: float) -> Iterator[tuple[Side, Side]]:
    """Make two namespaces and a slow veth pair between them; nothing is left of them afterwards.

    Each direction has the bandwidth. The latency needs `netem`, which some kernels lack: then bandwidth alone is
    limited (`tbf`), and a line says so.
    """
    if os.geteuid() != 0 or not (shutil.which("ip") and shutil.which("tc")):
        raise SystemExit("--netns needs root with `ip` and `tc`. Leave it out to inject delays instead.")
    spaces = [f"overlap{os.getpid()}-{side}" for side in "ab"]
    sides = tuple(
        Side(["ip", "netns", "exec", space], f"10.213.7.{number}", "overlap0") for number, space in enumerate(spaces, 1)
    )
    try:
        for space in spaces:
            _call("ip", "netns", "add", space)
        _call(
            *sides[0].command, "ip", "link", "add", "overlap0", "type", "veth", "peer", "overlap0", "netns", spaces[1]
        )
        for side in sides:
            _call(*side.command, "ip", "address", "add", f"{side.address}/30", "dev", "overlap0")
            for interface in ("overlap0", "lo"):
                _call(*side.command, "ip", "link", "set", interface, "up")
            _slow_down(side, latency_ms, mbytes_per_s)
        yield sides[0], sides[1]
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "delete", space], check=False, capture_output=True)


def _slow_down(side: Side, latency_ms: float, mbytes_per_s: float) -> None:
    rate = f"{mbytes_per_s * 8:.0f}mbit"
    add = [*side.command, "tc", "qdisc", "add", "dev", "overlap0", "root"]
    netem = subprocess.run([*add, "netem", "delay", f"{latency_ms}ms", "rate", rate], check=False, capture_output=True)
    if netem.returncode:
        print(f"{side.address}: no latency of {latency_ms} ms, only {rate}: {netem.stderr.decode().strip()}")
        _call(*add, "tbf", "rate", rate, "burst", "64kb", "latency", "200ms")


def _call(*command: str) -> None:
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {done.stderr.strip()}")
