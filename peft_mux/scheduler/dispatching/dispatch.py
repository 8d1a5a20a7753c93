"""Deals what a group of replicas gets to each of them: an even split of counts, and which sequence goes where."""

# MERGED: Moves single sequences until the time model itself, rather than its linear form, finds no move that helps.
# MERGED: The linear form spreads the time of a full micro-batch over its sequences; a micro-batch that is not full
# MERGED: costs more
# MERGED: than its share (L Eq. 10, the term t(r_j, s_j)). The ILP cannot see that, and it outweighs the ILP's own
# MERGED: gap: see
# MERGED: benchmarks/lobra/dispatch.py.
# MERGED: Which replica trains which sequences of a step (L section 4.3, Eq. 3).
# MERGED: `dispatch` answers with numbers per group and replica, `assign_sequences` with the sequences themselves.
# MERGED: Which replicas
# MERGED: there are is decided once, in `scheduler/deployment/`; steps are solved ahead of time in `ahead.py`.

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from peft_mux.scheduler.dispatching.bucketing import Bucketing
from peft_mux.scheduler.dispatching.ilp import check_solver_name, solve_ilp
from peft_mux.scheduler.dispatching.problem import (
    RELATIVE_ROUNDING,
    DispatchProblem,
    build_problem,
    carried_over,
    ceilings_of,
    counts_from_ceilings,
    length_based,
    relocate,
    uniform,
)
from peft_mux.scheduler.replicas.configs import ReplicaGroup, TimeModel


def split_within_group(
    counts: Sequence[int], num_replicas: int, sequence_s: Sequence[float] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Return what each replica of a group gets of each bucket: `[replica][bucket]`, adding up to `counts`.

    Every replica gets `counts[j] // num_replicas` or one more, so none exceeds the ceiling of L Eq. 3. What is over
    goes, costliest bucket first, to the replicas that have least of it so far in seconds; so two replicas differ by at
    most the costliest sequence.

    Args:
        counts: sequences of the group in each bucket.
        num_replicas: number of equal replicas in the group.
        sequence_s: seconds of one sequence of each bucket; by default those of longer buckets are taken to be larger.

    Raises:
        ValueError: for fewer than one replica, a negative count, or not one time for each bucket.
    """
    if num_replicas < 1:
        raise ValueError(f"num_replicas is {num_replicas}; allowed: 1 or more.")
    if min(counts, default=0) < 0:
        raise ValueError(f"counts are {list(counts)}; allowed: 0 or more each.")
    costs = np.arange(1.0, len(counts) + 1) if sequence_s is None else np.asarray(sequence_s, dtype=np.float64)
    if costs.shape != (len(counts),):
        raise ValueError(f"sequence_s has shape {costs.shape}; allowed: ({len(counts)},), one for each of counts.")
    each, rest = np.divmod(np.asarray(counts, dtype=np.int64), num_replicas)
    shares = np.tile(each, (num_replicas, 1))
    extra_s = np.zeros(num_replicas)
    for bucket in np.argsort(-costs, kind="stable"):
        if rest[bucket]:
            takers = np.argsort(extra_s, kind="stable")[: rest[bucket]]
            shares[takers, bucket] += 1
            extra_s[takers] += costs[bucket]
    return tuple(tuple(row) for row in shares.tolist())


def deal_out(members: np.ndarray, quotas: Sequence[int]) -> list[np.ndarray]:
    """Return the members of each of several shares of given sizes, dealt evenly along their order.

    Members that are ordered by length thus reach every share in all lengths: packed without padding, sequences of one
    bucket still differ.

    Args:
        members: what is dealt, of shape `(sum(quotas),)`.
        quotas: how many members each share gets.
    """
    # The members of a share lie at equal distances between 0 and 1, half a distance from both ends.
    positions = [
        ((np.arange(quota) + 0.5) / quota, np.full(quota, share)) for share, quota in enumerate(quotas) if quota
    ]
    if not positions:
        return [members[:0] for _ in quotas]
    places, shares = (np.concatenate(parts) for parts in zip(*positions, strict=True))
    # Shares that meet at the same place take turns by their number, so that the answer is the same everywhere.
    owners = shares[np.lexsort((shares, places))]
    return [members[owners == share] for share in range(len(quotas))]


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


FORMAT_VERSION = 1
DEFAULT_RELATIVE_GAP = 0.01
"""Far below the error of the linear form; a smaller one makes no faster steps (benchmarks/lobra/dispatch.py)."""
DEFAULT_TIME_LIMIT_S = 2.0

Policy = Literal["balanced", "length", "uniform"]
Status = Literal["optimal", "feasible within the time limit", "greedy fallback", "by moves", "by rule"]
_ReplicaCounts = tuple[tuple[tuple[int, ...], ...], ...]
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
            moves" where the step was too short to ask it; "by rule" for the policies that solve nothing.
        note: why a fallback was taken, or that moves were stopped by their number; empty otherwise.
        solve_s: seconds that finding it took.
    """

    boundaries: tuple[int, ...]
    replica_counts: _ReplicaCounts
    group_s: tuple[float, ...]
    policy: Policy
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

    def summary(self) -> str:
        """Return a table with one line for each group."""
        lines = [
            f"dispatch  {self.policy}, {self.status}, {self.makespan_s:.3f} s a step, "
            f"solved in {self.solve_s * 1e3:.0f} ms",
            "  padded to " + " ".join(f"{boundary:>6}" for boundary in self.boundaries),
        ]
        for number, (counts, seconds) in enumerate(zip(self.counts, self.group_s, strict=True)):
            lines.append(f"  group {number:>3} " + " ".join(f"{count:>6}" for count in counts) + f"  {seconds:.3f} s")
        return "\n".join([*lines, *([f"note  {self.note}"] if self.note else [])])

    def __str__(self) -> str:
        """Return `summary()`."""
        return self.summary()

    def to_json(self) -> str:
        """Return the dispatch as JSON."""
        return json.dumps({"format_version": FORMAT_VERSION, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> Dispatch:
        """Return the dispatch that `to_json` wrote.

        Raises:
            ValueError: for another format version.
        """
        data: dict[str, Any] = json.loads(text)
        version = data.pop("format_version", None)
        if version != FORMAT_VERSION:
            raise ValueError(f"format_version: got {version!r}; allowed: {FORMAT_VERSION}.")
        replica_counts = tuple(tuple(tuple(row) for row in group) for group in data.pop("replica_counts"))
        boundaries, group_s = tuple(data.pop("boundaries")), tuple(data.pop("group_s"))
        return cls(boundaries=boundaries, replica_counts=replica_counts, group_s=group_s, **data)


def dispatch(
    groups: Sequence[ReplicaGroup],
    bucketing: Bucketing,
    time_model: TimeModel,
    *,
    policy: Policy = "balanced",
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
    with work moved off its slowest group. Where the plain dispatch by length is faster all the same, it is taken. A
    time limit that is reached makes the answer depend on the machine; processes that must agree take it from one.

    Args:
        groups: the replicas that are deployed, by configuration.
        bucketing: padded lengths of the step, and how many sequences each has.
        time_model: predicts the seconds of one replica.
        policy: "balanced", as above; "length", each bucket to the smallest configuration that supports it (L Figure
            4(c)); "uniform", each bucket evenly to all replicas that support it (L Figure 4(b)).
        warm_start: the last step's dispatch over the same groups, which bounds the search.
        time_limit_s: seconds after which the solver's best answer so far is taken.
        relative_gap: how far above the optimum of the linear form an answer may be, relative to it.
        solver: name of a PuLP solver such as "HiGHS", a PuLP solver itself, or None for the bundled CBC.
        pads: whether sequences are padded to their bucket, as in the paper; else they are priced by its mean length.
        least_solved_s: steps that moves alone make shorter than this many seconds are not given to the solver, as its
            start would take a good part of them.

    Raises:
        ValueError: for a bucket longer than every replica supports, no groups, an unknown policy or solver, a limit of
            0 s or a negative gap, or a warm start over other groups.
    """
    start = time.perf_counter()
    _check_options(policy, time_limit_s, relative_gap, warm_start, groups)
    problem = build_problem(groups, bucketing, time_model, pads=pads)
    status: Status = "by rule"
    note = ""
    if policy in _RULES:
        candidates = [_RULES[policy](problem)]
    else:
        limits = {"time_limit_s": time_limit_s, "relative_gap": relative_gap}
        found, status, note = _balance(problem, warm_start, limits, solver, least_solved_s)
        balanced, note = _refined_counts(problem, groups, time_model, found, note)
        candidates = [balanced, length_based(problem)]
    splits = [_split_groups(problem, counts) for counts in candidates]
    times = [_predict_group_s(problem, groups, time_model, split) for split in splits]
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


def assign_sequences(dispatch: Dispatch, bucketing: Bucketing, lengths: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Return which sequences each replica trains: positions in `lengths`, ascending, replicas in the order of groups.

    Within a bucket every replica gets sequences from all over its range of lengths. Depends on nothing but the
    arguments.

    Args:
        dispatch: how many sequences of each bucket each replica gets.
        bucketing: the buckets that were dispatched.
        lengths: lengths of the step's sequences, in tokens, as they were bucketed.

    Raises:
        ValueError: where the lengths are not those that were bucketed and dispatched.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    buckets = bucketing.bucket_of(lengths)
    replicas = [replica for group in dispatch.replica_counts for replica in group]
    found = tuple(np.bincount(buckets, minlength=bucketing.num_buckets).tolist())
    dispatched = tuple(map(sum, zip(*replicas, strict=True)))
    if dispatch.boundaries != bucketing.boundaries or found != dispatched:
        raise ValueError(
            f"lengths fill buckets {bucketing.boundaries} with {found} sequences; allowed: what was dispatched, "
            f"{dispatched} at {dispatch.boundaries}. Pass the lengths of the same step."
        )
    parts: list[list[np.ndarray]] = [[] for _ in replicas]
    # `deal_out` spreads what is ordered by length over all replicas.
    by_length = np.argsort(-sizes, kind="stable")
    for bucket in range(bucketing.num_buckets):
        members = by_length[buckets[by_length] == bucket]
        for part, share in zip(parts, deal_out(members, [replica[bucket] for replica in replicas]), strict=True):
            part.append(share)
    return tuple(tuple(np.sort(np.concatenate(part)).tolist()) for part in parts)


def _balance(
    problem: DispatchProblem,
    warm_start: Dispatch | None,
    limits: dict[str, float],
    solver: Any,
    least_solved_s: float,
) -> tuple[np.ndarray, Status, str]:
    """Return ceilings by the linear form, how the solver fared, and what it complained of."""
    if isinstance(solver, str):
        _check_solver_where_possible(solver)
    # The fastest of these bounds the solver's makespan from above, and is the answer where the solver fails.
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
    return answer.ceilings, "optimal" if answer.proven else "feasible within the time limit", ""


def _refined_counts(
    problem: DispatchProblem, groups: Sequence[ReplicaGroup], time_model: TimeModel, ceilings: np.ndarray, note: str
) -> tuple[np.ndarray, str]:
    """Return counts after single moves by the time model itself, and the note, longer where moves were stopped."""
    # The ILP saw the linear form alone; micro-batches that are not full cost more than that.
    refined = refine(problem, groups, time_model, ceilings)
    if not refined.is_final:
        note = "; ".join(filter(None, (note, f"moves were stopped after {refined.num_moves}, more may help")))
    return counts_from_ceilings(problem, refined.ceilings), note


def _split_groups(problem: DispatchProblem, counts: np.ndarray) -> _ReplicaCounts:
    """Return `[group][replica][bucket]` of `[group][bucket]`."""
    finite_s = np.where(problem.fits, problem.sequence_s, 0.0)
    return tuple(
        split_within_group(row.tolist(), replicas, seconds)
        for row, replicas, seconds in zip(counts, problem.num_replicas.tolist(), finite_s, strict=True)
    )


def _predict_group_s(
    problem: DispatchProblem, groups: Sequence[ReplicaGroup], time_model: TimeModel, split: _ReplicaCounts
) -> tuple[float, ...]:
    """Return the seconds of each group's slowest replica; equal rows of counts are predicted once."""
    return tuple(
        max(predict_replica_s(problem, group, time_model, counts) for counts in dict.fromkeys(replicas))
        for group, replicas in zip(groups, split, strict=True)
    )


def _check_options(
    policy: str, time_limit_s: float, relative_gap: float, warm_start: Dispatch | None, groups: Sequence[ReplicaGroup]
) -> None:
    """Refuse options of `dispatch` that are out of range, and a warm start over other groups."""
    if policy != "balanced" and policy not in _RULES:
        raise ValueError(f'policy is {policy!r}; allowed: "balanced", "length" or "uniform".')
    if not time_limit_s > 0:
        raise ValueError(f"time_limit_s is {time_limit_s}; allowed: more than 0.")
    if not relative_gap >= 0:
        raise ValueError(f"relative_gap is {relative_gap}; allowed: 0 or more, such as 0.01 for 1 %.")
    if warm_start is not None:
        got = [len(replicas) for replicas in warm_start.replica_counts]
        needed = [group.count for group in groups]
        if got != needed:
            raise ValueError(
                f"warm_start has groups of {got} replicas; allowed: {needed}. Pass None after a redeployment."
            )


def _check_solver_where_possible(name: str) -> None:
    """Refuse a name that PuLP does not know, where PuLP is there to be asked."""
    try:
        check_solver_name(name)
    except ImportError:
        return  # without PuLP nothing is known of its solvers, and the fallback says so
