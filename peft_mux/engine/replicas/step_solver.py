"""`StepSolver`: which replica each row of a step of unlike replicas goes to; rank 0 asks it, and may ask ahead.

Bucket boundaries for a step's lengths by Eq. 4, then the replicas' shares of each bucket by Eq. 3 (L section 4.3), then
single rows.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from peft_mux.engine.replicas.dispatch_clock import DispatchClock
from peft_mux.engine.replicas.layout import ParallelLayout
from peft_mux.engine.replicas.row_items import RowItems, row_items
from peft_mux.engine.replicas.row_owners import StepKey, dealt_out
from peft_mux.scheduler.dispatching.ahead import DispatchPlanner, StepDispatch, plan_fastest
from peft_mux.scheduler.dispatching.bucketing import interval_tokens
from peft_mux.scheduler.dispatching.rates import ReplicaRates
from peft_mux.scheduler.replicas.configs import ParallelConfig, ReplicaGroup
from peft_mux.scheduler.replicas.packed_times import PackedTimeModel

Members = tuple[tuple[int, ...], ...]
"""The replicas of each group, by their places in the layout."""


class StepSolver:
    """Dispatches the rows of a step among replicas by what each is predicted to take for them.

    Args:
        layout: which process belongs to which replica.
        time_model: the seconds of replicas that pack.
        clock: counts what solving and waiting for it takes.
        rates: how much slower each replica is than the others; `None` where those of one configuration count as equal.
        **options: how a step is solved, as `peft_mux.scheduler.dispatching.ahead.plan_step` takes them.

    Attributes:
        solved: what was found for the last step; `None` before it.
    """

    def __init__(
        self,
        layout: ParallelLayout,
        time_model: PackedTimeModel,
        clock: DispatchClock,
        rates: ReplicaRates | None,
        **options: Any,
    ) -> None:
        """Remember the replicas; start no thread yet."""
        self.solved: StepDispatch | None = None
        self._layout, self._time_model, self._clock, self._rates = layout, time_model, clock, rates
        self._options = options
        self._groups: tuple[ReplicaGroup, ...] = ()
        self._members: Members = ()
        self._planner: DispatchPlanner | None = None
        self._pending: StepKey | None = None
        self._pending_ways: list[RowItems] = []

    @property
    def is_pending(self) -> bool:
        """Whether a step is being solved, or was solved and not asked for yet."""
        return self._pending is not None

    def begin(self, key: StepKey, limits: Sequence[ReplicaGroup]) -> None:
        """Begin to solve a step on a thread; returns at once.

        Args:
            key: the rows of the step.
            limits: the replicas by configuration, with the most tokens that each holds.
        """
        # Nothing is pending here, so that what is solved is dealt out among the groups that it was solved for.
        groups, members = self._groups_by_rate(limits)
        if self._planner is None or groups != self._groups:
            self.close()
            self._groups, self._members = groups, members
            self._planner = DispatchPlanner(groups, self._time_model, **self._options)
        self._pending, self._pending_ways = key, self._ways(key, limits)
        lengths = [way.lengths for way in self._pending_ways]
        self._planner.submit(*lengths, interval=_interval(self._pending_ways))

    def owners(self, key: StepKey, limits: Sequence[ReplicaGroup]) -> tuple[np.ndarray, tuple[float, ...]]:
        """Return the replica of each row, and the predicted seconds of each replica; waits for what was begun.

        Args:
            key: the rows of the step.
            limits: the replicas by configuration, with the most tokens that each holds.
        """
        started = time.perf_counter()
        # A task may have come or gone since, or a row been refused: then what was solved ahead is of another step.
        is_ahead = self._pending == key
        if not is_ahead:
            self._drop_pending()
            self.begin(key, limits)
        self._pending = None
        assert self._planner is not None, "a step was begun"
        self.solved = found = self._planner.result()
        self._clock.num_steps += 1
        self._clock.num_ahead += is_ahead
        self._clock.solve_s += found.dispatch.solve_s
        self._clock.waited_s += time.perf_counter() - started
        return dealt_out(found, self._pending_ways[found.number], self._members), self._replica_s(found)

    def typical_owners(self, key: StepKey, limits: Sequence[ReplicaGroup]) -> tuple[np.ndarray, tuple[float, ...]]:
        """Return what `owners` does, for batches of no step: nothing is noted or counted, and no seconds are told."""
        groups, members = self._groups_by_rate(limits)
        ways = self._ways(key, limits)
        found = plan_fastest(
            [way.lengths for way in ways], groups, self._time_model, interval=_interval(ways), **self._options
        )
        return dealt_out(found, ways[found.number], members), (0.0,) * self._layout.num_replicas

    def close(self) -> None:
        """End the thread; closing twice is allowed, and a step after it starts a new one."""
        if self._planner is not None:
            self._planner.close()
        self._planner, self._pending = None, None

    def _ways(self, key: StepKey, limits: Sequence[ReplicaGroup]) -> list[RowItems]:
        """Return the items that a step may be dispatched as."""
        return row_items(key, self._layout.num_replicas, min(group.max_tokens for group in limits))

    def _drop_pending(self) -> None:
        if self._pending is not None and self._planner is not None:
            self._planner.result()
        self._pending = None

    def _replica_s(self, found: StepDispatch) -> tuple[float, ...]:
        """Return the predicted seconds of each replica, in the order of the layout."""
        seconds = [0.0] * self._layout.num_replicas
        shares = zip(self._groups, self._members, found.dispatch.replica_counts, strict=True)
        for group, members, replicas in shares:
            fits = sum(length <= group.max_tokens for length in found.bucketing.boundaries)
            lengths = found.bucketing.mean_lengths[:fits]
            for place, counts in zip(members, replicas, strict=True):
                # Buckets beyond what this replica holds are empty for it (L Eq. 3).
                fitting = counts[:fits]
                # Of a replica as fast as its kind: how much slower it is, is what its measured seconds tell.
                seconds[place] = self._time_model.step_s(group.config, fitting, lengths, group.max_tokens)
        return tuple(seconds)

    def _groups_by_rate(self, limits: Sequence[ReplicaGroup]) -> tuple[tuple[ReplicaGroup, ...], Members]:
        """Return the groups of replicas of one configuration and one rate, and which replicas each has."""
        most = {group.config: group.max_tokens for group in limits}
        slowness = slowness_of(self._rates, self._layout)
        members: dict[tuple[ParallelConfig, float], list[int]] = {}
        for place, kind in enumerate(zip(self._layout.replicas, slowness, strict=True)):
            members.setdefault(kind, []).append(place)
        groups = (ReplicaGroup(config, len(own), most[config], rate) for (config, rate), own in members.items())
        return tuple(groups), tuple(map(tuple, members.values()))


def slowness_of(rates: ReplicaRates | None, layout: ParallelLayout) -> tuple[float, ...]:
    """Return how much slower each replica of a layout is than the others; 1 where no rates are known."""
    return (1.0,) * layout.num_replicas if rates is None else rates.slowness


def _interval(ways: Sequence[RowItems]) -> int:
    """Return the distance of candidate boundaries of buckets in tokens."""
    return interval_tokens(max(max(way.lengths) for way in ways))
