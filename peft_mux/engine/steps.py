"""`StepSource`: converts a plan into the work of each step, the micro-batches of the running tasks.

`BatchesAhead` prefetches each task's next global batch, so that its dispatch can be solved during the current step. It
keeps batches until `take`, because reading the same batch of a stream twice would restart the stream.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from peft_mux.data.batch import MuxBatch
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.data.packing.passes import passes_meant
from peft_mux.data.task_batch import TaskBatch
from peft_mux.engine.agreement import Agreement
from peft_mux.engine.processes import Processes
from peft_mux.engine.tasks.active_task import ActiveTask
from peft_mux.engine.work import StepWork
from peft_mux.errors import DataError
from peft_mux.scheduler.plan import Plan
from peft_mux.user_code import Listener, ignore_timing


class BatchesAhead:
    """Holds at most one batch of each task.

    Args:
        listener: called with the seconds that the run has waited for the rows of a task.

    Example:
        >>> ahead = BatchesAhead()
        >>> ahead.read([])
        []
    """

    def __init__(self, listener: Listener = ignore_timing) -> None:
        self._listener = listener
        self._held: dict[str, tuple[Any, int, TaskBatch | DataError]] = {}
        self._taken: dict[str, tuple[Any, int, TaskBatch | DataError]] = {}

    def take(self, task: ActiveTask, step: int | None = None) -> TaskBatch:
        """Return the batch of a task's step, reading it if it was not prefetched.

        Args:
            task: the task that takes the step.
            step: number of the step; by default the task's current one.

        Raises:
            DataError: if its rows cannot be read, or prefetching them failed.
        """
        step = task.step if step is None else step
        loader, held_step, batch = self._held.pop(task.name, (None, -1, None))
        # A task that was removed and registered again has another loader, and a task that was reset to a checkpoint has
        # another step. Rows that were prefetched before must not be used.
        if loader is not task.loader or held_step != step or batch is None:
            batch = self._read(task, step)
        if isinstance(batch, DataError):
            raise batch
        self._taken[task.name] = task.loader, step, batch
        return batch

    def put_back(self) -> None:
        """Put the last batch of each task back, because its step is repeated."""
        self._held |= self._taken

    def begin(self, tasks: Iterable[ActiveTask], *, num_steps: int = 1) -> None:
        """Start reading streams in their threads during a step; returns immediately.

        Args:
            tasks: the tasks of the current step, before they have taken it.
            num_steps: how many steps after the current one to read.
        """
        for task in tasks:
            # Datasets that are tokenised in advance need no thread.
            begin = getattr(task.loader, "begin", None)
            if begin is not None and task.step + num_steps < task.num_steps:
                begin(task.step + num_steps)

    def read(self, tasks: Iterable[ActiveTask]) -> list[TaskBatch]:
        """Prefetch the next step of each task, except for tasks that end with the current step.

        A task whose rows cannot be read is also skipped; `take` raises its error later.

        Args:
            tasks: the tasks of the current step, before they have taken it.
        """
        batches = []
        for task in tasks:
            step = task.step + 1
            if step >= task.num_steps:
                continue
            try:
                batch: TaskBatch | DataError = self._read(task, step)
                batches.append(batch)
            except DataError as error:
                # Stored, not raised: the current step has its rows and must not fail because of the next one.
                batch = error
            self._held[task.name] = task.loader, step, batch
        return batches

    def keep_only(self, names: Iterable[str]) -> None:
        """Discard the batches of all tasks but these."""
        for name in (self._held.keys() | self._taken.keys()).difference(names):
            self._held.pop(name, None)
            self._taken.pop(name, None)

    def _read(self, task: ActiveTask, step: int) -> TaskBatch:
        started = time.perf_counter()
        try:
            return task.loader.batch(step)
        finally:
            self._listener(task.name, "train_dataset", time.perf_counter() - started)


class Shares:
    """The rows that this process's replica takes of each global batch: all of them, if there is one replica.

    `peft_mux.parallel.dispatch.DispatchedShares` divides batches among several.

    Attributes:
        looks_ahead: whether `prepare` has an effect; then replicas differ, and may have different plans.
    """

    looks_ahead = False

    @property
    def most_tokens_here(self) -> int | None:
        """Maximum tokens of a pass in this replica; `None` if only the plan limits it."""
        return None

    def refusal(self, batch: TaskBatch) -> str | None:
        """Return why no replica can train a batch, identically on every process; `None` if one can."""
        del batch
        return None

    def prepare(self, batches: Sequence[TaskBatch]) -> None:
        """Start dividing the expected batches of the next step; returns immediately."""

    def begin(self, batches: Sequence[TaskBatch]) -> None:
        """Divide the global batches of a step, the same on every process."""

    def rows_here(self, batches: Sequence[TaskBatch]) -> list[list[int]]:
        """Return the rows of this replica in some batches of the step, ascending."""
        return [list(range(len(batch.sequences))) for batch in batches]

    def observe(self, process_s: Sequence[float]) -> None:
        """Learn how fast replicas are from the seconds of each process's passes in the last step, by rank."""

    def close(self) -> None:
        """End what `prepare` has started."""


class StepSource:
    """Follows a plan: one global batch of every running task per step, hTask by hTask.

    Args:
        plan: which tasks share their passes, and how many tokens a pass may hold.
        collator: packs rows into micro-batches, and cuts them into chunks.
        processes: the processes of the run; by default this one is alone.
        shares: divides the rows of a step among replicas; by default there is one.
        ahead: holds prefetched batches; it is kept when the plan changes.
    """

    def __init__(
        self,
        plan: Plan,
        collator: ChunkPackingCollator,
        processes: Processes | None = None,
        shares: Shares | None = None,
        ahead: BatchesAhead | None = None,
    ) -> None:
        self.plan, self.collator = plan, collator
        self.processes = processes or Processes()
        self.shares = shares or Shares()
        self.ahead = ahead or BatchesAhead()

    def next(self, tasks: Iterable[ActiveTask], *, num_steps_later: int = 0) -> StepWork:
        """Return the next step of the given tasks.

        A task whose rows cannot be read is reported in `failures` and skipped; the others continue.

        Args:
            tasks: the tasks that take a step, in stream order.
            num_steps_later: how many steps after the current one to return.
        """
        batches: dict[str, TaskBatch] = {}
        failures: dict[str, str] = {}
        tasks = list(tasks)
        for task in tasks:
            try:
                batches[task.name] = self.ahead.take(task, task.step + num_steps_later)
            except DataError as error:
                failures[task.name] = f"data: {error}"
        batches, failures = Agreement(self.processes).on_batches(batches, failures, self._order(batches), tasks)
        for name, batch in list(batches.items()):
            # After the agreement, so that all processes reject the same rows.
            refusal = self.shares.refusal(batch)
            if refusal is not None:
                failures[name] = f"data: {refusal}"
                del batches[name]
        self.shares.begin(list(batches.values()))
        micro_batches: list[MuxBatch] = []
        for htask in self.plan.htasks:
            fused = [batches[name] for name in htask.tasks if name in batches]
            rows_here = self.shares.rows_here(fused)
            num_tokens = sum(
                sum(len(batch.sequences[row]) for row in rows) if batch.trie is None else batch.trie.num_computed(rows)
                for batch, rows in zip(fused, rows_here, strict=True)
            )
            # No pass instead of an empty one; the replica contributes zero gradients for the task.
            if num_tokens == 0:
                continue
            planned = htask.micro_batches * htask.tokens_per_micro_batch
            # Batches are random, so a step may have another number of tokens than the plan assumed.
            has_shared = any(batch.trie is not None for batch in fused)
            meant = passes_meant(num_tokens, planned, htask.micro_batches, has_shared=has_shared)
            bound = self.plan.max_tokens_per_micro_batch
            bound = min(bound, self.shares.most_tokens_here or bound)
            micro_batches += self.collator.micro_batches(fused, max_tokens=bound, only=rows_here, num_passes=meant)
        order = self._order(batches)
        return StepWork(
            tasks=tuple(batches),
            micro_batches=tuple(micro_batches),
            num_tokens={name: batch.num_tokens for name, batch in batches.items()},
            failures=failures,
            sync_order=tuple(sorted(batches, key=lambda name: order.index(name) if name in order else len(order))),
        )

    def window(self, tasks: Iterable[ActiveTask], num_steps: int) -> list[StepWork]:
        """Return several steps of the given tasks, or only the steps before one whose rows cannot be read.

        Args:
            tasks: the tasks that take the steps, in stream order; none of them ends before the last one.
            num_steps: number of steps, 1 or more.
        """
        tasks = list(tasks)
        works: list[StepWork] = []
        for number in range(num_steps):
            work = self.next(tasks, num_steps_later=number)
            # It is read again as the first step of the next window, which then reports the failures.
            if work.failures and works:
                break
            works.append(work)
            if work.failures:
                break
        return works

    def prepare(self, tasks: Iterable[ActiveTask]) -> None:
        """Start reading and dividing the next step if that takes time.

        Returns immediately, except if rows are divided in advance: then it waits for the rows of the next step.

        Args:
            tasks: the tasks of the current step, before they have taken it.
        """
        tasks = list(tasks)
        if self.shares.looks_ahead:
            self.shares.prepare(self.ahead.read(tasks))
            self.ahead.begin(tasks, num_steps=2)
        else:
            self.ahead.begin(tasks)

    def _order(self, batches: Mapping[str, TaskBatch]) -> tuple[str, ...]:
        """Return the order in which all processes sum gradients: plan order if all processes have the same plan.

        Different replicas have different plans; they use stream order.
        """
        # Equal replicas have equal costs and therefore the same plan; `Agreement.on_batches` compares it.
        if not self.shares.looks_ahead:
            return tuple(name for htask in self.plan.htasks for name in htask.tasks)
        return tuple(batches)
