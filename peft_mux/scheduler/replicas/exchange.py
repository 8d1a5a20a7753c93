"""How long replicas take to add the gradients of their adapters, which L leaves out of a step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from peft_mux.scheduler.costs.loads import TaskLoad
from peft_mux.scheduler.parallel_layout import ParallelConfig
from peft_mux.scheduler.replicas.facts import ReplicaFacts
from peft_mux.scheduler.replicas.time_model import ReplicaGroup


@dataclass(frozen=True, slots=True)
class GradientExchange:
    """Predicts the all-reduces of gradients in a step, as `peft_mux.parallel.cells` makes them.

    A device of a replica <t,p> holds a p-th of each adapter. Of that, factors that tensor parallelism cuts are added
    over replicas, a t-th each; the others are added over the t devices of each replica as well. Each task has its own
    all-reduces, which are rings at the pace of the slowest link. Groups of ranks that add at the same time share the
    network ports of a node in proportion to their ranks there, and a group uses all of its ports at once.

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
        cluster, near = self.facts.links, self.facts.tensor_link(1)
        if near is None:
            return np.zeros(len(counts))
        per_node, network = math.inf, lambda share: near
        if cluster is not None:
            per_node, network = cluster.devices_per_node, cluster.network
        leaves_node = num_devices > per_node

        def ring_s(num_bytes: float, ranks: np.ndarray, share: float) -> np.ndarray:
            """Return the seconds of a ring that has this share of the devices of every node, without latencies."""
            bytes_per_s = np.where(leaves_node, network(min(1.0, share)).bytes_per_s, near.bytes_per_s)
            # A reduce-scatter and an all-gather, of n - 1 rounds each, with an n-th of the bytes in a round.
            return 2 * (ranks - 1) / np.maximum(ranks, 1) * num_bytes / bytes_per_s

        slowest_s = np.zeros(len(counts))
        for present, config in zip(counts.T > 0, configs, strict=True):
            whole_bytes, cut_bytes = self.device_bytes(config)
            # Of the devices of a replica on one node, a ring has all of a stage, or one.
            devices_on_node = min(config.num_gpus, per_node)
            device_s = ring_s(whole_bytes, num_shards, config.tp / devices_on_node)
            device_s = device_s + ring_s(cut_bytes, num_replicas, 1 / devices_on_node)
            slowest_s = np.maximum(slowest_s, present * device_s)
        latency_s = np.where(leaves_node, network(1.0).latency_s, near.latency_s)
        num_whole = sum(load.trainable_parameters > load.cut_parameters for load in self.loads)
        num_cut = sum(load.cut_parameters > 0 for load in self.loads)
        return slowest_s + 2 * (num_whole * (num_shards - 1) + num_cut * (num_replicas - 1)) * latency_s

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
