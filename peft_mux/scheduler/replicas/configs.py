"""The words that deployment and dispatch share: parallel configurations, groups of replicas, and what a time model is.

A fine-tuning replica is one copy of the backbone under one parallel configuration (L section 2.2). This file measures
and solves nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


@dataclass(frozen=True, slots=True, order=True)
class ParallelConfig:
    """How one replica is spread over GPUs; orders by tensor, then by pipeline parallel degree.

    Attributes:
        tp: tensor parallel degree: devices among which every layer is divided.
        pp: pipeline parallel degree: stages among which the layers are divided.

    Raises:
        ValueError: where a degree is below 1.
    """

    tp: int
    pp: int

    def __post_init__(self) -> None:
        for field, degree in (("tp", self.tp), ("pp", self.pp)):
            if degree < 1:
                raise ValueError(f"{field} is {degree}; allowed: 1 or more. Use 1 for no such parallelism.")

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
        slowness: what its replicas take over what the time model says of their configuration, as measured.

    Raises:
        ValueError: where there is no replica, no token fits, or a slowness is not above 0.
    """

    config: ParallelConfig
    count: int
    max_tokens: int
    slowness: float = 1.0

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ValueError(
                f"count is {self.count}; allowed: 1 or more. Leave out {self.config} where none is deployed."
            )
        if self.max_tokens < 1:
            raise ValueError(
                f"max_tokens is {self.max_tokens}; allowed: 1 or more. Leave out {self.config} where none fit."
            )
        if not 0 < self.slowness < float("inf"):
            raise ValueError(f"slowness is {self.slowness}; allowed: above 0, such as 2.0 for half as fast.")

    @property
    def num_gpus(self) -> int:
        """GPUs of the whole group."""
        return self.count * self.config.num_gpus

    def __str__(self) -> str:
        """Return the paper's notation, such as <2,1>x3."""
        return f"{self.config}x{self.count}"


class TimeModel(Protocol):
    """Predicts how long one replica takes for its share of a step (L Appendix D, Eq. 10-12).

    Every length that is passed is at most `max_tokens`; lengths ascend. Implementations are deterministic, and
    `step_s` never falls when a count grows.
    """

    def step_s(self, config: ParallelConfig, counts: Sequence[int], lengths: Sequence[int], max_tokens: int) -> float:
        """Return the seconds in which one replica trains `counts[j]` sequences padded to `lengths[j]` each.

        Micro-batches of bucket j hold `max_tokens // lengths[j]` sequences. No sequences at all take 0 s.

        Args:
            config: how the replica is spread over GPUs.
            counts: sequences of each bucket on this replica.
            lengths: padded length of each bucket in tokens, ascending.
            max_tokens: most tokens of a micro-batch on this replica.
        """
        ...

    def linear_terms(self, config: ParallelConfig, lengths: Sequence[int], max_tokens: int) -> tuple[np.ndarray, float]:
        """Return the model in the form of the ILP: seconds per sequence of each bucket, and seconds for any at all.

        A replica with counts d_j takes about `sum_j d_j * per_sequence_s[j] + constant_s`, and 0 where all d_j are 0.
        The first spreads the time of a full micro-batch over its sequences; the second holds what does not grow with
        their number, such as the bubble of a pipeline. Shapes: `(len(lengths),)` float64, and a scalar.

        Args:
            config: how the replica is spread over GPUs.
            lengths: padded length of each bucket in tokens, ascending.
            max_tokens: most tokens of a micro-batch on this replica.
        """
        ...


class DeployableTimeModel(TimeModel, Protocol):
    """A time model that knows what can be deployed; the deployment search asks for nothing else."""

    @property
    def max_tokens(self) -> Mapping[ParallelConfig, int]:
        """Most tokens of a micro-batch by configuration, and so the longest sequence; its keys can be deployed."""
        ...

    @property
    def configurations(self) -> tuple[ParallelConfig, ...]:
        """What can be deployed: by GPUs, then by tensor parallel degree."""
        ...

    def throughput(self, config: ParallelConfig, length_tokens: int, num_micro_batches: int) -> float:
        """Return tokens per GPU and second over full micro-batches of one length; 0 where none fits (L Table 3).

        Args:
            config: a configuration of `max_tokens`.
            length_tokens: tokens of each sequence.
            num_micro_batches: full micro-batches over which the throughput is taken.
        """
        ...
