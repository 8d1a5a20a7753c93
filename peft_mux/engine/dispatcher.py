"""Turns a plan into work: each call yields the next step's micro-batches of the tasks that are running."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Protocol

from peft_mux.data.batch import MuxBatch, TaskBatch
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.engine.agreement import Agreement
from peft_mux.engine.data_parallel import RowShares
from peft_mux.engine.processes import Processes
from peft_mux.engine.work import StepWork
from peft_mux.errors import DataError
from peft_mux.scheduler.plan import HTask, Plan

_PACKING_SLACK = 1.05
"""Whole sequences do not fill passes evenly."""


class Loader(Protocol):
    """Yields the global batch of any step of one task."""

    def batch(self, step: int) -> TaskBatch:
        """Return the global batch of a step."""
        ...


class RunningTask(Protocol):
    """What the dispatcher reads of a task."""

    @property
    def name(self) -> str:
        """Name of the task."""
        ...

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        ...

    @property
    def loader(self) -> Loader:
        """Its rows."""
        ...


class Dispatcher:
    """Follows a plan: one global batch of every running task a step, hTask by hTask.

    Args:
        plan: which tasks share their passes, and how many tokens a pass may hold.
        collator: packs and chunks.
        processes: that divide the rows among them; by default this one does all.
    """

    def __init__(self, plan: Plan, collator: ChunkPackingCollator, processes: Processes | None = None) -> None:
        """Remember the plan."""
        self.plan = plan
        self.collator = collator
        self.processes = processes or Processes()

    def next(self, tasks: Iterable[RunningTask]) -> StepWork:
        """Return the next step of the given tasks.

        A task whose rows cannot be read is reported in `failures` and left out; the others go on.
        """
        batches: dict[str, TaskBatch] = {}
        failures: dict[str, str] = {}
        for task in tasks:
            try:
                batches[task.name] = task.loader.batch(task.step)
            except DataError as error:
                failures[task.name] = f"data: {error}"
        order = tuple(name for htask in self.plan.htasks for name in htask.tasks)
        batches, failures = Agreement(self.processes).on_batches(batches, failures, order)
        shares = RowShares(self.processes.world_size)
        micro_batches: list[MuxBatch] = []
        for htask in self.plan.htasks:
            fused = [batches[name] for name in htask.tasks if name in batches]
            if fused:
                micro_batches += self._own_share(htask, fused, shares)
        return StepWork(
            tasks=tuple(batches),
            micro_batches=tuple(micro_batches),
            num_tokens={name: batch.num_tokens for name, batch in batches.items()},
            failures=failures,
            sync_order=tuple(sorted(batches, key=lambda name: order.index(name) if name in order else len(order))),
        )

    def _own_share(self, htask: HTask, fused: list[TaskBatch], shares: RowShares) -> list[MuxBatch]:
        """Return the passes of this process over its rows of tasks that are fused."""
        own = shares.divide(fused)[self.processes.rank]
        own_tokens = sum(len(batch.sequences[row]) for batch, rows in zip(fused, own, strict=True) for row in rows)
        if own_tokens == 0:
            return []
        return self.collator.micro_batches(fused, max_tokens=self._capacity(htask, own_tokens), only=own)

    def _capacity(self, htask: HTask, num_tokens: int) -> int:
        """Return the bound of a pass that cuts these tokens into as many even passes as the plan means."""
        bound = self.plan.max_tokens_per_micro_batch
        if not htask.tokens_per_micro_batch:
            return bound
        passes = max(1, math.ceil(num_tokens / bound), round(num_tokens / htask.tokens_per_micro_batch))
        return min(bound, math.ceil(num_tokens / passes * _PACKING_SLACK))
