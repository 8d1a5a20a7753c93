"""`DispatchedShares`: which replica trains which sequences of a step (L section 4.3), the same answer on every process.

Equal replicas divide rows by tokens, as processes have always done. Unlike ones are dispatched: bucket boundaries for
this step's lengths (Eq. 4), sequences for each replica (Eq. 3), then single sequences. Rows that begin alike are one
sequence of the tokens that they compute (`row_items`). Rank 0 solves, as a time limit
makes answers depend on the machine, and the others get its answer as numbers. The next step can be solved while this
one runs::

    rank 0     begin(t) | passes of step t ......... | begin(t+1)
    its thread          | prepare(t+1): solves       | (waits here only for what is left)

What a replica does with its sequences is for `peft_mux.engine.steps` to say, and how gradients are summed over replicas
for `peft_mux.engine.gradients.sync`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from peft_mux.data.task_batch import TaskBatch
from peft_mux.engine.processes.processes import Processes
from peft_mux.engine.replicas.dispatch_clock import DispatchClock
from peft_mux.engine.replicas.layout import ParallelLayout
from peft_mux.engine.replicas.row_items import BatchRows, RowItems, row_items
from peft_mux.engine.replicas.row_owners import StepKey, dealt_out
from peft_mux.errors import ConfigError
from peft_mux.packing.even_shares import even_shares
from peft_mux.scheduler.dispatching.ahead import DispatchPlanner, StepDispatch, plan_fastest
from peft_mux.scheduler.dispatching.bucketing import DEFAULT_NUM_BUCKETS, interval_tokens
from peft_mux.scheduler.dispatching.dispatch import DEFAULT_TIME_LIMIT_S, Policy
from peft_mux.scheduler.dispatching.rates import ReplicaRates
from peft_mux.scheduler.replicas.configs import ParallelConfig, ReplicaGroup
from peft_mux.scheduler.replicas.packed_times import PackedTimeModel
from peft_mux.scheduler.replicas.time_model import ReplicaTimeModel

LEAST_SOLVED_S = 1.0
"""Predicted seconds of a step below which sequences are moved without a solver: its process takes 20 to 200 ms of a
core that on small machines trains, and moves alone come within some per cent (benchmarks/lobra/dispatch.py)."""

_MICROSECONDS = 1e6


class DispatchedShares:
    """Divides the global batches of every step among replicas.

    Args:
        layout: which process belongs to which replica.
        time_model: the curves of one layer, of which the seconds of replicas that pack are made
            (`peft_mux.scheduler.replicas.packed_times`), and the most tokens that each configuration holds; may be left
            out where replicas are alike.
        processes: the processes of the run; by default this one is alone.
        policy: "balanced" by Eq. 3, or a baseline: "length", each bucket to the smallest configuration that supports it
            (L Figure 4(c)), "uniform", each bucket evenly over all replicas that support it (L Figure 4(b)).
        num_buckets: R, the number of buckets that lengths are put into.
        interval: distance of candidate boundaries in tokens; by default a fraction of the step's longest sequence.
        time_limit_s: seconds after which the best dispatch found so far is taken.
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
        solved: what rank 0 has found for this step; `None` elsewhere, and for replicas that are alike.

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
        num_buckets: int = DEFAULT_NUM_BUCKETS,
        interval: int | None = None,
        time_limit_s: float = DEFAULT_TIME_LIMIT_S,
        solver: Any = None,
        clock: DispatchClock | None = None,
        rates: ReplicaRates | None = None,
        cuts_rows: bool = False,
        least_solved_s: float = LEAST_SOLVED_S,
    ) -> None:
        """Check the time model and remember the options; start no thread yet."""
        self.layout, self.policy, self.cuts_rows = layout, policy, cuts_rows
        self.time_model = None if time_model is None else PackedTimeModel(time_model)
        self.processes = processes or Processes()
        self.clock = clock or DispatchClock()
        self.rates = rates
        self.expected_s: tuple[float, ...] = ()
        self.solved: StepDispatch | None = None
        self._is_dispatched = not layout.are_alike
        if self._is_dispatched:
            _require_times(layout, self.time_model)
        self._interval = interval
        self._options: dict[str, Any] = {
            "policy": policy,
            "num_buckets": num_buckets,
            "time_limit_s": time_limit_s,
            "solver": solver,
            "pads": False,
            "least_solved_s": least_solved_s,
        }
        self._groups: tuple[ReplicaGroup, ...] = ()
        self._solved_groups: tuple[ReplicaGroup, ...] = ()
        self._members: tuple[tuple[int, ...], ...] = ()
        self._planner: DispatchPlanner | None = None
        self._pending: StepKey | None = None
        self._pending_ways: list[RowItems] = []
        self._even_tokens = [0] * layout.num_replicas
        self._owners: dict[tuple[str, int], np.ndarray] = {}

    @property
    def looks_ahead(self) -> bool:
        """Whether `prepare` is of use: whether there is anything to solve."""
        return self._is_dispatched

    @property
    def max_tokens(self) -> tuple[int | None, ...]:
        """Most tokens of a pass in each replica; `None` where only the plan of the run bounds it."""
        if not self._is_dispatched:
            return (None,) * self.layout.num_replicas
        limits = {group.config: group.max_tokens for group in self._known_groups()}
        return tuple(limits[config] for config in self.layout.replicas)

    def refusal(self, batch: TaskBatch) -> str | None:
        """Say why no replica can train a batch, the same on every process; `None` where one can.

        Args:
            batch: global batch of one task.
        """
        groups = self._known_groups()
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
        self._known_groups()
        if not self._is_dispatched or not self.processes.is_main or not any(batch.sequences for batch in batches):
            return
        # One step ahead at most: the planner holds one answer, which the next step takes.
        if self._pending is not None or any(self.refusal(batch) is not None for batch in batches):
            return
        self._submit(self._key_of(batches))

    def begin(self, batches: Sequence[TaskBatch]) -> None:
        """Decide where the sequences of a step go; `divide` then returns it, hTask by hTask.

        Args:
            batches: global batches of all tasks of the step, the same on every process.

        Raises:
            ConfigError: for a sequence that no replica can hold; on every process.
        """
        self._owners, self.expected_s, self.solved = {}, (), None
        if not self._is_dispatched:
            self._owners = self._even_owners(batches)
            return
        self._known_groups()
        for batch in batches:
            # Before rank 0 solves: every process finds the same refusal by itself, and none is left in the exchange.
            if (refusal := self.refusal(batch)) is not None:
                raise ConfigError(f"tasks.{batch.task}: {refusal}")
        if not any(batch.sequences for batch in batches):
            self._owners = {(batch.task, batch.step): np.zeros(0, dtype=np.int64) for batch in batches}
            return
        key = self._key_of(batches)
        owners, self.expected_s = self._agreed_owners(key, self._solve)
        self._owners = {(one.task, one.step): own for one, own in zip(key, owners, strict=True)}

    def typical_rows(self, batches: Sequence[BatchRows]) -> list[dict[str, list[int]]] | None:
        """Return the rows of each replica in a step of typical batches, for plans; every process calls this alike.

        Args:
            batches: the rows of a typical batch of each task.

        Returns:
            For each replica the indices of its rows of each task; `None` where there is nothing to divide, or a row
            that no replica holds.
        """
        if not self._is_dispatched:
            return None
        longest = max((group.max_tokens for group in self._known_groups()), default=0)
        most = max((length for one in batches for length in one.lengths), default=0)
        if not most or (most > longest and not self.cuts_rows):
            return None
        key = self._key(batches)
        owners, _ = self._agreed_owners(key, self._solve_once)
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
        expected = self.expected_s if self._is_dispatched else self._even_tokens
        if len(expected) == len(measured):
            self.rates.observe(expected, measured)

    def close(self) -> None:
        """End the thread; closing twice is allowed, and a step after it starts a new one."""
        if self._planner is not None:
            self._planner.close()
        self._planner, self._pending = None, None

    # ---------------------------------------------------------------- internal

    @property
    def _slowness(self) -> tuple[float, ...]:
        return (1.0,) * self.layout.num_replicas if self.rates is None else self.rates.slowness

    def _known_groups(self) -> tuple[ReplicaGroup, ...]:
        """Return the replicas by configuration, with limits that hold on every process; the first call communicates."""
        if self._is_dispatched and not self._groups:
            assert self.time_model is not None, "checked when this was made"
            configs = tuple(dict.fromkeys(self.layout.replicas))
            everywhere = self.processes.exchange([self.time_model.max_tokens[config] for config in configs])
            self._groups = tuple(
                # The least of all processes: devices may differ, and a row has to fit wherever it is sent.
                ReplicaGroup(config, self.layout.replicas.count(config), min(limits))
                for config, limits in zip(configs, zip(*everywhere, strict=True), strict=True)
            )
        return self._groups

    def _even_owners(self, batches: Sequence[TaskBatch]) -> dict[tuple[str, int], np.ndarray]:
        """Return the replica of each sequence where replicas are alike."""
        lengths = [[len(sequence) for sequence in batch.sequences] for batch in batches]
        owners = [np.zeros(len(own), dtype=np.int64) for own in lengths]
        tries = [batch.trie for batch in batches]
        for replica, share in enumerate(even_shares(lengths, self.layout.num_replicas, self._slowness, tries)):
            for own, rows in zip(owners, share, strict=True):
                own[rows] = replica
            self._even_tokens[replica] = sum(own[row] for own, rows in zip(lengths, share, strict=True) for row in rows)
        return {(batch.task, batch.step): own for batch, own in zip(batches, owners, strict=True)}

    def _agreed_owners(
        self, key: StepKey, solve: Callable[[StepKey], tuple[np.ndarray, tuple[float, ...]]]
    ) -> tuple[list[np.ndarray], tuple[float, ...]]:
        """Return the replica of each sequence of each batch, and the predicted seconds, as rank 0 has them."""
        sizes = [len(one.lengths) for one in key]
        num_replicas = self.layout.num_replicas
        # Rank 0 alone solves: a solver that ends by a time limit finds different answers on different machines. Its
        # answer goes round as integers, so that every process has the same bits.
        numbers = [0] * (num_replicas + sum(sizes))
        if self.processes.is_main:
            owners, expected_s = solve(key)
            numbers = [round(seconds * _MICROSECONDS) for seconds in expected_s] + owners.tolist()
        # Times in whole microseconds, as only integers are exchanged.
        numbers = self.processes.exchange(numbers)[0]
        agreed = np.array(numbers[num_replicas:], dtype=np.int64)
        return np.split(agreed, np.cumsum(sizes)[:-1]), tuple(one / _MICROSECONDS for one in numbers[:num_replicas])

    def _solve_once(self, key: StepKey) -> tuple[np.ndarray, tuple[float, ...]]:
        """Return what `_solve` does, for batches of no step; on rank 0 only."""
        groups, members = self._groups_by_rate()
        assert self.time_model is not None, "checked when this was made"
        ways = self._ways(key)
        interval = self._interval_of(ways)
        found = plan_fastest([way.lengths for way in ways], groups, self.time_model, interval=interval, **self._options)
        return dealt_out(found, ways[found.number], members), (0.0,) * self.layout.num_replicas

    def _solve(self, key: StepKey) -> tuple[np.ndarray, tuple[float, ...]]:
        """Return the replica of each sequence and the predicted seconds of each replica; on rank 0 only."""
        started = time.perf_counter()
        # A task may have come or gone since, or a row been refused: then what was solved ahead is of another step.
        is_ahead = self._pending == key
        if not is_ahead:
            self._drop_pending()
            self._submit(key)
        self._pending = None
        assert self._planner is not None, "a step was submitted"
        found = self._planner.result()
        self.solved = found
        self.clock.num_steps += 1
        self.clock.num_ahead += is_ahead
        self.clock.solve_s += found.dispatch.solve_s
        self.clock.waited_s += time.perf_counter() - started
        return dealt_out(found, self._pending_ways[found.number], self._members), self._replica_s(found)

    def _submit(self, key: StepKey) -> None:
        # Nothing is pending here, so that what is solved is dealt out among the groups that it was solved for.
        groups, members = self._groups_by_rate()
        if self._planner is None or groups != self._solved_groups:
            assert self.time_model is not None, "checked when this was made"
            self.close()
            self._solved_groups, self._members = groups, members
            self._planner = DispatchPlanner(groups, self.time_model, **self._options)
        self._pending, self._pending_ways = key, self._ways(key)
        # Bucket boundaries by Eq. 4, then the replicas' shares of each bucket by Eq. 3 (L section 4.3).
        lengths = [way.lengths for way in self._pending_ways]
        self._planner.submit(*lengths, interval=self._interval_of(self._pending_ways))

    def _key_of(self, batches: Sequence[TaskBatch]) -> StepKey:
        """Return what the dispatch of a step depends on."""
        lengths = [tuple(map(len, batch.sequences)) for batch in batches]
        return self._key(
            [BatchRows(one.task, one.step, own, one.trie) for one, own in zip(batches, lengths, strict=True)]
        )

    def _key(self, batches: Sequence[BatchRows]) -> StepKey:
        """Return what a dispatch depends on; a row that is cut counts as one of the most tokens that a pass holds."""
        longest = max((group.max_tokens for group in self._known_groups()), default=0)
        return tuple(one._replace(lengths=tuple(min(length, longest) for length in one.lengths)) for one in batches)

    def _ways(self, key: StepKey) -> list[RowItems]:
        """Return the items that a step may be dispatched as."""
        least = min(group.max_tokens for group in self._known_groups())
        return row_items(key, self.layout.num_replicas, least)

    def _interval_of(self, ways: Sequence[RowItems]) -> int:
        return self._interval or interval_tokens(max(max(way.lengths) for way in ways))

    def _drop_pending(self) -> None:
        if self._pending is not None and self._planner is not None:
            self._planner.result()
        self._pending = None

    def _replica_s(self, found: StepDispatch) -> tuple[float, ...]:
        """Return the predicted seconds of each replica, in the order of the layout."""
        assert self.time_model is not None, "checked when this was made"
        seconds = [0.0] * self.layout.num_replicas
        shares = zip(self._solved_groups, self._members, found.dispatch.replica_counts, strict=True)
        for group, members, replicas in shares:
            fits = sum(length <= group.max_tokens for length in found.bucketing.boundaries)
            lengths = found.bucketing.mean_lengths[:fits]
            for place, counts in zip(members, replicas, strict=True):
                # Buckets beyond what this replica holds are empty for it (L Eq. 3).
                fitting = counts[:fits]
                # Of a replica as fast as its kind: how much slower it is, is what its measured seconds tell.
                seconds[place] = self.time_model.step_s(group.config, fitting, lengths, group.max_tokens)
        return tuple(seconds)

    def _groups_by_rate(self) -> tuple[tuple[ReplicaGroup, ...], tuple[tuple[int, ...], ...]]:
        """Return the groups of replicas of one configuration and one rate, and which replicas each has."""
        limits = {group.config: group.max_tokens for group in self._known_groups()}
        members: dict[tuple[ParallelConfig, float], list[int]] = {}
        for place, kind in enumerate(zip(self.layout.replicas, self._slowness, strict=True)):
            members.setdefault(kind, []).append(place)
        groups = (ReplicaGroup(config, len(own), limits[config], rate) for (config, rate), own in members.items())
        return tuple(groups), tuple(map(tuple, members.values()))


def _require_times(layout: ParallelLayout, time_model: PackedTimeModel | None) -> None:
    if time_model is None:
        raise ConfigError(
            f"replicas: got {layout}, unlike one another, without a time model; allowed: one that knows each of them. "
            "Pass deployment_facts.run_time_model(...)."
        )
    unknown = [str(config) for config in dict.fromkeys(layout.replicas) if config not in time_model.max_tokens]
    if unknown:
        known = ", ".join(map(str, time_model.configurations))
        raise ConfigError(
            f"replicas: got {layout}, of which {', '.join(unknown)} can hold no sequence; allowed: {known}. Use more "
            "processes per replica, or gradient_checkpointing=True."
        )
