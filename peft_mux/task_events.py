"""`MultiTaskTrainerCallback`: what a callback of a run may be told of its tasks, beside transformers' own events."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from peft_mux.errors import Fault, closest


class MultiTaskTrainerCallback(TrainerCallback):
    """A `transformers.TrainerCallback` that is also told what becomes of the tasks of a run.

    Given to `MultiTaskTrainer(callbacks=[...])`. Each method may be left out, and a plain `TrainerCallback` may have
    single ones of them. All are called by `train`, between two steps, on every process, after what they tell of is
    done: an adapter that they name is on the disk. What is done to a trainer that does not train is not told.

    What they ask for (`control.should_training_stop`, or `trainer.register_tasks` and its like) is done before the
    next step; a run whose last task has ended goes on with what `on_task_end` registers. What they raise ends the run,
    as it does with transformers' events.

    The events of a task get, beside `args`, `state` and `control` of the run:

    * `task`: its name.
    * `task_state`: its own `TrainerState`, with `global_step` and `log_history`.
    * `status`, `reason`: its `TaskStatus` at that moment, and why, "" where nothing is to be said.
    * `adapter_folder`: the folder of its adapter as it is now; `None` where the disk has none, or an older one.
    * `model` and `processing_class`, as transformers' events get them.

    Example:
        >>> class Tell(MultiTaskTrainerCallback):
        ...     def on_task_end(self, args, state, control, *, task, status, adapter_folder, **kwargs):
        ...         print(f"{task} {status}: {adapter_folder}")
    """

    def on_task_register(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Hear of a task that was registered while the others train; it begins when a plan admits it."""

    def on_task_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Hear of a task that takes its first step of this `train` next, or goes on from a checkpoint."""

    def on_task_pause(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Hear of a task that rests."""

    def on_task_resume(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Hear of a task that rests no more; it goes on, or waits for a plan to admit it."""

    def on_task_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Hear of a task that has taken all its steps, or has stopped early."""

    def on_task_fail(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Hear of a task that has failed; `reason` says why, and the others go on.

        One that failed only because its adapter could not be written may end after all, when the disk takes it.
        """

    def on_task_remove(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Hear of a task that was removed, whether it had ended before or not."""

    def on_plan(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl | None:
        """Hear of the `plan` that the next steps follow, and of the one `before` it (`None` before the first)."""


EVENTS = tuple(name for name in vars(MultiTaskTrainerCallback) if name.startswith("on_"))
"""Names of the events that transformers does not have."""


def hears(callback: object, event: str) -> bool:
    """Return whether a callback has a method of its own for one of `EVENTS`."""
    method = getattr(callback, event, None)
    return method is not None and getattr(method, "__func__", method) is not getattr(MultiTaskTrainerCallback, event)


def event_faults(callbacks: Iterable[object], where: str) -> list[Fault]:
    """Return a fault for each method that looks like one of `EVENTS` and is none: it would never be called.

    Args:
        callbacks: callbacks of a run.
        where: path of the argument that they were given as.
    """
    faults = []
    for callback in callbacks:
        likely = [name for name in dir(callback) if name.startswith(("on_task", "on_plan", "on_replan"))]
        for name in [one for one in likely if one not in EVENTS and callable(getattr(callback, one))]:
            kind = callback.__name__ if isinstance(callback, type) else type(callback).__name__
            fix = closest(name, EVENTS)
            faults.append(Fault(f"{where}.{kind}.{name}", "an event that is never called", ", ".join(EVENTS), fix))
    return faults
