"""`ReplicaRates`: how much slower each replica is than the others, learnt from what its share of each step took."""

# MERGED: Solves the dispatch of the next step on a background thread while this one runs (L section 4.3).
# MERGED: Bundled CBC is a process of its own, so that solving takes nothing from the thread that trains but a core.

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from statistics import median
from types import TracebackType
from typing import Any

from peft_mux.scheduler.dispatching.bucketing import (
    DEFAULT_INTERVAL_TOKENS,
    DEFAULT_NUM_BUCKETS,
    Bucketing,
    bucket_boundaries,
)
from peft_mux.scheduler.dispatching.dispatch import (
    DEFAULT_RELATIVE_GAP,
    DEFAULT_TIME_LIMIT_S,
    Dispatch,
    Policy,
    assign_sequences,
    dispatch,
)
from peft_mux.scheduler.replicas.configs import ReplicaGroup, TimeModel

_WEIGHT = 0.3
"""Of the last step; a replica that is slow from now on is known to 80 % after five."""
_LARGEST_STEP = math.log(4.0)
"""A single step moves a rate no further than this times `_WEIGHT`, in logarithms: one odd step does little."""
_GRAIN = 0.05
"""Rates that differ by less count as equal, so that equal replicas stay so."""


class ReplicaRates:
    """Follows the rates of replicas over the steps of a run.

    Args:
        num_replicas: number of replicas.

    Example:
        >>> rates = ReplicaRates(2)
        >>> for _ in range(20):
        ...     rates.observe(expected=[1.0, 1.0], measured=[0.5, 1.0])
        >>> rates.slowness
        (1.0, 2.0)
    """

    def __init__(self, num_replicas: int) -> None:
        """Take all replicas for equally fast."""
        self._logs = [0.0] * num_replicas

    @property
    def slowness(self) -> tuple[float, ...]:
        """What each replica takes for work that takes the fastest one 1 s, in seconds."""
        fastest = min(self._logs)
        grains = [round((log - fastest) / _GRAIN) for log in self._logs]
        return tuple(round(math.exp(_GRAIN * number), 2) for number in grains)

    def observe(self, expected: Sequence[float], measured: Sequence[float]) -> None:
        """Compare what each replica took with what its share should take, of the same hands for all.

        A replica without a share, or that was not timed, tells nothing of itself.

        Args:
            expected: what each share should take on a replica that is as fast as its kind, in any unit.
            measured: seconds that each replica took for its share.
        """
        logs = {
            number: math.log(took / should)
            for number, (should, took) in enumerate(zip(expected, measured, strict=True))
            if should > 0 and took > 0
        }
        # A replica's rate is told from the others': alone, it may be the prediction that is off.
        if len(logs) < 2:
            return
        typical = median(logs.values()) - median(self._logs[number] for number in logs)
        for number, log in logs.items():
            change = log - typical - self._logs[number]
            self._logs[number] += _WEIGHT * max(-_LARGEST_STEP, min(_LARGEST_STEP, change))


@dataclass(frozen=True, slots=True)
class StepDispatch:
    """All that a step needs to know of where its sequences go.

    Attributes:
        bucketing: the padded lengths that were chosen for this step.
        dispatch: how many sequences each replica gets, and the predicted seconds.
        assignment: positions in the step's lengths for each replica, replicas in the order of groups.
        number: which of the ways to cut the step was taken, counted from 0.
    """

    bucketing: Bucketing
    dispatch: Dispatch
    assignment: tuple[tuple[int, ...], ...]
    number: int = 0


def plan_step(
    lengths: Sequence[int],
    groups: Sequence[ReplicaGroup],
    time_model: TimeModel,
    *,
    num_buckets: int = DEFAULT_NUM_BUCKETS,
    interval: int = DEFAULT_INTERVAL_TOKENS,
    policy: Policy = "balanced",
    warm_start: Dispatch | None = None,
    time_limit_s: float = DEFAULT_TIME_LIMIT_S,
    relative_gap: float = DEFAULT_RELATIVE_GAP,
    solver: Any = None,
    pads: bool = True,
    least_solved_s: float = 0.0,
) -> StepDispatch:
    """Bucket, dispatch and assign the sequences of one step.

    Args:
        lengths: lengths of the step's sequences, in tokens, in any order.
        groups: the replicas that are deployed, by configuration.
        time_model: predicts the seconds of one replica.
        num_buckets: most buckets of padded lengths (R in L).
        interval: distance of candidate boundaries of buckets, in tokens.
        policy: the policy of `dispatch` by which sequences are spread.
        warm_start: the last step's dispatch over the same groups, which bounds the search.
        time_limit_s: seconds after which the solver's best answer so far is taken.
        relative_gap: how far above the optimum of the linear form an answer may be, relative to it.
        solver: name of a PuLP solver such as "HiGHS", a PuLP solver itself, or None for the bundled CBC.
        pads: whether sequences are padded to their bucket, as in the paper; else they are priced by its mean length.
        least_solved_s: steps that moves alone make shorter than this many seconds are not given to the solver.

    Raises:
        ValueError: for a sequence that no replica supports, and what `bucket_boundaries` and `dispatch` refuse.
    """
    if not groups:
        raise ValueError("groups is empty; allowed: one group of replicas or more. Plan a deployment first.")
    limits = [group.max_tokens for group in groups]
    bucketing = bucket_boundaries(lengths, num_buckets, interval, limits=limits)
    dispatched = dispatch(
        groups,
        bucketing,
        time_model,
        policy=policy,
        warm_start=warm_start,
        time_limit_s=time_limit_s,
        relative_gap=relative_gap,
        solver=solver,
        pads=pads,
        least_solved_s=least_solved_s,
    )
    return StepDispatch(bucketing, dispatched, assign_sequences(dispatched, bucketing, lengths))


def plan_fastest(ways: Sequence[Sequence[int]], *arguments: Any, **options: Any) -> StepDispatch:
    """Return the fastest plan of a step that can be cut into sequences in several ways; the first wins a tie.

    Args:
        ways: for each way, the lengths of the sequences, in tokens.
        *arguments: further arguments of `plan_step`.
        **options: its options.
    """
    found = [plan_step(lengths, *arguments, **options) for lengths in ways]
    number = min(range(len(found)), key=lambda one: found[one].dispatch.makespan_s)
    return replace(found[number], number=number)


class DispatchPlanner:
    """Plans steps in the order in which they are submitted, each warm-started by the one before.

    Args:
        groups: the replicas that are deployed, by configuration.
        time_model: predicts the seconds of one replica; it is called on the background thread.
        options: keyword arguments of `plan_step` for every step, all but `warm_start`.

    Raises:
        ValueError: for `warm_start`, which is the planner's own.

    Example:
        >>> with DispatchPlanner(groups, time_model) as planner:
        ...     planner.submit(lengths[0])
        ...     for step in range(num_steps):
        ...         work = planner.result()
        ...         if step + 1 < num_steps:
        ...             planner.submit(lengths[step + 1])
        ...         train(work.assignment)
    """

    def __init__(self, groups: Sequence[ReplicaGroup], time_model: TimeModel, **options: Any) -> None:
        if "warm_start" in options:
            raise ValueError(
                "warm_start is set; allowed: the step before, which the planner passes itself; leave it out."
            )
        self._groups = tuple(groups)
        self._time_model = time_model
        self._options = options
        self._last_dispatch: Dispatch | None = None
        self._pending: deque[Future[StepDispatch]] = deque()
        # A single thread plans in the order of submission, so that the dispatch before is there to start from.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="dispatch")

    def submit(self, *ways: Sequence[int], **options: Any) -> None:
        """Start planning a step of sequences of these lengths, in tokens; returns at once.

        Args:
            ways: lengths of the step's sequences, in tokens; several where it can be cut in several ways, of which the
                fastest is taken.
            options: keyword arguments of `plan_step` for this step alone, in place of those for every step.

        Raises:
            RuntimeError: after `close`.
        """
        self._pending.append(self._thread.submit(self._plan_next, tuple(map(tuple, ways)), self._options | options))

    def result(self, timeout_s: float | None = None) -> StepDispatch:
        """Return the plan of the earliest submitted step that was not yet returned, waiting for it.

        Raises:
            RuntimeError: where nothing is submitted.
            TimeoutError: where it takes longer than `timeout_s`; it can be asked for again.
            Exception: whatever planning that step raised; the steps after it are planned all the same.
        """
        if not self._pending:
            raise RuntimeError("result: no step is submitted; allowed: one result for each submit. Call submit first.")
        # A wait by itself tells a time-out from a TimeoutError that planning raised.
        wait([self._pending[0]], timeout_s)
        if not self._pending[0].done():
            raise TimeoutError(f"result: the dispatch was not planned within {timeout_s} s. Ask again, or wait longer.")
        return self._pending.popleft().result()

    def close(self) -> None:
        """Drop what is not yet begun, wait for what is, and end the thread; closing twice is allowed."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._pending.clear()

    def __enter__(self) -> DispatchPlanner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _plan_next(self, ways: tuple[tuple[int, ...], ...], options: dict[str, Any]) -> StepDispatch:
        """Plan one step on the background thread, which alone reads and writes the last dispatch."""
        work = plan_fastest(ways, self._groups, self._time_model, warm_start=self._last_dispatch, **options)
        self._last_dispatch = work.dispatch
        return work
