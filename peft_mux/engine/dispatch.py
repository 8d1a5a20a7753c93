"""`DispatchClock`: what dividing rows among unlike replicas has cost."""

# MERGED: `RowItems`: what of a step is dispatched as a whole: single rows, and rows that share tokens (bundles, or
# MERGED: pieces).
# MERGED: A bundle is a sequence to whoever dispatches, of the tokens that it computes. One that is larger than an
# MERGED: item may be is
# MERGED: cut, and each piece computes its beginning anew where it has a replica for itself. As pieces on one replica
# MERGED: share it
# MERGED: again, all of them are priced by what they compute on as many replicas as there are::
# MERGED:     a bundle of 3 pieces   [40 10 10] [40 10 10] [40 10]         170 tokens apart, 90 together
# MERGED:     on two replicas        90 + (170 - 90) / (3 - 1) = 130        of which a piece of 60 counts 60 / 170
# MERGED: Which replica each row of a step goes to, once it is known how many items of each bucket each replica gets.
# MERGED: `StepSolver`: which replica each row of a step of unlike replicas goes to; rank 0 asks it, and may ask ahead.
# MERGED: Bucket boundaries for a step's lengths by Eq. 4, then the replicas' shares of each bucket by Eq. 3 (L
# MERGED: section 4.3), then
# MERGED: single rows.
# MERGED: `DispatchedShares`: which replica trains which sequences of a step (L section 4.3), the same answer on every
# MERGED: process.
# MERGED: Equal replicas divide rows by tokens, as processes have always done. Unlike ones are dispatched by a
# MERGED: `StepSolver`. Rows
# MERGED: that begin alike are one sequence of the tokens that they compute (`row_items`). Rank 0 solves, as a time
# MERGED: limit makes
# MERGED: answers depend on the machine, and the others get its answer as numbers. The next step can be solved while
# MERGED: this one
# MERGED: runs::
# MERGED:     rank 0     begin(t) | passes of step t ......... | begin(t+1)
# MERGED:     its thread          | prepare(t+1): solves       | (waits here only for what is left)
# MERGED: What a replica does with its sequences is for `peft_mux.engine.steps` to say, and how gradients are summed
# MERGED: over replicas
# MERGED: for `peft_mux.engine.gradients`.

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from peft_mux.data.packing.passes import even_shares
from peft_mux.data.packing.prefixes import RowTrie
from peft_mux.data.task_batch import TaskBatch
from peft_mux.engine.layout import ParallelLayout
from peft_mux.engine.processes import Processes
from peft_mux.errors import ConfigError
from peft_mux.scheduler.dispatching.ahead import DispatchPlanner, ReplicaRates, StepDispatch, plan_fastest
from peft_mux.scheduler.dispatching.bucketing import interval_tokens
from peft_mux.scheduler.dispatching.dispatch import Policy, deal_out
from peft_mux.scheduler.replicas.configs import ParallelConfig, ReplicaGroup
from peft_mux.scheduler.replicas.time_model import PackedTimeModel, ReplicaTimeModel


@dataclass(slots=True)
class DispatchClock:
    """What dispatching has cost on the process that solves; zeros on the others.

    Attributes:
        num_steps: steps that were dispatched.
        num_ahead: how many of these steps were solved from lengths that were known in advance.
        solve_s: seconds of solving, on whichever thread it ran.
        waited_s: seconds that steps waited for solving to end.
    """

    num_steps: int = 0
    num_ahead: int = 0
    solve_s: float = 0.0
    waited_s: float = 0.0

    @property
    def hidden_share(self) -> float:
        """Part of the solving time that no step waited for, 0 to 1; 1 where nothing was solved."""
        return max(0.0, 1 - self.waited_s / self.solve_s) if self.solve_s > 0 else 1.0

    def __str__(self) -> str:
        """Return one line."""
        return (
            f"dispatch  {self.num_steps} steps, {self.num_ahead} solved ahead; {self.solve_s:.3f} s of solving, of "
            f"which steps waited {self.waited_s:.3f} s ({self.hidden_share:.0%} hidden)"
        )


class BatchRows(NamedTuple):
    """The rows of one task's global batch, as far as a dispatch depends on them.

    Attributes:
        task: name of the task.
        step: step of the task.
        lengths: tokens of each row.
        trie: what rows begin with alike; `None` where they share nothing.
    """

    task: str
    step: int
    lengths: tuple[int, ...]
    trie: RowTrie | None = None

    def alone(self, row: int) -> int:
        """Return the tokens that a row computes by itself."""
        return self.lengths[row] if self.trie is None else min(self.lengths[row], self.trie.num_computed([row]))


class RowItems(NamedTuple):
    """The rows of a step by what is dispatched as a whole.

    Attributes:
        rows: for each batch, the rows of each item.
        tokens: for each batch, the tokens that each item counts.
    """

    rows: tuple[tuple[tuple[int, ...], ...], ...]
    tokens: tuple[tuple[int, ...], ...]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each item, batch after batch."""
        return [tokens for own in self.tokens for tokens in own]


def row_items(batches: Sequence[BatchRows], num_replicas: int, least_tokens: int) -> list[RowItems]:
    """Return the items of a step: large ones, which spare most, and then smaller ones, which come out more even.

    Args:
        batches: the rows.
        num_replicas: number of replicas, over which pieces of a bundle may come to lie.
        least_tokens: the least of what replicas hold in a pass, so that any of them holds an item of several rows.
    """
    total = sum(_together(one) for one in batches)
    found = []
    for parts in (num_replicas, _SMALLER * num_replicas):
        capacity = min(least_tokens, math.ceil(total / parts))
        items = [_of_batch(one, num_replicas, capacity, least_tokens) for one in batches]
        found.append(RowItems(tuple(rows for rows, _ in items), tuple(tokens for _, tokens in items)))
    return list(dict.fromkeys(found))


_SMALLER = 4
"""By how much the smaller items are smaller: so that replicas of unequal speed come out within some per cent."""


def _together(batch: BatchRows) -> int:
    """Return the tokens that the rows of a batch compute in one pass."""
    return sum(batch.lengths) if batch.trie is None else batch.trie.num_computed(range(len(batch.lengths)))


def _of_batch(
    batch: BatchRows, num_replicas: int, capacity: int, least_tokens: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Return the rows of each item of a batch, and its tokens."""
    trie, everything = batch.trie, range(len(batch.lengths))
    if trie is None:
        return tuple((row,) for row in everything), batch.lengths
    rows = tuple(map(tuple, trie.items(everything, capacity)))
    apart = [batch.alone(own[0]) if len(own) == 1 else trie.num_computed(own) for own in rows]
    number = {row: place for place, own in enumerate(rows) for row in own}
    tokens = list(apart)
    for bundle in trie.bundles(everything):
        # What some replicas do not hold goes by what it is, so that it comes to none of them.
        pieces = [one for one in sorted({number[row] for row in bundle}) if apart[one] <= least_tokens]
        if len(pieces) < 2:
            continue
        all_apart = sum(apart[one] for one in pieces)
        joint = trie.num_computed([row for one in pieces for row in rows[one]])
        counted = joint + (all_apart - joint) * (min(num_replicas, len(pieces)) - 1) / (len(pieces) - 1)
        for one in pieces:
            tokens[one] = max(1, min(apart[one], round(apart[one] * counted / all_apart)))
    return rows, tuple(tokens)


StepKey = tuple[BatchRows, ...]
"""The rows of each batch of a step."""


def dealt_out(found: StepDispatch, items: RowItems, groups: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the replica of each row: a bucket is dealt out evenly over tasks, and then over tokens of items.

    Args:
        found: how many items of each bucket each replica gets.
        items: the items that were dispatched.
        groups: the replicas of each group, by their places in the layout.

    Returns:
        int64 of shape `(rows,)`, batch after batch.
    """
    tasks = np.repeat(np.arange(len(items.tokens)), [len(own) for own in items.tokens])
    lengths = np.array(items.lengths, dtype=np.int64)
    buckets = found.bucketing.bucket_of(lengths.tolist())
    places = [place for members in groups for place in members]
    counts = [replica for group in found.dispatch.replica_counts for replica in group]
    # The last key of `lexsort` counts most; positions make the order total, the same on every machine.
    order = np.lexsort((np.arange(len(lengths)), -lengths, tasks))
    owners = np.full(len(lengths), -1, dtype=np.int64)
    for bucket in range(found.bucketing.num_buckets):
        members = order[buckets[order] == bucket]
        for place, share in zip(places, deal_out(members, [own[bucket] for own in counts]), strict=True):
            owners[share] = place
    assert (owners >= 0).all(), "a row was lost"
    return _of_rows(owners, items)


def _of_rows(owners: np.ndarray, items: RowItems) -> np.ndarray:
    """Return the replica of each row, given that of each item."""
    found, start = [np.zeros(0, dtype=np.int64)], 0
    for rows in items.rows:
        own = np.empty(sum(map(len, rows)), dtype=np.int64)
        for number, item in enumerate(rows):
            own[list(item)] = owners[start + number]
        found.append(own)
        start += len(rows)
    return np.concatenate(found)


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


LEAST_SOLVED_S = 1.0
"""Predicted seconds of a step below which sequences are moved without a solver: its process takes 20 to 200 ms of a
core that on small machines trains, and moves alone come within some per cent (benchmarks/lobra/dispatch.py)."""

_MICROSECONDS = 1e6


class DispatchedShares:
    """Divides the global batches of every step among replicas.

    Args:
        layout: which process belongs to which replica.
        time_model: the curves of one layer, of which the seconds of replicas that pack are made
            (`peft_mux.scheduler.replicas.time_model`), and the most tokens that each configuration holds; may be left
            out where replicas are alike.
        processes: the processes of the run; by default this one is alone.
        policy: "balanced" by Eq. 3, or a baseline: "length", each bucket to the smallest configuration that supports it
            (L Figure 4(c)), "uniform", each bucket evenly over all replicas that support it (L Figure 4(b)).
        solver: name of a PuLP solver, a PuLP solver itself, or None for the bundled CBC.
        clock: a clock to go on counting with, such as that of the shares which these take the place of.
        rates: how much slower each replica is than the others; `observe` teaches it, and rows follow it. By default
            replicas of one configuration count as equal, whatever they take.
        cuts_rows: rows that are longer than any replica holds in a pass are computed in parts; they count as rows of
            the most tokens that one holds, and so go to the largest replicas.
        least_solved_s: predicted seconds of a step below which no solver is asked.

    Attributes:
        clock: what dispatching has cost here.
        expected_s: predicted seconds of each replica in this step; empty for replicas that are alike.

    Raises:
        ConfigError: for replicas that are unlike one another without a time model that knows all of them.

    Example:
        >>> shares = DispatchedShares(ParallelLayout.parse("<1,1>x2"))
        >>> shares.divide([])
        [[], []]
    """

    def __init__(
        self,
        layout: ParallelLayout,
        time_model: ReplicaTimeModel | None = None,
        processes: Processes | None = None,
        *,
        policy: Policy = "balanced",
        solver: Any = None,
        clock: DispatchClock | None = None,
        rates: ReplicaRates | None = None,
        cuts_rows: bool = False,
        least_solved_s: float = LEAST_SOLVED_S,
    ) -> None:
        """Check the time model and remember the options; start no thread yet."""
        self.layout, self.cuts_rows = layout, cuts_rows
        self.processes = processes or Processes()
        self.clock = clock or DispatchClock()
        self.rates = rates
        self.expected_s: tuple[float, ...] = ()
        self._solver: StepSolver | None = None
        if not layout.are_alike:
            self._times = times = _required_times(layout, time_model)
            options = {"policy": policy, "solver": solver, "pads": False, "least_solved_s": least_solved_s}
            self._solver = StepSolver(layout, times, self.clock, rates, **options)
        self._limits: tuple[ReplicaGroup, ...] = ()
        self._even_tokens = [0] * layout.num_replicas
        self._owners: dict[tuple[str, int], np.ndarray] = {}

    @property
    def solved(self) -> StepDispatch | None:
        """What rank 0 has found for this step; `None` elsewhere, and for replicas that are alike."""
        return None if self._solver is None else self._solver.solved

    @property
    def looks_ahead(self) -> bool:
        """Whether `prepare` is of use: whether there is anything to solve."""
        return self._solver is not None

    @property
    def max_tokens(self) -> tuple[int | None, ...]:
        """Most tokens of a pass in each replica; `None` where only the plan of the run bounds it."""
        if self._solver is None:
            return (None,) * self.layout.num_replicas
        limits = {group.config: group.max_tokens for group in self._known_limits()}
        return tuple(limits[config] for config in self.layout.replicas)

    def refusal(self, batch: TaskBatch) -> str | None:
        """Say why no replica can train a batch, the same on every process; `None` where one can.

        Args:
            batch: global batch of one task.
        """
        groups = self._known_limits()
        longest = max((group.max_tokens for group in groups), default=0)
        too_long = next((one for one in batch.sequences if len(one) > longest), None)
        if not groups or too_long is None or self.cuts_rows:
            return None
        return (
            f"row {too_long.row} has {len(too_long)} tokens; allowed: at most {longest}, the most that a replica of "
            f"{self.layout} can hold. Set max_length={longest} or split_long_sequences=True, or add a replica of more "
            "processes: peft-mux plan --deployment shows which."
        )

    # ---------------------------------------------------------------- one step

    def prepare(self, batches: Sequence[TaskBatch]) -> None:
        """Begin to solve the next step on a thread of rank 0; returns at once. Without effect where nothing is solved.

        Should the next step turn out another one, it is solved when it begins.

        Args:
            batches: global batches that the next step will most likely have.
        """
        # First, on every process: the first call is an exchange, and only rank 0 goes on below.
        limits = self._known_limits()
        if self._solver is None or not self.processes.is_main or not any(batch.sequences for batch in batches):
            return
        # One step ahead at most: the planner holds one answer, which the next step takes.
        if self._solver.is_pending or any(self.refusal(batch) is not None for batch in batches):
            return
        self._solver.begin(self._key_of(batches), limits)

    def begin(self, batches: Sequence[TaskBatch]) -> None:
        """Decide where the sequences of a step go; `divide` then returns it, hTask by hTask.

        Args:
            batches: global batches of all tasks of the step, the same on every process.

        Raises:
            ConfigError: for a sequence that no replica can hold; on every process.
        """
        self._owners, self.expected_s = {}, ()
        if self._solver is None:
            self._owners = self._even_owners(batches)
            return
        self._solver.solved = None
        self._known_limits()
        for batch in batches:
            # Before rank 0 solves: every process finds the same refusal by itself, and none is left in the exchange.
            if (refusal := self.refusal(batch)) is not None:
                raise ConfigError(f"tasks.{batch.task}: {refusal}")
        if not any(batch.sequences for batch in batches):
            self._owners = {(batch.task, batch.step): np.zeros(0, dtype=np.int64) for batch in batches}
            return
        key = self._key_of(batches)
        owners, self.expected_s = self._agreed_owners(key, self._solver.owners)
        self._owners = {(one.task, one.step): own for one, own in zip(key, owners, strict=True)}

    def typical_rows(self, batches: Sequence[BatchRows]) -> list[dict[str, list[int]]] | None:
        """Return the rows of each replica in a step of typical batches, for plans; every process calls this alike.

        Args:
            batches: the rows of a typical batch of each task.

        Returns:
            For each replica the indices of its rows of each task; `None` where there is nothing to divide, or a row
            that no replica holds.
        """
        if self._solver is None:
            return None
        longest = max((group.max_tokens for group in self._known_limits()), default=0)
        most = max((length for one in batches for length in one.lengths), default=0)
        if not most or (most > longest and not self.cuts_rows):
            return None
        key = self._key(batches)
        owners, _ = self._agreed_owners(key, self._solver.typical_owners)
        return [
            {one.task: np.flatnonzero(own == replica).tolist() for one, own in zip(batches, owners, strict=True)}
            for replica in range(self.layout.num_replicas)
        ]

    def divide(self, batches: Sequence[TaskBatch]) -> list[list[list[int]]]:
        """Return the rows of each replica.

        Where `begin` was not told of these batches, they are taken for the whole step.

        Args:
            batches: global batches of the tasks that share their passes.

        Returns:
            For each replica and each batch, the indices of its sequences, ascending.

        Raises:
            ConfigError: for a sequence that no replica can hold; on every process.
        """
        if any((batch.task, batch.step) not in self._owners for batch in batches):
            self.begin(batches)
        return [
            [np.flatnonzero(self._owners[batch.task, batch.step] == replica).tolist() for batch in batches]
            for replica in range(self.layout.num_replicas)
        ]

    def observe(self, process_s: Sequence[float]) -> None:
        """Learn how fast replicas are from what the passes of the last step took; without effect without `rates`.

        Args:
            process_s: seconds from the first pass of each process to the end of its last one, by rank, the same
                numbers on every process.
        """
        if self.rates is None:
            return
        measured = [0.0] * self.layout.num_replicas
        for rank, seconds in enumerate(process_s):
            replica = self.layout.place(rank).replica
            # A replica is done when the last of its processes is.
            measured[replica] = max(measured[replica], seconds)
        expected = self.expected_s if self._solver is not None else self._even_tokens
        if len(expected) == len(measured):
            self.rates.observe(expected, measured)

    def close(self) -> None:
        """End the thread; closing twice is allowed, and a step after it starts a new one."""
        if self._solver is not None:
            self._solver.close()

    # ---------------------------------------------------------------- internal

    def _known_limits(self) -> tuple[ReplicaGroup, ...]:
        """Return the replicas by configuration, with limits that hold on every process; the first call communicates."""
        if self._solver is not None and not self._limits:
            configs = tuple(dict.fromkeys(self.layout.replicas))
            everywhere = self.processes.exchange([self._times.max_tokens[config] for config in configs])
            self._limits = tuple(
                # The least of all processes: devices may differ, and a row has to fit wherever it is sent.
                ReplicaGroup(config, self.layout.replicas.count(config), min(limits))
                for config, limits in zip(configs, zip(*everywhere, strict=True), strict=True)
            )
        return self._limits

    def _even_owners(self, batches: Sequence[TaskBatch]) -> dict[tuple[str, int], np.ndarray]:
        """Return the replica of each sequence where replicas are alike."""
        lengths = [[len(sequence) for sequence in batch.sequences] for batch in batches]
        owners = [np.zeros(len(own), dtype=np.int64) for own in lengths]
        tries, slowness = [batch.trie for batch in batches], slowness_of(self.rates, self.layout)
        for replica, share in enumerate(even_shares(lengths, self.layout.num_replicas, slowness, tries)):
            for own, rows in zip(owners, share, strict=True):
                own[rows] = replica
            self._even_tokens[replica] = sum(own[row] for own, rows in zip(lengths, share, strict=True) for row in rows)
        return {(batch.task, batch.step): own for batch, own in zip(batches, owners, strict=True)}

    def _agreed_owners(
        self, key: StepKey, solve: Callable[[StepKey, Sequence[ReplicaGroup]], tuple[np.ndarray, tuple[float, ...]]]
    ) -> tuple[list[np.ndarray], tuple[float, ...]]:
        """Return the replica of each sequence of each batch, and the predicted seconds, as rank 0 has them."""
        sizes = [len(one.lengths) for one in key]
        num_replicas = self.layout.num_replicas
        # Rank 0 alone solves: a solver that ends by a time limit finds different answers on different machines. Its
        # answer goes round as integers, so that every process has the same bits.
        numbers = [0] * (num_replicas + sum(sizes))
        if self.processes.is_main:
            owners, expected_s = solve(key, self._known_limits())
            numbers = [round(seconds * _MICROSECONDS) for seconds in expected_s] + owners.tolist()
        # Times in whole microseconds, as only integers are exchanged.
        numbers = self.processes.exchange(numbers)[0]
        agreed = np.array(numbers[num_replicas:], dtype=np.int64)
        return np.split(agreed, np.cumsum(sizes)[:-1]), tuple(one / _MICROSECONDS for one in numbers[:num_replicas])

    def _key_of(self, batches: Sequence[TaskBatch]) -> StepKey:
        """Return what the dispatch of a step depends on."""
        lengths = [tuple(map(len, batch.sequences)) for batch in batches]
        return self._key(
            [BatchRows(one.task, one.step, own, one.trie) for one, own in zip(batches, lengths, strict=True)]
        )

    def _key(self, batches: Sequence[BatchRows]) -> StepKey:
        """Return what a dispatch depends on; a row that is cut counts as one of the most tokens that a pass holds."""
        longest = max((group.max_tokens for group in self._known_limits()), default=0)
        return tuple(one._replace(lengths=tuple(min(length, longest) for length in one.lengths)) for one in batches)


def _required_times(layout: ParallelLayout, time_model: ReplicaTimeModel | None) -> PackedTimeModel:
    """Return the seconds of replicas that pack, of a layout that has to be dispatched by them."""
    if time_model is None:
        raise ConfigError(
            f"replicas: got {layout}, unlike one another, without a time model; allowed: one that knows each of them. "
            "Pass deployment_facts.run_time_model(...)."
        )
    times = PackedTimeModel(time_model)
    unknown = [str(config) for config in dict.fromkeys(layout.replicas) if config not in times.max_tokens]
    if unknown:
        known = ", ".join(map(str, times.configurations))
        raise ConfigError(
            f"replicas: got {layout}, of which {', '.join(unknown)} can hold no sequence; allowed: {known}. Use more "
            "processes per replica, or gradient_checkpointing=True."
        )
    return times
