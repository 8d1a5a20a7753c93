"""`DispatchedShares`: which replica trains which sequences of a step (L section 4.3), the same answer on every process.

Equal replicas divide rows by tokens, as processes have always done. Unlike ones are dispatched by a `StepSolver`. Rows
that begin alike are one sequence of the tokens that they compute (`row_items`). Rank 0 solves, as a time limit makes
answers depend on the machine, and the others get its answer as numbers. The next step can be solved while this one
runs::

    rank 0     begin(t) | passes of step t ......... | begin(t+1)
    its thread          | prepare(t+1): solves       | (waits here only for what is left)

What a replica does with its sequences is for `peft_mux.engine.steps` to say, and how gradients are summed over replicas
for `peft_mux.engine.gradients.sync`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from peft_mux.data.task_batch import TaskBatch
from peft_mux.engine.processes.processes import Processes
from peft_mux.engine.replicas.dispatch_clock import DispatchClock
from peft_mux.engine.replicas.layout import ParallelLayout
from peft_mux.engine.replicas.row_items import BatchRows
from peft_mux.engine.replicas.row_owners import StepKey
from peft_mux.engine.replicas.step_solver import StepSolver, slowness_of
from peft_mux.errors import ConfigError
from peft_mux.packing.even_shares import even_shares
from peft_mux.scheduler.dispatching.ahead import StepDispatch
from peft_mux.scheduler.dispatching.dispatch import Policy
from peft_mux.scheduler.dispatching.rates import ReplicaRates
from peft_mux.scheduler.replicas.configs import ReplicaGroup
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
