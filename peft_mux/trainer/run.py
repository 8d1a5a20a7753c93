"""`Run`: what all parts of a trainer read of the run under way."""

# MERGED: Card, picture and tokenizer files of a task, written when it has ended, or the run has.

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from transformers import TrainerControl, TrainerState

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.checkpoint.hub import HubPushes, write_extras
from peft_mux.checkpoint.saver import Saver
from peft_mux.engine.tasks.task_run import TaskRun, TaskTable
from peft_mux.reporting.callbacks import RunCallbacks
from peft_mux.reporting.run_log import RunLog
from peft_mux.scheduler.plan import Plan
from peft_mux.user_code import describe_error


class StepTime(NamedTuple):
    """What a step took on this process.

    Attributes:
        plan: the plan that the step followed; `None` where there was none.
        num_tokens: tokens of the global batches of all tasks, on all processes.
        seconds: seconds that the passes and updates took.
        passes_s: seconds of these from the first pass to the end of the last one.
    """

    plan: Plan | None
    num_tokens: int
    seconds: float
    passes_s: float


@dataclass
class Run:
    """The run as its parts share it; each part owns the rest of what it knows.

    Attributes:
        args: the arguments that the trainer was given.
        table: all tasks, with where each of them stands.
        state: the run's own `TrainerState`; its `global_step` counts steps of the run, not of a task.
        control: what callbacks ask of the run.
        callbacks: the run's own callbacks, called with `state` and `control`.
        log: takes every number and event.
        saver: writes adapters and states.
        hub: uploads adapters (`push_to_hub=True`).
        is_in_train: whether `train` is between its first and its last step.
        is_updating: whether tasks are being updated. Where it still is after a step was cut off, some tasks have taken
            that step and others have not, so that nothing but a saved state can be gone on from.
        interrupted_by: number of the signal that the last training was ended by; 0 for none.
        best_task: the task that the last lines of the run suggest to merge; "" for none before the others.
    """

    args: MultiTaskTrainingArguments
    table: TaskTable
    state: TrainerState
    control: TrainerControl
    callbacks: RunCallbacks
    log: RunLog
    saver: Saver
    hub: HubPushes
    is_in_train: bool = False
    is_updating: bool = False
    interrupted_by: int = 0
    best_task: str = ""

    @property
    def root(self) -> Path:
        """Folder of the run."""
        return output_folder(self.args)

    def interrupt(self, number: int) -> None:
        """Ask for an end at the next step boundary because of a signal."""
        self.interrupted_by = number
        self.request_stop()

    def request_stop(self) -> None:
        """Ask for an end at the next step boundary."""
        self.control.should_training_stop = True


def open_run(callbacks: RunCallbacks, table: TaskTable, *, is_main: bool) -> Run:
    """Return a run that begins, with what tells of it and writes its files.

    Args:
        callbacks: the run's own callbacks, with its arguments, its state and its control.
        table: all tasks.
        is_main: whether this process is the one that prints and writes.
    """
    args, state = callbacks.args, callbacks.state
    log = RunLog(table, state, callbacks.log, is_shown=is_main)
    saver = Saver(table, args, log, is_writer=is_main)
    hub = HubPushes(args, output_folder(args), log.warn)
    return Run(args, table, state, callbacks.control, callbacks, log, saver, hub)


def output_folder(args: MultiTaskTrainingArguments) -> Path:
    """Return the folder of a run, made by nobody yet."""
    return Path(args.output_dir or "peft_mux_output")


def mark_main_process(state: TrainerState, args: MultiTaskTrainingArguments) -> None:
    """Tell callbacks, through the state that they are given, whether this process is the one that writes."""
    state.is_world_process_zero = args.process_index == 0
    state.is_local_process_zero = args.local_process_index == 0


def write_task_files(run: Run, own: TaskRun) -> None:
    """Write what lies beside a task's adapter, where that lies on the disk as it is now; a failure is told of.

    Args:
        run: the run.
        own: the task.
    """
    folder = run.saver.place(own)
    if folder is None or not run.saver.is_writer:
        return
    handler = run.callbacks.handler
    config = getattr(getattr(handler.model, "backbone", None), "config", None)
    try:
        write_extras(
            folder,
            own,
            num_tasks=len(list(run.table)) + len(run.log.removed),
            tokenizer=handler.processing_class,
            vocab_size=getattr(config, "vocab_size", None),
        )
    # The adapter is safe; what lies beside it is no reason to end a run.
    except Exception as error:
        run.log.warn(f"{folder}: its card could not be written ({describe_error(error)})")
