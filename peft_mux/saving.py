"""`Saver`: when what is written into the run folder, and what a failed write costs: a notice, never the run."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from peft_mux import storage
from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.checkpoint import RunFolder
from peft_mux.errors import CheckpointError
from peft_mux.run_log import RunLog
from peft_mux.scheduler.plan import Plan
from peft_mux.task import TaskStatus
from peft_mux.task_run import TaskRun, TaskTable


class Saver:
    """Writes adapters and states of a run.

    Args:
        folder: of the run; `None` where nothing is to be saved (`save_strategy="no"`).
        table: all tasks.
        args: of the run.
        log: where failures are told.

    Attributes:
        is_writer: whether this process writes; the others go the same way without.
    """

    def __init__(
        self, folder: RunFolder | None, table: TaskTable, args: MultiTaskTrainingArguments, log: RunLog
    ) -> None:
        """Remember what to save and where."""
        self.folder = folder
        self.table = table
        self.args = args
        self.log = log
        self.is_writer = True
        self._saved_step: int | None = None

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

        def write(folder: RunFolder) -> None:
            for run in self.table:
                if not run.status.is_final:
                    folder.save_adapter(run.name)
                    folder.save_task(run)
            folder.save_record(self.log.state.global_step, list(self.table))

        saved = self._safely(write)
        if saved:
            self._saved_step = self.log.state.global_step
        return saved

    def save_due_tasks(self, names: list[str]) -> None:
        """Write a checkpoint of each task whose own `save_steps` are over."""
        for name in names:
            run = self.table[name]
            every = run.hyper.save_steps
            if run.status is TaskStatus.RUNNING and every and run.step % every == 0:
                self._safely(lambda folder, run=run: folder.save_task(run))

    def save_ended(self, run: TaskRun) -> None:
        """Write the adapter and the last state of a task that has ended."""

        def write(folder: RunFolder) -> None:
            folder.save_adapter(run.name)
            folder.save_task(run)

        self._safely(write)

    def save_best(self, run: TaskRun) -> None:
        """Write a task's adapter as its best so far."""
        self._safely(lambda folder: folder.save_best(run))

    def save_adapter(self, name: str) -> None:
        """Write a task's adapter."""
        self._safely(lambda folder: folder.save_adapter(name))

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
