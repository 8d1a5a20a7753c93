"""A task's run in W&B."""

from __future__ import annotations

import os
from importlib import import_module
from typing import Any

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.reporting.trackers.task_run_tracker import Ending, TaskRunTracker, group_of
from peft_mux.task import TaskStatus


class WandbRun(TaskRunTracker):
    """A run of W&B in the project of `WANDB_PROJECT`, in a group with those of the other tasks."""

    name = "wandb"

    def begin(self, args: MultiTaskTrainingArguments, settings: dict[str, Any], run_id: str | None) -> str:
        """Begin a run beside all others of the process, or go on with one."""
        run = self._run = import_module("wandb").init(
            project=os.getenv("WANDB_PROJECT", "huggingface"),
            group=group_of(args),
            name=args.run_name,
            id=run_id,
            resume="allow",
            reinit="create_new",
        )
        # A run that goes on may have other settings from here on.
        run.config.update(settings, allow_val_change=True)
        # As Trainer: W&B counts calls, not steps.
        run.define_metric("train/global_step")
        run.define_metric("*", step_metric="train/global_step", step_sync=True)
        return run.id

    def write(self, numbers: dict[str, Any], step: int) -> None:
        """Log numbers."""
        self._run.log({**numbers, "train/global_step": step})

    def end(self, run: Any, ending: Ending) -> None:
        """Finish the run: as failed where the task has failed; its summary says how the task has ended."""
        run.summary.update({"task_status": ending.status, "task_reason": ending.reason})
        run.finish(exit_code=int(ending.status == TaskStatus.FAILED))
