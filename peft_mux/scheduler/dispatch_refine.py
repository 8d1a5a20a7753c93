"""Moves single sequences until the time model itself, rather than its linear form, finds no move that helps.

The linear form spreads the time of a full micro-batch over its sequences; a micro-batch that is not full costs more
than its share (L Eq. 10, the term t(r_j, s_j)). The ILP cannot see that, and it outweighs the ILP's own gap: see
benchmarks/lobra_dispatch.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from peft_mux.scheduler.dispatch_problem import DispatchProblem
from peft_mux.scheduler.replicas import ReplicaGroup, TimeModel

_MOST_MOVES = 200
"""A bound on the time: a move costs up to groups times buckets calls of the time model. How many are made is printed by
benchmarks/lobra_dispatch.py; where the bound is reached, the dispatch says so."""
_RELATIVE_IMPROVEMENT = 1e-9


class Refined(NamedTuple):
    """Ceilings after moves.

    Attributes:
        ceilings: int64 of shape `(groups, buckets)`.
        num_moves: that were made.
        is_final: whether no further move helps; else they were stopped by their number.
    """

    ceilings: np.ndarray
    num_moves: int
    is_final: bool


def refine(
    problem: DispatchProblem, groups: Sequence[ReplicaGroup], time_model: TimeModel, ceilings: np.ndarray
) -> Refined:
    """Return ceilings no slower by `step_s` than the given ones.

    One move takes one sequence of a bucket from each replica of the slowest group and gives them to another group, or
    to none where the ceilings have room already. Of all moves that one is made after which the slower of the two is
    fastest; ties go to the first bucket, then to the first group.
    """
    ceilings = ceilings.copy()
    replicas = problem.num_replicas

    def replica_s(group: int, row: np.ndarray) -> float:
        return predict_replica_s(problem, groups[group], time_model, row.tolist())

    group_s = [replica_s(group, row) for group, row in enumerate(ceilings)]
    for num_moves in range(_MOST_MOVES):
        slowest = int(np.argmax(group_s))
        best_s = group_s[slowest] * (1 - _RELATIVE_IMPROVEMENT)
        move: list[tuple[int, np.ndarray, float]] = []
        for bucket in np.flatnonzero(ceilings[slowest]).tolist():
            giver = _with_added(ceilings[slowest], bucket, -1)
            giver_s = replica_s(slowest, giver)
            homeless = int(problem.num_sequences[bucket] - replicas @ ceilings[:, bucket] + replicas[slowest])
            if giver_s >= best_s:
                continue
            if homeless <= 0:
                best_s, move = giver_s, [(slowest, giver, giver_s)]
                continue
            for group in np.flatnonzero(problem.fits[:, bucket]).tolist():
                if group == slowest:
                    continue
                receiver = _with_added(ceilings[group], bucket, -(-homeless // int(replicas[group])))
                receiver_s = replica_s(group, receiver)
                if max(giver_s, receiver_s) < best_s:
                    best_s = max(giver_s, receiver_s)
                    move = [(slowest, giver, giver_s), (group, receiver, receiver_s)]
        if not move:
            return Refined(ceilings, num_moves, is_final=True)
        for group, row, seconds in move:
            ceilings[group], group_s[group] = row, seconds
    return Refined(ceilings, _MOST_MOVES, is_final=False)


def predict_replica_s(
    problem: DispatchProblem, group: ReplicaGroup, time_model: TimeModel, counts: Sequence[int]
) -> float:
    """Return the seconds of one replica with `counts` of each bucket, by the time model; 0 for no sequences."""
    if not any(counts):
        return 0.0
    fitting = int(np.searchsorted(problem.lengths, group.max_tokens, side="right"))
    lengths = problem.lengths[:fitting].tolist()
    return float(time_model.step_s(group.config, counts[:fitting], lengths, group.max_tokens))


def _with_added(row: np.ndarray, bucket: int, number: int) -> np.ndarray:
    changed = row.copy()
    changed[bucket] += number
    return changed
