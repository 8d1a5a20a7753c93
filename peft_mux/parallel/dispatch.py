"""`DispatchedShares`: which replica trains which sequences of a step (L section 4.3), identical on all processes.

Equal replicas divide rows by tokens. For unequal replicas, L Eq. 4 gives bucket boundaries for the lengths of the step,
Eq. 3 the replicas' shares of each bucket, and then single rows are assigned. Only rank 0 solves, because results under
a time limit depend on the machine, and the other ranks receive its result. The next step can be solved while this one
runs::

    rank 0     begin(t) | passes of step t ......... | begin(t+1)
    its thread          | prepare(t+1): solves       | (waits here only for what is left)

Rows that share a prefix (a *bundle*) are dispatched as one sequence of the tokens that they compute. A bundle that is
larger than the maximum item is split, and a piece that is alone on a replica computes the prefix again. Pieces on the
same replica share it, so their cost assumes that they are spread over all replicas::

    a bundle of 3 pieces   [40 10 10] [40 10 10] [40 10]         170 tokens apart, 90 together
    on two replicas        90 + (170 - 90) / (3 - 1) = 130       a piece of 60 counts 60 / 170 of it

See `peft_mux.engine.steps` for what a replica does with its sequences, and `peft_mux.engine.gradients` for how
gradients are summed over replicas.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from peft_mux.data.packing.passes import even_shares
from peft_mux.data.packing.prefixes import RowTrie
from peft_mux.data.task_batch import TaskBatch
from peft_mux.engine.processes import Processes
from peft_mux.engine.steps import Shares
from peft_mux.errors import ConfigError
from peft_mux.scheduler.dispatching.bucketing import Bucketing, bucket_boundaries, interval_tokens
from peft_mux.scheduler.dispatching.dispatch import Dispatch, ReplicaRates, deal_buckets, dispatch
from peft_mux.scheduler.names import Dispatching
from peft_mux.scheduler.parallel_layout import ParallelConfig, ParallelLayout
from peft_mux.scheduler.replicas.time_model import ReplicaGroup, ReplicaTimeModel

LEAST_SOLVED_S = 1.0
"""Predicted seconds of a step below which no solver is used: it takes 20 to 200 ms of a core that small machines need
for training, and moving sequences greedily is only a few per cent worse (benchmarks/lobra/dispatch.py)."""
_SMALLER = 4
"""Factor by which the smaller items are smaller, so that replicas of unequal speed balance within a few per cent."""
_MICROSECONDS = 1e6


@dataclass(slots=True)
class DispatchClock:
    """The cost of dispatching on the process that solves; zeros on the others.

    Attributes:
        num_steps: number of steps that were dispatched.
        num_ahead: how many of these steps were solved in advance.
        solve_s: seconds spent solving, on any thread.
        waited_s: seconds that steps waited for the solver.
    """

    num_steps: int = 0
    num_ahead: int = 0
    solve_s: float = 0.0
    waited_s: float = 0.0

    @property
    def hidden_share(self) -> float:
        """Fraction of the solving time that no step waited for, 0 to 1; 1 if nothing was solved."""
        return max(0.0, 1 - self.waited_s / self.solve_s) if self.solve_s > 0 else 1.0

    def __str__(self) -> str:
        """Return one line."""
        return (
            f"dispatch  {self.num_steps} steps, {self.num_ahead} solved ahead; {self.solve_s:.3f} s of solving, of "
            f"which steps waited {self.waited_s:.3f} s ({self.hidden_share:.0%} hidden)"
        )


class BatchRows(NamedTuple):
    """The properties of one task's global batch that a dispatch depends on.

    Attributes:
        task: name of the task.
        step: step of the task.
        lengths: tokens of each row.
        trie: the shared prefixes of the rows; `None` if they share nothing.
    """

    task: str
    step: int
    lengths: tuple[int, ...]
    trie: RowTrie | None = None

    def num_computed(self, rows: Sequence[int]) -> int:
        """Return the number of tokens that some rows compute in one pass."""
        if self.trie is None:
            return sum(self.lengths[row] for row in rows)
        computed = self.trie.num_computed(rows)
        return min(self.lengths[rows[0]], computed) if len(rows) == 1 else computed


class RowItems(NamedTuple):
    """The rows of a step, grouped into items that are dispatched as a whole.

    Attributes:
        rows: for each batch, the rows of each item.
        tokens: for each batch, the number of tokens with which each item counts.
    """

    rows: tuple[tuple[tuple[int, ...], ...], ...]
    tokens: tuple[tuple[int, ...], ...]

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each item, concatenated over batches."""
        return [tokens for batch_tokens in self.tokens for tokens in batch_tokens]


def row_items(batches: Sequence[BatchRows], num_replicas: int, least_tokens: int) -> list[RowItems]:
    """Return alternative items for a step: large ones, which share most, and smaller ones, which balance better.

    Args:
        batches: the rows.
        num_replicas: number of replicas over which pieces of a bundle may be spread.
        least_tokens: the smallest capacity of a pass over all replicas, so that an item of several rows fits anywhere.
    """
    total = sum(batch.num_computed(range(len(batch.lengths))) for batch in batches)
    ways = []
    for parts in (num_replicas, _SMALLER * num_replicas):
        capacity = min(least_tokens, math.ceil(total / parts))
        items = [_items_of(batch, num_replicas, capacity, least_tokens) for batch in batches]
        ways.append(RowItems(tuple(rows for rows, _ in items), tuple(tokens for _, tokens in items)))
    return list(dict.fromkeys(ways))


def _items_of(
    batch: BatchRows, num_replicas: int, capacity: int, least_tokens: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
    """Return the rows of each item of a batch, and the number of tokens with which it counts."""
    trie, everything = batch.trie, range(len(batch.lengths))
    if trie is None:
        return tuple((row,) for row in everything), batch.lengths
    rows = tuple(map(tuple, trie.items(everything, capacity)))
    apart = [batch.num_computed(item_rows) for item_rows in rows]
    item_of = {row: item for item, item_rows in enumerate(rows) for row in item_rows}
    tokens = list(apart)
    for bundle in trie.bundles(everything):
        # An item that does not fit into some replicas counts in full, so that it is not dispatched to them.
        pieces = [piece for piece in sorted({item_of[row] for row in bundle}) if apart[piece] <= least_tokens]
        if len(pieces) < 2:
            continue
        all_apart = sum(apart[piece] for piece in pieces)
        together = trie.num_computed([row for piece in pieces for row in rows[piece]])
        counted = together + (all_apart - together) * (min(num_replicas, len(pieces)) - 1) / (len(pieces) - 1)
        for piece in pieces:
            tokens[piece] = max(1, min(apart[piece], round(apart[piece] * counted / all_apart)))
    return rows, tuple(tokens)


class _Solution(NamedTuple):
    """How many items of each bucket each replica gets.

    Attributes:
        items: the items that were dispatched.
        bucketing: the buckets of their lengths.
        dispatch: what each replica of each group gets.
        groups: replicas of one configuration and one rate.
        members: the replicas of each group, by index in the layout.
    """

    items: RowItems
    bucketing: Bucketing
    dispatch: Dispatch
    groups: tuple[ReplicaGroup, ...]
    members: tuple[tuple[int, ...], ...]

    def replicas_of_rows(self) -> np.ndarray:
        """Return the replica of each row, concatenated over batches: int64 of shape `(rows,)`.

        The items of a bucket are distributed evenly over tasks, and then by tokens.
        """
        tasks = np.repeat(np.arange(len(self.items.tokens)), [len(batch_tokens) for batch_tokens in self.items.tokens])
        lengths = np.array(self.items.lengths, dtype=np.int64)
        # The last key of `lexsort` is the primary one; positions make the order total and deterministic.
        order = np.lexsort((np.arange(len(lengths)), -lengths, tasks))
        quotas = [replica for group in self.dispatch.replica_counts for replica in group]
        places = np.array([place for group in self.members for place in group], dtype=np.int64)
        replicas_of_rows = places[deal_buckets(order, self.bucketing.bucket_of(lengths.tolist()), quotas)]
        by_batch, item = [np.zeros(0, dtype=np.int64)], 0
        for items in self.items.rows:
            replica_of_row = np.empty(sum(map(len, items)), dtype=np.int64)
            for rows in items:
                replica_of_row[list(rows)] = replicas_of_rows[item]
                item += 1
            by_batch.append(replica_of_row)
        return np.concatenate(by_batch)

    def replica_s(self, time_model: ReplicaTimeModel, num_replicas: int) -> list[float]:
        """Return the predicted seconds of each replica, in the order of the layout.

        They assume the nominal speed of the configuration; measured seconds show how much slower a replica is.
        """
        seconds = [0.0] * num_replicas
        for group, members, replicas in zip(self.groups, self.members, self.dispatch.replica_counts, strict=True):
            # Buckets beyond what a replica holds are empty for it (L Eq. 3).
            fits = sum(length <= group.max_tokens for length in self.bucketing.boundaries)
            lengths = self.bucketing.mean_lengths[:fits]
            for place, counts in zip(members, replicas, strict=True):
                seconds[place] = time_model.step_s(group.config, counts[:fits], lengths, group.max_tokens)
        return seconds


class DispatchedShares(Shares):
    """Divides the global batches of every step among replicas.

    Args:
        layout: which process belongs to which replica.
        time_model: predicts the seconds of replicas and has the maximum tokens of each configuration; may be omitted if
            replicas are equal.
        processes: the processes of the run; by default this one is alone.
        policy: "balanced" by Eq. 3, or a baseline: "length", each bucket to the smallest configuration that supports it
            (L Figure 4(c)), "uniform", each bucket evenly over all replicas that support it (L Figure 4(b)).
        solver: name of a PuLP solver, a PuLP solver itself, or None for the default of `dispatch`.
        clock: a clock to continue, such as the clock of the shares that this object replaces.
        rates: relative slowness of replicas, updated by `observe` and used to divide rows. By default replicas of one
            configuration count as equal.
        cuts_rows: whether rows that are longer than any replica can hold in a pass are computed in parts. They count as
            rows of the maximum length, and therefore go to the largest replicas.
        least_solved_s: predicted seconds of a step below which no solver is used.

    Attributes:
        clock: the cost of dispatching on this process.
        expected_s: predicted seconds of each replica in this step; empty if replicas are equal.
        solved: rank 0's solution for this step; `None` on other ranks, and if replicas are equal.
        looks_ahead: whether `prepare` has an effect, which is if there is anything to solve.

    Raises:
        ConfigError: for unequal replicas without a time model that knows all of them.

    Example:
        >>> shares = DispatchedShares(ParallelLayout.of(2))
        >>> shares.divide([])
        [[], []]
    """

    def __init__(
        self,
        layout: ParallelLayout,
        time_model: ReplicaTimeModel | None = None,
        processes: Processes | None = None,
        *,
        policy: Dispatching = "balanced",
        solver: Any = None,
        clock: DispatchClock | None = None,
        rates: ReplicaRates | None = None,
        cuts_rows: bool = False,
        least_solved_s: float = LEAST_SOLVED_S,
    ) -> None:
        """Check the time model and store the options; no thread is started yet."""
        self.layout, self.cuts_rows, self.rates = layout, cuts_rows, rates
        self.processes = processes or Processes()
        self._replica = layout.place(self.processes.rank).replica
        self.clock = clock or DispatchClock()
        self.expected_s: tuple[float, ...] = ()
        self.solved: Dispatch | None = None
        self.looks_ahead = not layout.are_alike
        if self.looks_ahead:
            if time_model is None:
                raise ConfigError(
                    f"replicas {layout} differ, which needs a time model that has each of them. Pass "
                    "deployment_facts.run_time_model(...)."
                )
            unknown = [str(config) for config in dict.fromkeys(layout.replicas) if config not in time_model.max_tokens]
            if unknown:
                known = ", ".join(map(str, time_model.configurations))
                raise ConfigError(
                    f"replicas must be of {known}, got {layout}, of which {', '.join(unknown)} cannot hold any "
                    "sequence. Use more processes per replica, or gradient_checkpointing=True."
                )
            self._times = replace(time_model, packs=True)
        self._options = {"policy": policy, "solver": solver, "pads": False, "least_solved_s": least_solved_s}
        self._limits: dict[ParallelConfig, int] = {}
        self._even_tokens = [0] * layout.num_replicas
        self._replicas_of_rows: dict[tuple[str, int], np.ndarray] = {}
        self._thread: ThreadPoolExecutor | None = None
        self._pending: tuple[tuple[BatchRows, ...], Future[_Solution]] | None = None
        self._last: _Solution | None = None

    @property
    def max_tokens(self) -> tuple[int | None, ...]:
        """Maximum tokens of a pass in each replica; `None` if only the plan limits it."""
        limits = self._known_limits()
        return tuple(limits.get(config) for config in self.layout.replicas)

    def refusal(self, batch: TaskBatch) -> str | None:
        """Return why no replica can train a batch, identically on every process; `None` if one can."""
        longest = max(self._known_limits().values(), default=math.inf)
        too_long = next((sequence for sequence in batch.sequences if len(sequence) > longest), None)
        if too_long is None or self.cuts_rows:
            return None
        return (
            f"row {too_long.row} must have at most {longest} tokens, the maximum of the replicas {self.layout}, got "
            f"{len(too_long)}. Set max_length={longest} or split_long_sequences=True, or add a replica of more "
            "processes: peft-mux plan --deployment shows which."
        )

    # ---------------------------------------------------------------- one step

    def prepare(self, batches: Sequence[TaskBatch]) -> None:
        """Start solving the next step on a thread of rank 0 and return immediately; a no-op if nothing is solved.

        If the next step turns out to have other batches, it is solved again when it begins.

        Args:
            batches: the expected global batches of the next step.
        """
        # Called on every process first, because it communicates; only rank 0 continues.
        self._known_limits()
        if not self.looks_ahead or not self.processes.is_main or not any(batch.sequences for batch in batches):
            return
        # One step ahead at most.
        if self._pending is None and not any(self.refusal(batch) is not None for batch in batches):
            self._submit(self._key(_batch_rows(batches)))

    def begin(self, batches: Sequence[TaskBatch]) -> None:
        """Assign the sequences of a step to replicas; `divide` then returns the result, hTask by hTask.

        Args:
            batches: global batches of all tasks of the step, the same on every process.

        Raises:
            ConfigError: on every process, if no replica can hold a sequence.
        """
        self.expected_s, self.solved = (), None
        if not self.looks_ahead:
            lengths = [[len(sequence) for sequence in batch.sequences] for batch in batches]
            replicas_of_rows = [np.zeros(len(batch_lengths), dtype=np.int64) for batch_lengths in lengths]
            tries = [batch.trie for batch in batches]
            shares = even_shares(lengths, self.layout.num_replicas, self._slowness(), tries)
            for replica, share in enumerate(shares):
                self._even_tokens[replica] = 0
                for replica_of_row, tokens, rows in zip(replicas_of_rows, lengths, share, strict=True):
                    replica_of_row[rows] = replica
                    self._even_tokens[replica] += sum(tokens[row] for row in rows)
            self._replicas_of_rows = {
                (batch.task, batch.step): replicas for batch, replicas in zip(batches, replicas_of_rows, strict=True)
            }
            return
        self._known_limits()
        for batch in batches:
            # Checked before rank 0 solves: every process raises the same error, so none waits in the exchange.
            if (refusal := self.refusal(batch)) is not None:
                raise ConfigError(f"tasks.{batch.task}: {refusal}")
        key = self._key(_batch_rows(batches))
        replicas_of_rows = [np.zeros(0, dtype=np.int64) for _ in key]
        if any(batch.lengths for batch in key):
            solution = None
            if self.processes.is_main:
                started = time.perf_counter()
                # Another step was solved in advance if tasks or rows have changed in the meantime.
                is_ahead = self._pending is not None and self._pending[0] == key
                future = self._pending[1] if is_ahead and self._pending is not None else self._submit(key)
                self._pending = None
                solution = future.result()
                self.solved = solution.dispatch
                self.clock.num_steps += 1
                self.clock.num_ahead += is_ahead
                self.clock.solve_s += solution.dispatch.solve_s
                self.clock.waited_s += time.perf_counter() - started
            replicas_of_rows, self.expected_s = self._agreed(key, solution)
        self._replicas_of_rows = {
            (batch.task, batch.step): replicas for batch, replicas in zip(key, replicas_of_rows, strict=True)
        }

    def typical_rows(self, batches: Sequence[BatchRows]) -> list[dict[str, list[int]]] | None:
        """Return the rows of each replica in a step of typical batches, for plans; all processes must call this.

        Args:
            batches: the rows of a typical batch of each task.

        Returns:
            For each replica the indices of its rows of each task; `None` if there is nothing to divide, or if no
            replica can hold a row.
        """
        if not self.looks_ahead:
            return None
        longest = max(self._known_limits().values())
        most = max((length for batch in batches for length in batch.lengths), default=0)
        if not most or (most > longest and not self.cuts_rows):
            return None
        key = self._key(batches)
        # Not a real step: nothing is counted, and the next step does not start from this solution.
        solution = self._solve(key, *self._groups_by_rate(), warm_start=None) if self.processes.is_main else None
        replicas_of_rows, _ = self._agreed(key, solution)
        return [
            {
                batch.task: np.flatnonzero(replica_of_row == replica).tolist()
                for batch, replica_of_row in zip(batches, replicas_of_rows, strict=True)
            }
            for replica in range(self.layout.num_replicas)
        ]

    def divide(self, batches: Sequence[TaskBatch]) -> list[list[list[int]]]:
        """Return the rows of each replica.

        If `begin` was not called with these batches, they are treated as a whole step.

        Args:
            batches: global batches of the tasks that share their passes.

        Returns:
            For each replica and each batch, the indices of its sequences, ascending.

        Raises:
            ConfigError: for a sequence that no replica can hold; on every process.
        """
        if any((batch.task, batch.step) not in self._replicas_of_rows for batch in batches):
            self.begin(batches)
        return [
            [np.flatnonzero(self._replicas_of_rows[batch.task, batch.step] == replica).tolist() for batch in batches]
            for replica in range(self.layout.num_replicas)
        ]

    @property
    def most_tokens_here(self) -> int | None:
        """Maximum tokens of a pass in this replica; `None` if only the plan limits it."""
        return self.max_tokens[self._replica]

    def rows_here(self, batches: Sequence[TaskBatch]) -> list[list[int]]:
        """Return the rows of this replica in some batches of the step; see `divide`."""
        return self.divide(batches)[self._replica]

    def observe(self, process_s: Sequence[float]) -> None:
        """Update `rates` from the measured passes of the last step; a no-op without `rates`.

        Args:
            process_s: seconds from the start of the first pass of each process to the end of its last one, by rank; the
                same numbers on every process.
        """
        if self.rates is None:
            return
        measured = [0.0] * self.layout.num_replicas
        for rank, seconds in enumerate(process_s):
            replica = self.layout.place(rank).replica
            # A replica has finished when its last process has.
            measured[replica] = max(measured[replica], seconds)
        expected = self.expected_s if self.looks_ahead else self._even_tokens
        if len(expected) == len(measured):
            self.rates.observe(expected, measured)

    def close(self) -> None:
        """Stop the thread. May be called twice; a later step starts a new thread."""
        if self._thread is not None:
            self._thread.shutdown(wait=True, cancel_futures=True)
        self._thread = self._pending = self._last = None

    # ---------------------------------------------------------------- internal

    def _known_limits(self) -> dict[ParallelConfig, int]:
        """Return the maximum tokens of each configuration over all processes; the first call communicates."""
        if self.looks_ahead and not self._limits:
            configs = tuple(dict.fromkeys(self.layout.replicas))
            everywhere = self.processes.exchange([self._times.max_tokens[config] for config in configs])
            # The minimum over all processes: devices may differ, and a row must fit on any of them.
            self._limits = {config: min(limits) for config, *limits in zip(configs, *everywhere, strict=True)}
        return self._limits

    def _slowness(self) -> tuple[float, ...]:
        """Return how much slower each replica is than the others; 1 if no rates are known."""
        return (1.0,) * self.layout.num_replicas if self.rates is None else self.rates.slowness

    def _key(self, batches: Sequence[BatchRows]) -> tuple[BatchRows, ...]:
        """Return the properties that a dispatch depends on; a row that will be split counts with the maximum length."""
        longest = max(self._known_limits().values())
        return tuple(rows._replace(lengths=tuple(min(length, longest) for length in rows.lengths)) for rows in batches)

    def _groups_by_rate(self) -> tuple[tuple[ReplicaGroup, ...], tuple[tuple[int, ...], ...]]:
        """Return the groups of replicas of one configuration and one rate, and which replicas each has."""
        limits, members = self._known_limits(), {}
        for place, kind in enumerate(zip(self.layout.replicas, self._slowness(), strict=True)):
            members.setdefault(kind, []).append(place)
        groups = (ReplicaGroup(config, len(places), limits[config], rate) for (config, rate), places in members.items())
        return tuple(groups), tuple(map(tuple, members.values()))

    def _submit(self, key: tuple[BatchRows, ...]) -> Future[_Solution]:
        """Start solving a step on the thread, starting from the previous solution if it had the same groups."""
        groups, members = self._groups_by_rate()

        def solve() -> _Solution:
            last = self._last
            warm_start = last.dispatch if last is not None and last.groups == groups else None
            self._last = self._solve(key, groups, members, warm_start=warm_start)
            return self._last

        # A single thread solves in the order of submission, so that the previous solution is available.
        self._thread = self._thread or ThreadPoolExecutor(max_workers=1, thread_name_prefix="dispatch")
        future = self._thread.submit(solve)
        self._pending = key, future
        return future

    def _solve(
        self,
        key: tuple[BatchRows, ...],
        groups: tuple[ReplicaGroup, ...],
        members: tuple[tuple[int, ...], ...],
        *,
        warm_start: Dispatch | None,
    ) -> _Solution:
        """Return the fastest dispatch of a step over the ways to cut it into items; the first wins a tie."""
        limits = [group.max_tokens for group in groups]
        ways = row_items(key, self.layout.num_replicas, min(limits))
        interval = interval_tokens(max(max(way.lengths) for way in ways))
        solutions = []
        for way in ways:
            bucketing = bucket_boundaries(way.lengths, interval=interval, limits=limits)
            spread = dispatch(groups, bucketing, self._times, warm_start=warm_start, **self._options)
            solutions.append(_Solution(way, bucketing, spread, groups, members))
        return min(solutions, key=lambda solution: solution.dispatch.makespan_s)

    def _agreed(
        self, key: tuple[BatchRows, ...], solution: _Solution | None
    ) -> tuple[list[np.ndarray], tuple[float, ...]]:
        """Return the replica of each sequence of each batch, and the predicted seconds, as rank 0 has them."""
        sizes, num_replicas = [len(batch.lengths) for batch in key], self.layout.num_replicas
        # Rank 0 alone solves: a solver that ends by a time limit finds different answers on different machines. Its
        # answer is exchanged as integers, times in whole microseconds, so that every process has the same bits.
        numbers = [0] * (num_replicas + sum(sizes))
        if solution is not None:
            seconds = solution.replica_s(self._times, num_replicas)
            numbers = [round(time_s * _MICROSECONDS) for time_s in seconds] + solution.replicas_of_rows().tolist()
        numbers = self.processes.exchange(numbers)[0]
        agreed = np.array(numbers[num_replicas:], dtype=np.int64)
        replica_s = tuple(number / _MICROSECONDS for number in numbers[:num_replicas])
        return np.split(agreed, np.cumsum(sizes)[:-1]), replica_s


def _batch_rows(batches: Sequence[TaskBatch]) -> list[BatchRows]:
    return [BatchRows(batch.task, batch.step, tuple(map(len, batch.sequences)), batch.trie) for batch in batches]
