"""`BatchesAhead`: reads each task's next global batch one step early, so that its dispatch can be solved meanwhile.

What is read is kept until `take`: a stream that is asked for a batch twice would be read again from its start.
"""

# MERGED: `StepSource`: turns a plan into work, step by step: the micro-batches of the tasks that are running.

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol

from peft_mux.data.batch import MuxBatch
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.data.packing.passes import passes_meant
from peft_mux.data.task_batch import TaskBatch
from peft_mux.engine.agreement import Agreement
from peft_mux.engine.dispatch import DispatchedShares
from peft_mux.engine.layout import ParallelLayout
from peft_mux.engine.processes import Processes
from peft_mux.engine.work import StepWork
from peft_mux.errors import DataError
from peft_mux.scheduler.plan import Plan
from peft_mux.scheduler.planner.values import HTask
from peft_mux.user_code import Listener, ignore_timing


class Loader(Protocol):
    """Yields the global batch of any step of one task."""

    def batch(self, step: int) -> TaskBatch:
        """Return the global batch of a step."""
        ...


class SteppingTask(Protocol):
    """What is asked of a task whose batches are read."""

    @property
    def name(self) -> str:
        """Name of the task."""
        ...

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        ...

    @property
    def num_steps(self) -> int:
        """Optimizer steps that it takes in all."""
        ...

    @property
    def loader(self) -> Loader:
        """What reads the rows of the task."""
        ...


class BatchesAhead:
    """Holds at most one batch of each task.

    Args:
        listener: told for how long the run waited for the rows of a task.

    Example:
        >>> ahead = BatchesAhead()
        >>> ahead.read([])
        []
    """

    def __init__(self, listener: Listener = ignore_timing) -> None:
        """Hold nothing yet."""
        self._listener = listener
        self._held: dict[str, tuple[Loader, TaskBatch | DataError]] = {}
        self._steps: dict[str, int] = {}
        self._taken: dict[str, tuple[Loader, int, TaskBatch]] = {}

    def take(self, task: SteppingTask) -> TaskBatch:
        """Return the batch of a task's current step, read early or now.

        Args:
            task: the task that takes the step.

        Raises:
            DataError: if its rows cannot be read, or could not be when they were read early.
        """
        batch = self._take(task)
        self._taken[task.name] = task.loader, task.step, batch
        return batch

    def put_back(self) -> None:
        """Hold what was taken last of each task once more, as the step that it is of is taken again."""
        for name, (loader, step, batch) in self._taken.items():
            self._held[name], self._steps[name] = (loader, batch), step

    def _take(self, task: SteppingTask) -> TaskBatch:
        loader, found = self._held.pop(task.name, (None, None))
        # A task that was removed and came again under its name has another loader, and one that was put back to a
        # checkpoint another step: what was read for the old one must not be trained on.
        if loader is task.loader and self._steps.get(task.name) == task.step and found is not None:
            if isinstance(found, DataError):
                raise found
            return found
        return self._read(task, task.step)

    def begin(self, tasks: Iterable[SteppingTask], *, num_steps: int = 1) -> None:
        """Let streams read on in their threads while a step is taken; returns at once.

        Args:
            tasks: the tasks of the current step, before they have taken it.
            num_steps: how many steps after the current one the rows are of.
        """
        for task in tasks:
            # Rows that are tokenised already are at hand, and need no thread.
            begin = getattr(task.loader, "begin", None)
            if begin is not None and task.step + num_steps < task.num_steps:
                begin(task.step + num_steps)

    def read(self, tasks: Iterable[SteppingTask]) -> list[TaskBatch]:
        """Read the step after the current one of each task; those that end with this one are left out.

        A task whose rows cannot be read is left out too; `take` raises what was raised here.

        Args:
            tasks: the tasks of the current step, before they have taken it.
        """
        batches = []
        for task in tasks:
            step = task.step + 1
            if step >= task.num_steps:
                continue
            self._steps[task.name] = step
            try:
                batch = self._read(task, step)
            except DataError as error:
                # Held, not raised: the step that is about to run has its rows, and must not fail for those of the next
                # one.
                self._held[task.name] = task.loader, error
                continue
            self._held[task.name] = task.loader, batch
            batches.append(batch)
        return batches

    def _read(self, task: SteppingTask, step: int) -> TaskBatch:
        started = time.perf_counter()
        try:
            return task.loader.batch(step)
        finally:
            self._listener(task.name, "train_dataset", time.perf_counter() - started)

    def drop(self, name: str) -> None:
        """Forget a task that was removed."""
        for own in (self._held, self._steps, self._taken):
            own.pop(name, None)


class StepSource:
    """Follows a plan: one global batch of every running task a step, hTask by hTask.

    Args:
        plan: which tasks share their passes, and how many tokens a pass may hold.
        collator: packs rows into micro-batches, and cuts them into chunks.
        processes: the processes of the run; by default this one is alone.
        layout: which process belongs to which replica, as replicas divide the rows of a step; by default each process
            is one.
        shares: divides the rows of a step among replicas; by default evenly by tokens.
        ahead: keeps rows that were read a step early; it outlives a plan.
    """

    def __init__(
        self,
        plan: Plan,
        collator: ChunkPackingCollator,
        processes: Processes | None = None,
        layout: ParallelLayout | None = None,
        shares: DispatchedShares | None = None,
        ahead: BatchesAhead | None = None,
    ) -> None:
        """Remember the plan; read nothing yet."""
        self.plan = plan
        self.collator = collator
        self.processes = processes or Processes()
        self.layout = layout or ParallelLayout.of(self.processes.world_size)
        self.shares = shares or DispatchedShares(self.layout, processes=self.processes)
        self.ahead = ahead or BatchesAhead()
        self._replica = self.layout.place(self.processes.rank).replica

    def next(self, tasks: Iterable[SteppingTask]) -> StepWork:
        """Return the next step of the given tasks.

        A task whose rows cannot be read is reported in `failures` and left out; the others go on.

        Args:
            tasks: the tasks that take a step, in stream order.
        """
        batches: dict[str, TaskBatch] = {}
        failures: dict[str, str] = {}
        for task in tasks:
            try:
                batches[task.name] = self.ahead.take(task)
            except DataError as error:
                failures[task.name] = f"data: {error}"
        batches, failures = Agreement(self.processes).on_batches(batches, failures, self._order(batches))
        for name, batch in list(batches.items()):
            # After the agreement: all processes then refuse the same rows.
            refusal = self.shares.refusal(batch)
            if refusal is not None:
                failures[name] = f"data: {refusal}"
                del batches[name]
        micro_batches: list[MuxBatch] = []
        for htask, own in zip(self.plan.htasks, self._own_rows(batches), strict=True):
            if own:
                micro_batches += self._passes(htask, [batches[name] for name in own], list(own.values()))
        order = self._order(batches)
        return StepWork(
            tasks=tuple(batches),
            micro_batches=tuple(micro_batches),
            num_tokens={name: batch.num_tokens for name, batch in batches.items()},
            failures=failures,
            sync_order=tuple(sorted(batches, key=lambda name: order.index(name) if name in order else len(order))),
        )

    def window(self, tasks: Iterable[SteppingTask], num_steps: int) -> list[StepWork]:
        """Return several steps of the given tasks, or fewer where rows cannot be read: then those before.

        Args:
            tasks: the tasks that take the steps, in stream order; none of them ends before the last one.
            num_steps: number of steps, 1 or more.
        """
        own = list(tasks)
        works: list[StepWork] = []
        for number in range(num_steps):
            work = self.next(_Later.of(task, number) for task in own)
            # It is asked for again as the first step of the next window, and then tells who has failed.
            if work.failures and works:
                break
            works.append(work)
            if work.failures:
                break
        return works

    def _order(self, batches: Mapping[str, TaskBatch]) -> tuple[str, ...]:
        """Return the order in which all processes sum gradients: that of the plan, where they all have the same one.

        Replicas that are unlike one another plan for themselves, so there the order is that of the stream.
        """
        # Equal replicas have equal costs and so one plan; `Agreement.on_batches` compares it.
        if self.layout.are_alike:
            return tuple(name for htask in self.plan.htasks for name in htask.tasks)
        return tuple(batches)

    def _own_rows(self, batches: Mapping[str, TaskBatch]) -> list[dict[str, list[int]]]:
        """Return for each hTask and each of its tasks that take a step the rows of this replica."""
        self.shares.begin(list(batches.values()))
        own = []
        for htask in self.plan.htasks:
            names = [name for name in htask.tasks if name in batches]
            share = self.shares.divide([batches[name] for name in names])[self._replica]
            own.append(dict(zip(names, share, strict=True)))
        return own

    def prepare(self, tasks: Iterable[SteppingTask]) -> None:
        """Begin to read and to divide the step after the present one, where that takes time.

        Returns at once, but where rows are divided early: then it waits for those of the next step.

        Args:
            tasks: the tasks of the present step, before they have taken it.
        """
        tasks = list(tasks)
        if self.shares.looks_ahead:
            self.shares.prepare(self.ahead.read(tasks))
            self.ahead.begin(tasks, num_steps=2)
        else:
            self.ahead.begin(tasks)

    def _passes(self, htask: HTask, fused: list[TaskBatch], own: list[list[int]]) -> list[MuxBatch]:
        """Return the passes of this replica over its rows of tasks that share them.

        Args:
            htask: the hTask of these tasks in the plan.
            fused: global batch of each task.
            own: indices of this replica's rows in each of these batches.
        """
        own_tokens = sum(_num_computed(batch, rows) for batch, rows in zip(fused, own, strict=True))
        # No pass, not an empty one: what the replica has to sum for the task, it sums as zeros.
        if own_tokens == 0:
            return []
        planned = htask.micro_batches * htask.tokens_per_micro_batch
        # Batches are drawn, so a step may bring another number of tokens than the plan was made for.
        has_shared = any(batch.trie is not None for batch in fused)
        meant = passes_meant(own_tokens, planned, htask.micro_batches, has_shared=has_shared)
        return self.collator.micro_batches(fused, max_tokens=self._bound, only=own, num_passes=meant)

    @property
    def _bound(self) -> int:
        """Tokens that a pass of this replica may hold."""
        bound = self.plan.max_tokens_per_micro_batch
        return min(bound, self.shares.max_tokens[self._replica] or bound)


def _num_computed(batch: TaskBatch, rows: list[int]) -> int:
    """Return how many tokens rows of a batch take in one pass, each shared one once."""
    if batch.trie is not None:
        return batch.trie.num_computed(rows)
    return sum(len(batch.sequences[row]) for row in rows)


class _Later(NamedTuple):
    """A task as it stands some steps later.

    Attributes:
        name: name of the task.
        step: optimizer steps that it will have taken.
        num_steps: optimizer steps that it takes in all.
        loader: what reads its rows.
    """

    name: str
    step: int
    num_steps: int
    loader: Loader

    @classmethod
    def of(cls, task: SteppingTask, num_steps: int) -> _Later:
        return cls(task.name, task.step + num_steps, task.num_steps, task.loader)
