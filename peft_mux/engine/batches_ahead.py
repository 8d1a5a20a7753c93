"""`BatchesAhead`: reads each task's next global batch one step early, so that its dispatch can be solved meanwhile.

What is read is kept until `take`: a stream that is asked for a batch twice would be read again from its start.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Protocol

from peft_mux.data.task_batch import TaskBatch
from peft_mux.errors import DataError
from peft_mux.own_code import Listener, nobody


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

    def __init__(self, listener: Listener = nobody) -> None:
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
