"""Time models, solvers, small cases and the brute force that the tests of dispatch share."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import pulp
from hypothesis import strategies as st

from peft_mux.scheduler.dispatching.bucketing import Bucketing
from peft_mux.scheduler.dispatching.dispatch import Dispatch
from peft_mux.scheduler.parallel_layout import ParallelConfig
from peft_mux.scheduler.replicas.time_model import ReplicaGroup

POLICIES = ["balanced", "length", "uniform"]
KILO_TOKENS_PER_GPU_S = {1: (5.11,), 2: (4.30, 4.12), 4: (3.63, 3.50, 3.25), 8: (2.79, 2.71, 2.56, 2.33)}
"""L Table 3, <tp,1> at 2K, 4K, 8K and 16K."""
TABLE_LENGTHS = (2048, 4096, 8192, 16384)
FIGURE_4 = Bucketing(TABLE_LENGTHS, (196, 62, 16, 4), padding_tokens=0)


class TableModel:
    """Seconds from L Table 3."""

    def linear_terms(self, config: ParallelConfig, lengths: Sequence[int], max_tokens: int) -> tuple[np.ndarray, float]:
        rates = [1024 * config.num_gpus * KILO_TOKENS_PER_GPU_S[config.tp][TABLE_LENGTHS.index(at)] for at in lengths]
        return np.array(lengths) / np.array(rates), 0.0

    def step_s(self, config: ParallelConfig, counts: Sequence[int], lengths: Sequence[int], max_tokens: int) -> float:
        return float(np.dot(counts, self.linear_terms(config, lengths, max_tokens)[0]))


@dataclass
class MicroBatchModel:
    """L Eq. 12 with t(b, s) = b (s + s^2 / 4000) / tp^0.8 + 20 in arbitrary units, or its linear form alone."""

    ceilings: bool = True

    def _pass_s(self, config: ParallelConfig, sequences: int, length: int) -> float:
        return (sequences * (length + length**2 / 4000) / config.tp**0.8 + 20) / config.pp if sequences else 0.0

    def linear_terms(self, config: ParallelConfig, lengths: Sequence[int], max_tokens: int) -> tuple[np.ndarray, float]:
        fulls = [self._pass_s(config, max_tokens // length, length) for length in lengths]
        per_sequence = [full / (max_tokens // length) for full, length in zip(fulls, lengths, strict=True)]
        return np.array(per_sequence), (config.pp - 1) * max(fulls)

    def step_s(self, config: ParallelConfig, counts: Sequence[int], lengths: Sequence[int], max_tokens: int) -> float:
        if not self.ceilings:
            per_sequence, constant = self.linear_terms(config, lengths, max_tokens)
            return float(np.dot(counts, per_sequence)) + constant * any(counts)
        total, longest = 0.0, 0.0
        for count, length in zip(counts, lengths, strict=True):
            most = max_tokens // length
            whole, rest = divmod(count, most)
            total += whole * self._pass_s(config, most, length) + self._pass_s(config, rest, length)
            longest = max(longest, self._pass_s(config, min(count, most), length))
        return total + (config.pp - 1) * longest


class RaisingSolver(pulp.LpSolver):
    name = "RAISING"

    def actualSolve(self, lp: Any, **arguments: Any) -> int:
        raise pulp.PulpSolverError("licence expired")


class GivingUpSolver(pulp.LpSolver):
    name = "GIVING_UP"

    def actualSolve(self, lp: Any, **arguments: Any) -> int:
        lp.assignStatus(pulp.LpStatusNotSolved, pulp.LpSolutionNoSolutionFound)
        return pulp.LpStatusNotSolved


class StoppedSolver(pulp.LpSolver):
    """Finds the optimum and claims that time ran out before it was proven."""

    name = "STOPPED"

    def actualSolve(self, lp: Any, **arguments: Any) -> int:
        name = next(name for name in ("PULP_CBC_CMD", "COIN_CMD") if name in pulp.listSolvers())
        pulp.getSolver(name, msg=False).actualSolve(lp)
        lp.assignStatus(pulp.LpStatusOptimal, pulp.LpSolutionIntegerFeasible)
        return pulp.LpStatusOptimal


def figure_4_groups(replicas: Sequence[int]) -> list[ReplicaGroup]:
    return [
        ReplicaGroup(ParallelConfig(tp, 1), count, max_tokens)
        for tp, count, max_tokens in zip((1, 2, 4, 8), replicas, TABLE_LENGTHS, strict=True)
        if count
    ]


def some_groups(*described: tuple[int, int, int, int]) -> list[ReplicaGroup]:
    """Groups of (tp, pp, count, max_tokens)."""
    return [ReplicaGroup(ParallelConfig(tp, pp), count, max_tokens) for tp, pp, count, max_tokens in described]


THREE_GROUPS = some_groups((1, 1, 3, 1024), (2, 1, 2, 2048), (4, 1, 1, 8192))


@st.composite
def small_cases(draw: st.DrawFn) -> tuple[list[ReplicaGroup], Bucketing]:
    num_groups, num_buckets = draw(st.sampled_from([(2, 2), (2, 3), (3, 2)]))
    boundaries = (500, 1000, 2000)[:num_buckets]
    groups = [
        ReplicaGroup(
            ParallelConfig(draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([1, 1, 2]))),
            draw(st.integers(1, 3)),
            draw(st.sampled_from([500, 1000, 2000])),
        )
        for _ in range(num_groups - 1)
    ]
    groups.append(ReplicaGroup(ParallelConfig(4, 1), draw(st.integers(1, 2)), 2000))
    counts = (*(draw(st.integers(0, 6)) for _ in range(num_buckets - 1)), draw(st.integers(1, 3)))
    return groups, Bucketing(boundaries, counts, padding_tokens=0)


def all_divisions(total: int, parts: int) -> Iterator[tuple[int, ...]]:
    """Return every way to divide `total` equal things into ordered parts."""
    if parts == 1:
        yield (total,)
        return
    for first in range(total + 1):
        yield from ((first, *rest) for rest in all_divisions(total - first, parts - 1))


def brute_force_eq_3(groups: list[ReplicaGroup], bucketing: Bucketing, model: MicroBatchModel) -> float:
    """Return the least makespan of Eq. 3 over all dispatches, its ceilings as they are printed."""
    best_s = math.inf
    columns = [list(all_divisions(total, len(groups))) for total in bucketing.counts]
    terms = []
    for group in groups:
        supported = [length for length in bucketing.boundaries if length <= group.max_tokens]
        terms.append(model.linear_terms(group.config, supported, group.max_tokens))
    for chosen in product(*columns):
        makespan_s = 0.0
        for (per_sequence, constant), group, row in zip(terms, groups, zip(*chosen, strict=True), strict=True):
            ceilings = [math.ceil(count / group.count) for count in row]
            if any(ceilings[len(per_sequence) :]):
                makespan_s = math.inf
                break
            seconds = float(np.dot(ceilings[: len(per_sequence)], per_sequence)) + constant * any(ceilings)
            makespan_s = max(makespan_s, seconds)
        best_s = min(best_s, makespan_s)
    return best_s


def assert_nothing_is_lost(groups: list[ReplicaGroup], bucketing: Bucketing, found: Dispatch) -> None:
    assert tuple(map(sum, zip(*found.counts, strict=True))) == bucketing.counts
    for group, replicas in zip(groups, found.replica_counts, strict=True):
        assert len(replicas) == group.count
        for replica in replicas:
            assert min(replica) >= 0
            for count, boundary in zip(replica, bucketing.boundaries, strict=True):
                assert count == 0 or boundary <= group.max_tokens
