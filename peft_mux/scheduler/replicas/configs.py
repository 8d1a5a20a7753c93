"""Parallel configurations, and groups of equal replicas.

A fine-tuning replica is one copy of the backbone under one parallel configuration (L section 2.2).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class ParallelConfig:
    """How one replica is spread over GPUs; orders by tensor, then by pipeline parallel degree.

    Attributes:
        tp: tensor parallel degree: devices among which every layer is divided.
        pp: pipeline parallel degree: stages among which the layers are divided.

    Raises:
        ValueError: if a degree is below 1.
    """

    tp: int
    pp: int

    def __post_init__(self) -> None:
        for field, degree in (("tp", self.tp), ("pp", self.pp)):
            if degree < 1:
                raise ValueError(f"{field} must be 1 or more, got {degree}. Use 1 for no such parallelism.")

    @property
    def num_gpus(self) -> int:
        """GPUs of one replica (n_i in L)."""
        return self.tp * self.pp

    def __str__(self) -> str:
        """Return the paper's notation, such as <2,1>."""
        return f"<{self.tp},{self.pp}>"


@dataclass(frozen=True, slots=True)
class ReplicaGroup:
    """All replicas of one configuration in a deployment.

    Attributes:
        config: how every replica of the group is spread over GPUs.
        count: number of replicas in the group (p_i in L).
        max_tokens: most tokens that a micro-batch may have, and so the longest padded sequence (M in L Eq. 10).
        slowness: measured seconds of its replicas over those that the time model predicts for their configuration.
    """

    config: ParallelConfig
    count: int
    max_tokens: int
    slowness: float = 1.0

    @property
    def num_gpus(self) -> int:
        """GPUs of the whole group."""
        return self.count * self.config.num_gpus

    def __str__(self) -> str:
        """Return the paper's notation, such as <2,1>x3."""
        return f"{self.config}x{self.count}"


def layout_text(groups: tuple[ReplicaGroup, ...]) -> str:
    """Return the replicas of a deployment in the paper's notation, such as "<2,1>x1, <1,1>x4".

    Ranks are given to replicas in this order. The largest tensor parallel degrees are first, so that no tensor parallel
    group is on two nodes if a node has a multiple of its devices: L's degrees are powers of two.
    """
    return ", ".join(map(str, sorted(groups, key=lambda group: (-group.config.tp, -group.config.pp))))
