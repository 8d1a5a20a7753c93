"""Turns a plan into work: each call yields the next step's micro-batches of the tasks that are running."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from peft_mux.data.batch import MuxBatch, TaskBatch
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.engine.work import StepWork
from peft_mux.errors import DataError
from peft_mux.scheduler.plan import Plan


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
    """

    def __init__(self, plan: Plan, collator: ChunkPackingCollator) -> None:
        """Remember the plan."""
        self.plan = plan
        self.collator = collator

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
        micro_batches: list[MuxBatch] = []
        for htask in self.plan.htasks:
            fused = [batches[name] for name in htask.tasks if name in batches]
            if fused:
                micro_batches += self.collator.micro_batches(fused, max_tokens=self.plan.max_tokens_per_micro_batch)
        return StepWork(
            tasks=tuple(batches),
            micro_batches=tuple(micro_batches),
            num_tokens={name: batch.num_tokens for name, batch in batches.items()},
            failures=failures,
        )
