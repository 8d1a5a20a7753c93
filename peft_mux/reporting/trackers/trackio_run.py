"""A task's run in Trackio."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.reporting.trackers.task_run_tracker import Ending, TaskRunTracker, group_of


class TrackioRun(TaskRunTracker):
    """A run of Trackio in the `project` of the arguments, in a group with those of the other tasks."""

    name = "trackio"

    def begin(self, args: MultiTaskTrainingArguments, settings: dict[str, Any], run_id: str | None) -> str:
        """Begin a run beside all others of the process, or go on with one."""
        trackio = import_module("trackio")
        current = trackio.context_vars.current_run
        before = current.get()
        # The one run that Trackio believes a process to have is finished when another one begins.
        current.set(None)
        try:
            self._run = trackio.init(
                project=args.project,
                name=run_id or args.run_name,
                group=group_of(args),
                space_id=args.trackio_space_id,
                resume="allow" if run_id else "never",
                private=args.hub_private_repo,
                bucket_id=args.trackio_bucket_id,
                # Trackio keeps keys such as `_name_or_path` to itself.
                config={key: value for key, value in settings.items() if not key.startswith("_")},
            )
        finally:
            current.set(before)
        return self._run.name

    def write(self, numbers: dict[str, Any], step: int) -> None:
        """Log numbers."""
        self._run.log({**numbers, "train/global_step": step}, step=step)

    def end(self, run: Any, ending: Ending) -> None:
        """Finish the run when all its logs are written."""
        run.finish()
