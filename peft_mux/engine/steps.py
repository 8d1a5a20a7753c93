"""`StepSource`: turns a plan into work, step by step: the micro-batches of the tasks that are running."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from peft_mux.data.batch import MuxBatch
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.data.task_batch import TaskBatch
from peft_mux.engine.batches_ahead import BatchesAhead, Loader, SteppingTask
from peft_mux.engine.processes.agreement import Agreement
from peft_mux.engine.processes.processes import Processes
from peft_mux.engine.replicas.dispatched_shares import DispatchedShares
from peft_mux.engine.replicas.layout import ParallelLayout
from peft_mux.engine.work import StepWork
from peft_mux.errors import DataError
from peft_mux.packing.passes import passes_meant
from peft_mux.scheduler.plan import Plan
from peft_mux.scheduler.planner.values import HTask


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
