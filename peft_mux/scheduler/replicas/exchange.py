"""How long replicas take to add the gradients of their adapters, which L leaves out of a step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from peft_mux.scheduler.costs.loads import TaskLoad
from peft_mux.scheduler.replicas.facts import ReplicaFacts
from peft_mux.scheduler.replicas.time_model import ParallelConfig, ReplicaGroup


@dataclass(frozen=True, slots=True)
class GradientExchange:
    """Predicts the all-reduces of gradients in a step, as `peft_mux.engine.gradients` makes them.

    A device of a replica <t,p> holds a p-th of each adapter. Of that, factors that tensor parallelism cuts are added
    over replicas, a t-th each; the others are added over the t devices of each replica as well. Each task has its own
    all-reduces, which are rings at the pace of the slowest link. Groups of ranks that add at the same time share the
    network ports of a node in proportion to their ranks, and a group uses all of its ports at once.

    Attributes:
        loads: the adapters of the tasks.
        facts: the devices and their links; without a known link, all seconds are 0.
        gradient_bytes: bytes of a gradient as it is sent.
    """

    loads: tuple[TaskLoad, ...]
    facts: ReplicaFacts
    gradient_bytes: int = 4

    def device_bytes(self, config: ParallelConfig) -> tuple[float, float]:
        """Return the bytes of gradients on a device of a replica: of whole factors, and of factors that are cut."""
        cut = self.gradient_bytes * sum(load.cut_parameters for load in self.loads)
        whole = self.gradient_bytes * sum(load.trainable_parameters for load in self.loads) - cut
        return whole / config.pp, cut / config.num_gpus

    def seconds(self, configs: Sequence[ParallelConfig], counts: np.ndarray) -> np.ndarray:
        """Return the seconds of each deployment, float64 of shape `(plans,)`: those of its slowest device.

        Args:
            configs: the configurations of replicas.
            counts: replicas of each configuration in each deployment, int64 of shape `(plans, configs)`.
        """
        tp, sizes = np.array([config.tp for config in configs]), np.array([config.num_gpus for config in configs])
        num_replicas, num_shards = counts.sum(axis=1), counts @ tp
        # A replica that is alone adds within its tensor parallel groups only.
        num_devices = np.where(num_replicas == 1, num_shards, counts @ sizes)
        reach, which = np.unique(num_devices, return_inverse=True)
        links = [self.facts.link(int(devices)) for devices in reach]
        latency_s = np.array([0.0 if link is None else link.latency_s for link in links])[which]
        bytes_per_s = np.array([np.inf if link is None else link.bytes_per_s for link in links])[which]

        # A reduce-scatter and an all-gather, of n - 1 rounds each, with an n-th of the bytes in a round.
        whole_s, cut_s = (
            2 * (ranks - 1) / np.maximum(ranks, 1) / self._ring_bytes_per_s(bytes_per_s, num_devices, ranks)
            for ranks in (num_shards, num_replicas)
        )
        slowest_s = np.zeros(len(counts))
        for present, config in zip(counts.T > 0, configs, strict=True):
            whole_bytes, cut_bytes = self.device_bytes(config)
            slowest_s = np.maximum(slowest_s, present * (whole_bytes * whole_s + cut_bytes * cut_s))
        num_whole = sum(load.trainable_parameters > load.cut_parameters for load in self.loads)
        num_cut = sum(load.cut_parameters > 0 for load in self.loads)
        return slowest_s + 2 * (num_whole * (num_shards - 1) + num_cut * (num_replicas - 1)) * latency_s

    def _ring_bytes_per_s(self, link_bytes_per_s: np.ndarray, num_devices: np.ndarray, ranks: np.ndarray) -> np.ndarray:
        """Return the bandwidth of rings of so many ranks, if every one of the devices is in one of such rings."""
        cluster = self.facts.links
        if cluster is None:
            return link_bytes_per_s
        ports = cluster.ports_per_node or cluster.devices_per_node
        network_bytes_per_s = cluster.inter_node.bytes_per_s * ports * ranks / np.maximum(num_devices, 1)
        leaves_node = num_devices > cluster.devices_per_node
        return np.where(leaves_node, np.minimum(network_bytes_per_s, cluster.intra_node.bytes_per_s), link_bytes_per_s)

    def of(self, name: str) -> GradientExchange:
        """Return the exchange of one task alone."""
        return replace(self, loads=tuple(load for load in self.loads if load.name == name))

    def seconds_of(self, groups: Sequence[ReplicaGroup]) -> float:
        """Return the seconds of one deployment."""
        counts = np.array([[group.count for group in groups]], dtype=np.int64)
        return float(self.seconds([group.config for group in groups], counts)[0])

    def exposed_s(self, groups: Sequence[ReplicaGroup], ready_s: Mapping[str, float]) -> float:
        """Return the seconds of one deployment's exchange that no pass hides.

        The engine starts the all-reduces of a task when its last backward pass is done on all replicas, one task after
        another, while other tasks still compute.

        Args:
            groups: the replicas.
            ready_s: for each task, seconds from the start of the step to the end of its last backward pass.
        """
        end_s = 0.0
        for name in sorted(ready_s, key=lambda name: ready_s[name]):
            end_s = max(end_s, ready_s[name]) + self.of(name).seconds_of(groups)
        return end_s - max(ready_s.values(), default=0.0)
