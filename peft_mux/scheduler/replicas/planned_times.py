"""`PlannedTimeModel`: the price of a replica by MuxTune's plans, in the linear form that L Eq. 2 and 3 are solved in.

A whole plan for every dispatch that a solver looks at would take hours. So a configuration is planned for a few loads
(`ReplicaPlanner`), and a step of d_j sequences padded to s_j is fitted as

    fixed + each * sum d_j + token * sum d_j s_j + square * sum d_j s_j^2

with no coefficient below 0: what a step costs at all (filling a pipeline, launches, updates), a sequence, its tokens,
and its attention. Lengths are those of buckets, so that the fit takes in that plans pack rows and do not pad them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from peft_mux.scheduler.replicas.configs import ParallelConfig
from peft_mux.scheduler.replicas.time_model import non_negative_least_squares


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """What a replica was planned for, and what its plan takes.

    Attributes:
        counts: sequences of each bucket.
        lengths: padded length of each bucket in tokens.
        seconds: seconds of a step under the plan.
        weight: how much it counts in a fit.
    """

    counts: tuple[int, ...]
    lengths: tuple[int, ...]
    seconds: float
    weight: float = 1.0

    @property
    def sums(self) -> tuple[float, float, float, float]:
        """1 and the sums over sequences of 1, their tokens and the squares of these; what a fit is linear in."""

        def total(power: int) -> float:
            pairs = zip(self.counts, self.lengths, strict=True)
            return float(sum(count * length**power for count, length in pairs))

        return 1.0, total(0), total(1), total(2)


@dataclass(frozen=True, slots=True)
class PlannedTerms:
    """The linear form of one configuration.

    Attributes:
        fixed_s: seconds of a step that has any sequence.
        each_s: seconds of a sequence, whatever its length.
        token_s: seconds of a token.
        square_s: seconds of a sequence by the square of its tokens.
        mean_relative_error: mean of |fitted / planned - 1| over the loads that it was fitted to.
    """

    fixed_s: float
    each_s: float
    token_s: float
    square_s: float
    mean_relative_error: float = 0.0

    def sequence_s(self, length: float) -> float:
        """Return the seconds of a sequence padded to `length` tokens, besides the fixed ones."""
        return self.each_s + (self.token_s + self.square_s * length) * length


def fit_terms(loads: Iterable[PlannedLoad]) -> PlannedTerms:
    """Return the linear form of least squares of the weighted relative error, no coefficient below 0.

    Args:
        loads: what plans take for some loads of one configuration, one or more; those that fit nowhere do not count.

    Raises:
        ValueError: where no load has a plan.
    """
    known = [load for load in loads if np.isfinite(load.seconds)]
    if not known:
        raise ValueError("loads has no plan that fits; allowed: one or more. Leave the configuration out.")
    columns = np.array([load.sums for load in known]) / np.array([[load.seconds] for load in known])
    weights = np.sqrt([load.weight for load in known])
    # Columns differ by many powers of ten.
    scale = columns.max(axis=0)
    solution = non_negative_least_squares(columns / scale * weights[:, None], weights) / scale
    error = float(np.abs(columns @ solution - 1).mean())
    fixed_s, each_s, token_s, square_s = solution.tolist()
    return PlannedTerms(fixed_s, each_s, token_s, square_s, error)


@dataclass(frozen=True, slots=True)
class PlannedTimeModel:
    """Seconds of a replica's step by fitted plans; a `DeployableTimeModel` of `peft_mux.scheduler.replicas.configs`.

    Attributes:
        terms: the linear form of each configuration.
        max_tokens: the longest sequence that each configuration holds.
    """

    terms: Mapping[ParallelConfig, PlannedTerms]
    max_tokens: Mapping[ParallelConfig, int]

    def __post_init__(self) -> None:
        if not self.terms or set(self.terms) != set(self.max_tokens):
            raise ValueError(
                f"terms has {', '.join(map(str, self.terms)) or 'nothing'}, max_tokens "
                f"{', '.join(map(str, self.max_tokens)) or 'nothing'}; allowed: the same configurations, one or more."
            )

    @property
    def configurations(self) -> tuple[ParallelConfig, ...]:
        """Return what can be deployed: by GPUs, then by tensor parallel degree."""
        return tuple(sorted(self.max_tokens, key=lambda config: (config.num_gpus, config)))

    def step_s(self, config: ParallelConfig, counts: Sequence[int], lengths: Sequence[int], max_tokens: int) -> float:
        """Return the seconds of one replica for `counts[j]` sequences padded to `lengths[j]`; as `TimeModel` has it."""
        terms, total_s = self.terms[config], 0.0
        for count, length in zip(counts, lengths, strict=True):
            if count:
                total_s += count * terms.sequence_s(length)
        return total_s + terms.fixed_s if any(counts) else 0.0

    def linear_terms(self, config: ParallelConfig, lengths: Sequence[int], max_tokens: int) -> tuple[np.ndarray, float]:
        """Return seconds per sequence of each length, and of any at all; exactly those of `step_s`."""
        terms = self.terms[config]
        return np.array([terms.sequence_s(length) for length in lengths], dtype=np.float64), terms.fixed_s

    def throughput(self, config: ParallelConfig, length_tokens: int, num_micro_batches: int) -> float:
        """Return tokens per GPU and second over full micro-batches of one length; 0 where none fits.

        Args:
            config: a configuration of `max_tokens`.
            length_tokens: tokens of each sequence.
            num_micro_batches: full micro-batches over which the throughput is taken.
        """
        size = self.max_tokens[config] // length_tokens
        if not size:
            return 0.0
        seconds = self.step_s(config, [size * num_micro_batches], [length_tokens], self.max_tokens[config])
        return size * num_micro_batches * length_tokens / (seconds * config.num_gpus)
