"""`Saver`: when what is written into the run folder, and what a failed write costs: a notice, never the run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from peft_mux import storage
from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.checkpoint.run_folder import RunFolder, Weights
from peft_mux.checkpoint.snapshot import take_snapshot
from peft_mux.checkpoint.task_state import TaskState
from peft_mux.errors import CheckpointError
from peft_mux.reporting.run_log import RunLog
from peft_mux.scheduler.plan import Plan
from peft_mux.task import TaskStatus
from peft_mux.tasks.table import TaskTable
from peft_mux.tasks.task_run import TaskRun


class Gather(Protocol):
    """Makes the full state of a task out of the parts of all processes."""

    def __call__(self, run: TaskRun, *, only_weights: bool = False) -> TaskState | None:
        """Return the state on the process that writes, `None` on the others; all call this."""
        ...


class Saver:
    """Writes adapters and states of a run.

    Args:
        table: all tasks of the run.
        args: the arguments of the run, which say what is saved when.
        log: takes notices of what could not be saved.
        is_writer: whether this process writes; the others go the same way without.

    Attributes:
        folder: the folder of the run, once it is open; `None` where nothing is to be saved (`save_strategy="no"`).
        is_writer: whether this process writes.
    """

    def __init__(
        self, table: TaskTable, args: MultiTaskTrainingArguments, log: RunLog, *, is_writer: bool = True
    ) -> None:
        """Save nothing until a folder is opened."""
        self.folder: RunFolder | None = None
        self.table, self.args, self.log, self.is_writer = table, args, log, is_writer
        self._gather: Gather | None = None
        self._agree: Callable[[bool], bool] = bool
        self._saved_step: int | None = None

    def open(self, folder: RunFolder) -> None:
        """Save into a folder from now on."""
        self.folder = folder

    def use_model(self, model: Any) -> None:
        """Save another model's adapters from now on; `None` while there is none."""
        if self.folder is not None:
            self.folder.use_model(model)

    def use_full_model(self) -> None:
        """Save what this process holds, which is all of every task."""
        self._gather, self._agree = None, bool

    def use_parts(self, gather: Gather, agree: Callable[[bool], bool]) -> None:
        """Save what all processes hold together, each of them a part of every task.

        Args:
            gather: returns the full state of a task on the writer and `None` on the others, which all call it.
            agree: returns whether all processes have saved.
        """
        self._gather, self._agree = gather, agree

    def is_due(self) -> bool:
        """Whether the run step just taken calls for a state of all tasks."""
        every = self.args.save_steps if self.args.save_strategy == "steps" else 0
        return bool(every) and self.log.state.global_step % every == 0

    @property
    def is_current(self) -> bool:
        """Whether the present step is saved already, or nothing is to be."""
        return self.folder is None or self._saved_step == self.log.state.global_step

    def save_run(self) -> bool:
        """Write a state from which all tasks resume together; return whether it was written."""
        saved = True
        for run in self.table:
            # The others would wait for a process that does not gather, so a failure ends nothing but the writing.
            if not run.status.is_final and (saved or self._gather is not None):
                saved = self._save_task(run, is_wanted=saved) and saved
        if saved:
            saved = self._safely(lambda folder: folder.save_record(self.log.state.global_step, list(self.table)))
        # Every process must call a step saved or not alike, or only some would save it again at the end.
        saved = self._agree(saved)
        if saved:
            self._saved_step = self.log.state.global_step
        return saved

    def save_due_tasks(self, names: list[str]) -> None:
        """Write a checkpoint of each task whose own `save_steps` are over."""
        for name in names:
            run = self.table[name]
            every = run.hyper.save_steps
            if run.status is TaskStatus.RUNNING and every and run.step % every == 0:
                self._save_task(run, with_adapter=False)

    def save_ended(self, run: TaskRun) -> None:
        """Write the adapter and the last state of a task that has ended."""
        self._save_task(run)

    def save_best(self, run: TaskRun) -> None:
        """Write a task's adapter as its best so far."""
        # Gathered before `_safely`, in which only the writer does anything.
        weights = self.full_weights(run)
        self._safely(lambda folder: folder.save_best(run, weights))

    def save_adapter(self, name: str) -> None:
        """Write a task's adapter."""
        if self.folder is not None:
            weights = self.full_weights(self.table[name])
            self._safely(lambda folder: folder.save_adapter(name, weights))

    def full_weights(self, run: TaskRun) -> Weights | None:
        """Return a task's full weights on the writer, where processes hold parts of them; every process calls this."""
        state = None if self._gather is None else self._gather(run, only_weights=True)
        return None if state is None else state.weights

    def _save_task(self, run: TaskRun, *, with_adapter: bool = True, is_wanted: bool = True) -> bool:
        """Write one task; where processes hold parts of it, all take part, also in what is not wanted any more."""
        if self.folder is None:
            return False
        if self._gather is not None:
            # Also where the writing is given up or is not this process's: the others send or wait.
            snapshot = self._gather(run)
            weights = None if snapshot is None else snapshot.weights
        else:
            snapshot = take_snapshot(run, self.folder.model) if self.is_writer else None
            weights = None  # PEFT selects them from the model

        def write(folder: RunFolder) -> None:
            assert snapshot is not None, "the writer has what it writes"
            if with_adapter:
                folder.save_adapter(run.name, weights)
            folder.save_task(run, snapshot, weights)

        return is_wanted and self._safely(write)

    def _safely(self, write: Callable[[RunFolder], object]) -> bool:
        """Write, and go on training when it fails: a full disk must not cost the run."""
        if self.folder is None:
            return False
        if not self.is_writer:
            return True
        try:
            write(self.folder)
        except CheckpointError as error:
            self.log.warn(f"not saved at step {self.log.state.global_step}: {error}")
            self.log.event("save_failed", reason=str(error))
            return False
        return True


def describe_run(root: Path, args: MultiTaskTrainingArguments, table: TaskTable, plan: Plan) -> None:
    """Write `config.json` and `plan.json` into the run folder: every setting in effect, and what runs together."""
    tasks = {
        run.name: {**asdict(run.hyper), "num_steps": run.num_steps, "peft_config": run.task.peft_config.to_dict()}
        for run in table
    }
    config = json.dumps({"args": args.to_dict(), "tasks": tasks}, indent=2, default=str)
    storage.write_file(root / "config.json", config.encode())
    storage.write_file(root / "plan.json", plan.to_json().encode())
