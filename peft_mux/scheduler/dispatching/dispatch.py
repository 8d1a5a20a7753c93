"""How many sequences of a step each replica trains (L section 4.3, Eq. 3), and which.

    bucket_boundaries    padded lengths of the step (Eq. 4)                    sequences -> buckets
    dispatch
      solve_ilp          Eq. 3 in the linear form of the time model            buckets -> ceilings of each group
      refine             single moves by the time model itself
      split_within_group an even split                                         groups -> replicas
    deal_buckets         which sequence goes where                             sequences -> replicas
    ReplicaRates         how much slower each replica is, learned from its share of each step

Which replicas there are is decided once, in `scheduler/deployment/`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any, Literal

import numpy as np

from peft_mux.scheduler.dispatching.bucketing import Bucketing
from peft_mux.scheduler.dispatching.ilp import solve_ilp
from peft_mux.scheduler.dispatching.problem import (
    DispatchProblem,
    build_problem,
    carried_over,
    ceilings_of,
    counts_from_ceilings,
    length_based,
    relocate,
    uniform,
)
from peft_mux.scheduler.names import Dispatching
from peft_mux.scheduler.replicas.time_model import ReplicaGroup, ReplicaTimeModel
from peft_mux.scheduler.units import RELATIVE_ROUNDING

DEFAULT_RELATIVE_GAP = 0.01
"""Far below the error of the linear form; a smaller one makes no faster steps (benchmarks/lobra/dispatch.py)."""
DEFAULT_TIME_LIMIT_S = 2.0
_MOST_MOVES = 200
"""A bound on the time: a move costs up to groups times buckets calls of the time model. How many are made is printed by
benchmarks/lobra/dispatch.py; if the bound is reached, the dispatch says so."""

Status = Literal["optimal", "feasible within the time limit", "greedy fallback", "by moves", "by rule"]
_RULES: dict[str, Callable[[DispatchProblem], np.ndarray]] = {"length": length_based, "uniform": uniform}


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Where the sequences of one step go, and how long that should take.

    Attributes:
        boundaries: padded length of each bucket in tokens.
        replica_counts: how many sequences each replica gets, as `[group][replica][bucket]`.
        group_s: predicted seconds of each group's slowest replica.
        policy: the policy by which sequences were spread.
        status: how the solver fared: "optimal" in the linear form of the time model, within the relative gap; "by
            moves" if the step was too short to ask it; "by rule" for the policies that solve nothing.
        note: why a fallback was taken, or that moves were stopped by their number; empty otherwise.
        solve_s: seconds that finding it took.
    """

    boundaries: tuple[int, ...]
    replica_counts: tuple[tuple[tuple[int, ...], ...], ...]
    group_s: tuple[float, ...]
    policy: Dispatching
    status: Status
    note: str
    solve_s: float

    @property
    def counts(self) -> tuple[tuple[int, ...], ...]:
        """Sequences as `[group][bucket]` (d_ij in L)."""
        return tuple(tuple(map(sum, zip(*replicas, strict=True))) for replicas in self.replica_counts)

    @property
    def makespan_s(self) -> float:
        """Predicted seconds of the slowest group, and so of the step."""
        return max(self.group_s)


def dispatch(
    groups: Sequence[ReplicaGroup],
    bucketing: Bucketing,
    time_model: ReplicaTimeModel,
    *,
    policy: Dispatching = "balanced",
    warm_start: Dispatch | None = None,
    time_limit_s: float = DEFAULT_TIME_LIMIT_S,
    relative_gap: float = DEFAULT_RELATIVE_GAP,
    solver: Any = None,
    pads: bool = True,
    least_solved_s: float = 0.0,
) -> Dispatch:
    """Return how the sequences of a step are spread over the groups.

    "balanced" minimises the time of the slowest replica: Eq. 3 in the linear form of the time model, then single moves
    as long as they help by the time model itself. Without an answer of the solver it starts from the dispatch by length
    with work moved off its slowest group. If the plain dispatch by length is still faster, it is used. A time
    limit that is reached makes the answer depend on the machine; processes that must agree take it from one.

    Args:
        groups: the replicas that are deployed, by configuration.
        bucketing: padded lengths of the step, and how many sequences each has.
        time_model: predicts the seconds of one replica.
        policy: "balanced", as above; "length", each bucket to the smallest configuration that supports it (L Figure
            4(c)); "uniform", each bucket evenly to all replicas that support it (L Figure 4(b)).
        warm_start: the last step's dispatch over the same groups, which bounds the search.
        time_limit_s: seconds after which the solver's best answer so far is taken.
        relative_gap: how far above the optimum of the linear form an answer may be, relative to it.
        solver: name of a PuLP solver, a PuLP solver itself, or None for HiGHS if it is installed, else bundled CBC.
        pads: whether sequences are padded to their bucket, as in the paper; otherwise they are priced by its mean
            length.
        least_solved_s: steps that moves alone make shorter than this many seconds are not given to the solver, as its
            start would take a good part of them.

    Raises:
        ValueError: for a bucket longer than every replica supports, an unknown policy, or a warm start of other groups.
    """
    start = time.perf_counter()
    if policy != "balanced" and policy not in _RULES:
        raise ValueError(f'policy must be "balanced", "length" or "uniform", got {policy!r}.')
    if warm_start is not None:
        got, needed = [len(replicas) for replicas in warm_start.replica_counts], [group.count for group in groups]
        if got != needed:
            raise ValueError(
                f"warm_start must have groups of {needed} replicas, got {got}. Pass None after a redeployment."
            )
    problem = build_problem(groups, bucketing, time_model, pads=pads)
    status: Status = "by rule"
    note = ""
    if policy in _RULES:
        candidates = [_RULES[policy](problem)]
    else:
        limits = {"time_limit_s": time_limit_s, "relative_gap": relative_gap}
        ceilings, status, note = _balanced(problem, warm_start, limits, solver, least_solved_s)
        # The ILP saw the linear form alone; micro-batches that are not full cost more than that.
        ceilings, num_moves = refine(problem, groups, time_model, ceilings)
        if num_moves == _MOST_MOVES:
            note = "; ".join(filter(None, (note, f"moves were stopped after {num_moves}, more may help")))
        candidates = [counts_from_ceilings(problem, ceilings), length_based(problem)]
    finite_s = np.where(problem.fits, problem.sequence_s, 0.0)
    splits = [
        tuple(
            split_within_group(row.tolist(), group.count, seconds)
            for row, group, seconds in zip(counts, groups, finite_s, strict=True)
        )
        for counts in candidates
    ]
    # Replicas with equal counts are predicted once.
    times = [
        tuple(
            max(predict_replica_s(problem, group, time_model, row) for row in dict.fromkeys(replicas))
            for group, replicas in zip(groups, split, strict=True)
        )
        for split in splits
    ]
    # By the time model itself, which the linear form only approximates; the balanced one wins a tie.
    best = min(range(len(candidates)), key=lambda index: max(times[index]))
    return Dispatch(
        boundaries=bucketing.boundaries,
        replica_counts=splits[best],
        group_s=times[best],
        policy=policy,
        status=status,
        note=note,
        solve_s=time.perf_counter() - start,
    )


def _balanced(
    problem: DispatchProblem,
    warm_start: Dispatch | None,
    limits: dict[str, float],
    solver: Any,
    least_solved_s: float,
) -> tuple[np.ndarray, Status, str]:
    """Return ceilings by the linear form, how the solver fared, and its error."""
    # The fastest of these bounds the solver's makespan from above, and is the answer if the solver fails.
    starts = [length_based(problem)]
    if (problem.fits[:, problem.num_sequences > 0].sum(axis=0) <= 1).all():
        # Every bucket fits one group only: there is nothing to choose.
        return ceilings_of(problem, starts[0]), "optimal", ""
    if warm_start is not None:
        last_counts = np.asarray(warm_start.counts, dtype=np.int64)
        starts.append(carried_over(problem, np.asarray(warm_start.boundaries, dtype=np.int64), last_counts))
    starts.append(uniform(problem))
    known = min((relocate(problem, counts) for counts in starts), key=lambda x: problem.group_s(x).max())
    if problem.group_s(known).max() < least_solved_s:
        return known, "by moves", ""
    try:
        answer = solve_ilp(problem, known, solver=solver, start_from_known=warm_start is not None, **limits)
    except Exception as error:  # any solver may be plugged in, and a step must not fail for want of one
        return known, "greedy fallback", f"the solver failed: {type(error).__name__}: {error}"
    if answer is None:
        return known, "greedy fallback", "the solver found no solution within the time limit"
    ceilings, is_proven = answer
    return ceilings, "optimal" if is_proven else "feasible within the time limit", ""


def refine(
    problem: DispatchProblem, groups: Sequence[ReplicaGroup], time_model: ReplicaTimeModel, ceilings: np.ndarray
) -> tuple[np.ndarray, int]:
    """Move single sequences until the time model itself, rather than its linear form, finds no move that helps.

    The linear form spreads the time of a full micro-batch over its sequences; a micro-batch that is not full costs more
    than its share (L Eq. 10, the term t(r_j, s_j)). The ILP cannot see that, and it outweighs the ILP's own gap: see
    benchmarks/lobra/dispatch.py.

    One move takes one sequence of a bucket from each replica of the slowest group and gives them to another group, or
    to none if the ceilings have room already. Of all moves that one is made after which the slower of the two is
    fastest; ties go to the first bucket, then to the first group.

    Args:
        problem: the linear form of the step.
        groups: the replicas of the problem's rows.
        time_model: predicts the seconds of one replica.
        ceilings: where to start, int64 of shape `(groups, buckets)`; they hold every sequence and are left unchanged.

    Returns:
        Ceilings that are no slower, and the number of moves; if that is `_MOST_MOVES`, more may help.
    """
    ceilings = ceilings.copy()
    replicas = problem.num_replicas

    def changed(group: int, bucket: int, number: int) -> tuple[int, np.ndarray, float]:
        """Return a group, its ceilings with so many sequences more, and the seconds of a replica with all of them."""
        row = ceilings[group].copy()
        row[bucket] += number
        return group, row, predict_replica_s(problem, groups[group], time_model, row.tolist())

    group_s = [changed(group, 0, 0)[2] for group in range(len(groups))]
    for num_moves in range(_MOST_MOVES):
        # The step ends with the slowest group: only taking work off it can help.
        slowest = int(np.argmax(group_s))
        # Gains within rounding do not count, or moves could go back and forth without end.
        best_s = group_s[slowest] * (1 - RELATIVE_ROUNDING)
        best_move: list[tuple[int, np.ndarray, float]] = []
        for bucket in np.flatnonzero(ceilings[slowest]).tolist():
            giver = changed(slowest, bucket, -1)
            giver_s = giver[2]
            if giver_s >= best_s:
                continue
            # So many sequences no ceilings have room for, once each replica of the slowest group gives one up.
            unplaced = int(problem.num_sequences[bucket] - replicas @ ceilings[:, bucket] + replicas[slowest])
            if unplaced <= 0:
                best_s, best_move = giver_s, [giver]
                continue
            for group in np.flatnonzero(problem.fits[:, bucket]).tolist():
                if group == slowest:
                    continue
                receiver = changed(group, bucket, -(-unplaced // int(replicas[group])))
                after_s = max(giver_s, receiver[2])
                if after_s < best_s:
                    best_s, best_move = after_s, [giver, receiver]
        if not best_move:
            return ceilings, num_moves
        for group, row, seconds in best_move:
            ceilings[group], group_s[group] = row, seconds
    return ceilings, _MOST_MOVES


def predict_replica_s(
    problem: DispatchProblem, group: ReplicaGroup, time_model: ReplicaTimeModel, counts: Sequence[int]
) -> float:
    """Return the seconds of one replica by the time model; 0 for no sequences.

    Args:
        problem: the linear form of the step, for the lengths of its buckets.
        group: the group that the replica belongs to.
        time_model: predicts the seconds of one replica.
        counts: sequences of each bucket on the replica; 0 for a bucket that does not fit.
    """
    if not any(counts):
        return 0.0
    # A time model takes no length above `max_tokens`; lengths ascend, so that those that fit come first.
    fitting = int(np.searchsorted(problem.lengths, group.max_tokens, side="right"))
    lengths = problem.priced_lengths[:fitting].tolist()
    return group.slowness * float(time_model.step_s(group.config, counts[:fitting], lengths, group.max_tokens))


def split_within_group(
    counts: Sequence[int], num_replicas: int, sequence_s: Sequence[float] | np.ndarray
) -> tuple[tuple[int, ...], ...]:
    """Return what each replica of a group gets of each bucket: `[replica][bucket]`, adding up to `counts`.

    Every replica gets `counts[j] // num_replicas` or one more, so none exceeds the ceiling of L Eq. 3. The remainder
    goes, costliest bucket first, to the replicas that have least of it so far in seconds; so two replicas differ by at
    most the costliest sequence.

    Args:
        counts: sequences of the group in each bucket.
        num_replicas: number of equal replicas in the group.
        sequence_s: seconds of one sequence of each bucket.
    """
    costs = np.asarray(sequence_s, dtype=np.float64)
    each, rest = np.divmod(np.asarray(counts, dtype=np.int64), num_replicas)
    shares = np.tile(each, (num_replicas, 1))
    extra_s = np.zeros(num_replicas)
    for bucket in np.argsort(-costs, kind="stable"):
        if rest[bucket]:
            takers = np.argsort(extra_s, kind="stable")[: rest[bucket]]
            shares[takers, bucket] += 1
            extra_s[takers] += costs[bucket]
    return tuple(tuple(row) for row in shares.tolist())


def deal_buckets(order: np.ndarray, buckets: np.ndarray, quotas: Sequence[Sequence[int]]) -> np.ndarray:
    """Deal the members of each bucket to several shares, evenly along an order of all members.

    Members that are ordered by length thus reach every share in all lengths: packed without padding, sequences of one
    bucket still differ.

    Args:
        order: all members in the order in which they are dealt, int64 of shape `(members,)`.
        buckets: the bucket of each member, int64 of shape `(members,)`.
        quotas: how many members of each bucket each share gets; they add up to the members of the bucket.

    Returns:
        The share of each member, int64 of shape `(members,)`.
    """
    share_of_member = np.full(len(order), -1, dtype=np.int64)
    for bucket, numbers in enumerate(zip(*quotas, strict=True)):
        # The members of a share lie at equal distances between 0 and 1, half a distance from both ends.
        places = np.concatenate([(np.arange(number) + 0.5) / max(1, number) for number in numbers])
        shares = np.repeat(np.arange(len(numbers)), numbers)
        # Shares that meet at the same place take turns by their number, so that the answer is the same everywhere.
        share_of_member[order[buckets[order] == bucket]] = shares[np.lexsort((shares, places))]
    assert (share_of_member >= 0).all(), "a sequence was lost"
    return share_of_member


_RATE_WEIGHT = 0.3
"""Of the last step; a replica that becomes slow is known to 80 % after five."""
_LARGEST_RATE_STEP = math.log(4.0)
"""A single step moves a rate no further than this times `_RATE_WEIGHT`, in logarithms: one odd step does little."""
_RATE_GRAIN = 0.05
"""Rates that differ by less count as equal, so that equal replicas stay so."""


class ReplicaRates:
    """Follows the rates of replicas over the steps of a run; at first all are equally fast.

    Example:
        >>> rates = ReplicaRates(2)
        >>> for _ in range(20):
        ...     rates.observe(expected=[1.0, 1.0], measured=[0.5, 1.0])
        >>> rates.slowness
        (1.0, 2.0)
    """

    def __init__(self, num_replicas: int) -> None:
        self._logs = [0.0] * num_replicas

    @property
    def slowness(self) -> tuple[float, ...]:
        """Seconds that each replica takes for work that takes the fastest one 1 s."""
        fastest = min(self._logs)
        grains = [round((log - fastest) / _RATE_GRAIN) for log in self._logs]
        return tuple(round(math.exp(_RATE_GRAIN * number), 2) for number in grains)

    def observe(self, expected: Sequence[float], measured: Sequence[float]) -> None:
        """Compare the time of each replica with the predicted time of its share, from the same predictor for all.

        Nothing is learned of a replica without a share, or one that was not timed.

        Args:
            expected: what each share should take on a replica that is as fast as its kind, in any unit.
            measured: seconds that each replica took for its share.
        """
        logs = {
            number: math.log(took / should)
            for number, (should, took) in enumerate(zip(expected, measured, strict=True))
            if should > 0 and took > 0
        }
        # A rate is relative to the other replicas: with one alone, it may be the prediction that is off.
        if len(logs) < 2:
            return
        typical = median(logs.values()) - median(self._logs[number] for number in logs)
        for number, log in logs.items():
            change = log - typical - self._logs[number]
            self._logs[number] += _RATE_WEIGHT * max(-_LARGEST_RATE_STEP, min(_LARGEST_RATE_STEP, change))
