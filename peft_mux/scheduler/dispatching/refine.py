"""Moves single sequences until the time model itself, rather than its linear form, finds no move that helps.

The linear form spreads the time of a full micro-batch over its sequences; a micro-batch that is not full costs more
than its share (L Eq. 10, the term t(r_j, s_j)). The ILP cannot see that, and it outweighs the ILP's own gap: see
benchmarks/lobra/dispatch.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from peft_mux.scheduler.dispatching.problem import RELATIVE_ROUNDING, DispatchProblem
from peft_mux.scheduler.replicas.configs import ReplicaGroup, TimeModel

_MOST_MOVES = 200
"""A bound on the time: a move costs up to groups times buckets calls of the time model. How many are made is printed by
benchmarks/lobra/dispatch.py; where the bound is reached, the dispatch says so."""


class Refined(NamedTuple):
    """Ceilings after moves.

    Attributes:
        ceilings: most sequences of each bucket on any replica of each group, int64 of shape `(groups, buckets)`.
        num_moves: number of moves that were made.
        is_final: whether no further move helps; else they were stopped by their number.
    """

    ceilings: np.ndarray
    num_moves: int
    is_final: bool


class _ChangedGroup(NamedTuple):
    """What a move leaves one group with.

    Attributes:
        group: index of the group that changes.
        ceilings: most sequences of each bucket on any of its replicas after the move, int64 of shape `(buckets,)`.
        replica_s: seconds of a replica with all these ceilings, by the time model.
    """

    group: int
    ceilings: np.ndarray
    replica_s: float


def refine(
    problem: DispatchProblem, groups: Sequence[ReplicaGroup], time_model: TimeModel, ceilings: np.ndarray
) -> Refined:
    """Return ceilings no slower by `step_s` than the given ones.

    One move takes one sequence of a bucket from each replica of the slowest group and gives them to another group, or
    to none where the ceilings have room already. Of all moves that one is made after which the slower of the two is
    fastest; ties go to the first bucket, then to the first group.

    Args:
        problem: the linear form of the step.
        groups: the replicas of the problem's rows.
        time_model: predicts the seconds of one replica.
        ceilings: where to start, int64 of shape `(groups, buckets)`; they hold every sequence and are left unchanged.
    """
    ceilings = ceilings.copy()
    group_s = [
        predict_replica_s(problem, group, time_model, row) for group, row in zip(groups, ceilings.tolist(), strict=True)
    ]
    for num_moves in range(_MOST_MOVES):
        move = _best_move(problem, groups, time_model, ceilings, group_s)
        if not move:
            return Refined(ceilings, num_moves, is_final=True)
        for changed in move:
            ceilings[changed.group], group_s[changed.group] = changed.ceilings, changed.replica_s
    return Refined(ceilings, _MOST_MOVES, is_final=False)


def predict_replica_s(
    problem: DispatchProblem, group: ReplicaGroup, time_model: TimeModel, counts: Sequence[int]
) -> float:
    """Return the seconds of one replica by the time model; 0 for no sequences.

    Args:
        problem: the linear form of the step, for the lengths of its buckets.
        group: the group that the replica belongs to.
        time_model: predicts the seconds of one replica.
        counts: sequences of each bucket on the replica; 0 where a bucket does not fit.
    """
    if not any(counts):
        return 0.0
    # A time model takes no length above `max_tokens`; lengths ascend, so that those that fit come first.
    fitting = int(np.searchsorted(problem.lengths, group.max_tokens, side="right"))
    lengths = problem.priced_lengths[:fitting].tolist()
    return group.slowness * float(time_model.step_s(group.config, counts[:fitting], lengths, group.max_tokens))


def _best_move(
    problem: DispatchProblem,
    groups: Sequence[ReplicaGroup],
    time_model: TimeModel,
    ceilings: np.ndarray,
    group_s: Sequence[float],
) -> list[_ChangedGroup]:
    """Return the one or two groups that the best move changes; none where no move helps."""
    # The step ends with the slowest group: only taking work off it can help.
    slowest = int(np.argmax(group_s))
    replicas = problem.num_replicas

    def with_added(group: int, bucket: int, number: int) -> _ChangedGroup:
        row = ceilings[group].copy()
        row[bucket] += number
        return _ChangedGroup(group, row, predict_replica_s(problem, groups[group], time_model, row.tolist()))

    # Gains within rounding do not count, or moves could go back and forth for ever.
    best_s = group_s[slowest] * (1 - RELATIVE_ROUNDING)
    move: list[_ChangedGroup] = []
    for bucket in np.flatnonzero(ceilings[slowest]).tolist():
        giver = with_added(slowest, bucket, -1)
        if giver.replica_s >= best_s:
            continue
        # So many sequences no ceilings have room for, once each replica of the slowest group gives one up.
        unplaced = int(problem.num_sequences[bucket] - replicas @ ceilings[:, bucket] + replicas[slowest])
        if unplaced <= 0:
            best_s, move = giver.replica_s, [giver]
            continue
        for group in np.flatnonzero(problem.fits[:, bucket]).tolist():
            if group == slowest:
                continue
            receiver = with_added(group, bucket, -(-unplaced // int(replicas[group])))
            after_s = max(giver.replica_s, receiver.replica_s)
            if after_s < best_s:
                best_s, move = after_s, [giver, receiver]
    return move
