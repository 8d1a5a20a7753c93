"""Runs in loggers, one per task (`report_per_task`, `TaskTrackers`); Trainer's own callbacks make one for all tasks.

Each has the name `group/task`, the settings of its task, and plain keys (`train/loss`). The trackers of accelerate
write TensorBoard, W&B and Trackio. Its tracker for MLflow logs to the one active run of the process, so `MlflowTracker`
here uses MLflow's client, which takes the id of a run.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import re
import time
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from accelerate.tracking import TensorBoardTracker, TrackioTracker, WandBTracker
from transformers.integrations import integration_utils
from transformers.utils import ENV_VARS_TRUE_VALUES
from transformers.utils.generic import flatten_dict

from peft_mux import storage
from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.engine.tasks.active_task import ActiveTask
from peft_mux.log.callbacks import Observer, TaskCallbacks
from peft_mux.task import TaskStatus
from peft_mux.user_code import Listener, UserCodeError, guard_user_code, ignore_timing, log_warning

IDS_NAME = "logger_runs.json"
"""File in a task's folder: the id of its run in each logger."""
_MLFLOW_ENDINGS: Mapping[str, str] = {
    TaskStatus.SUCCEEDED: "FINISHED",
    TaskStatus.STOPPED_EARLY: "FINISHED",
    TaskStatus.FAILED: "FAILED",
}
_MOST_UNDER_WAY = 32
"""Most logs that may be on their way to the server; then the oldest one is waited for."""
_logger = logging.getLogger(__name__)


class LoggerRuns(Observer):
    """The runs in loggers of all tasks.

    Args:
        listener: called with the seconds that the loggers took.
    """

    def __init__(self, listener: Listener) -> None:
        self._listener = listener
        self._trackers: dict[str, TaskTrackers] = {}

    def on_task_event(self, callbacks: TaskCallbacks, event: str, facts: Mapping[str, Any]) -> None:
        """Pass an event on to the runs of its task."""
        task = callbacks.task
        # Another task may come under the same name.
        if task.name not in self._trackers or self._trackers[task.name].task is not task:
            self._trackers[task.name] = TaskTrackers(task, callbacks.args, self._listener)
        self._trackers[task.name].hear(event, callbacks.handler.model, **facts)

    def on_task_end(self, task: ActiveTask) -> None:
        """End the runs of a task."""
        if task.name in self._trackers:
            self._trackers[task.name].end()

    def on_task_remove(self, task: ActiveTask, folder: Path | None) -> None:
        """End the runs of a task."""
        self.on_task_end(task)

    def on_failure(self) -> None:
        """End the runs of all tasks."""
        for trackers in self._trackers.values():
            trackers.end()


class TaskTrackers:
    """Begins, feeds and ends a task's runs in loggers; without `report_per_task` there are none.

    A task that resumes from a checkpoint continues its runs, whose ids are in its folder. An error of a logger is
    logged once for each event, and ends neither the task nor the run.

    Args:
        task: the task.
        args: a copy of the run's arguments with the task's settings.
        listener: called with the seconds that the loggers took.
    """

    def __init__(self, task: ActiveTask, args: MultiTaskTrainingArguments, listener: Listener = ignore_timing) -> None:
        self.task, self._listener, self._args = task, listener, copy.copy(args)
        root = Path(str(args.output_dir))
        self._args.output_dir, self._args.run_name = str(root / task.name), f"{args.run_name or root.name}/{task.name}"
        self._names = list(args.report_to or ()) if args.report_per_task and args.process_index == 0 else []
        self._trackers: dict[str, Any] = {}
        self._reported: set[tuple[str, str]] = set()
        board = os.getenv("TENSORBOARD_LOGGING_DIR")
        in_folder = root / task.name / integration_utils.default_logdir()
        self._board = Path(board).expanduser() / task.name if board else in_folder

    def hear(self, event: str, model: Any, **facts: Any) -> None:
        """Pass an event of the task on to its runs.

        Args:
            event: name of the event; loggers need `on_train_begin`, `on_log` and `on_train_end`.
            model: the multi-task model.
            **facts: what belongs to the event, such as `logs`.
        """
        if event == "on_log":
            for name, tracker in self._trackers.items():
                with self._guarded(name, event):
                    values = integration_utils.rewrite_logs(facts["logs"])
                    step = self.task.state.global_step
                    if name in ("wandb", "trackio"):
                        values["train/global_step"] = step
                    # W&B counts its own steps, and refuses earlier ones: a resumed task logs some again.
                    tracker.log(values, step=None if name == "wandb" else step)
        elif event == "on_train_end":
            self.end()
        # A task that had ended before it was resumed logs nothing more.
        elif event == "on_train_begin" and not self.task.status.is_final:
            for name in self._names:
                if name not in self._trackers:
                    with self._guarded(name, event):
                        self._begin(name, model)

    def _begin(self, name: str, model: Any) -> None:
        """Begin a run, or continue the one of a task that is resumed."""
        place = Path(str(self._args.output_dir)) / IDS_NAME
        try:
            ids = json.loads(storage.read_regular(place))
            ids = {key: value for key, value in ids.items() if isinstance(value, str)}
        except (OSError, ValueError, AttributeError, RecursionError):
            ids = {}
        # Ids in the folder of a task that begins belong to an earlier task with the same name.
        run_id = ids.get(name) if self.task.state.global_step else None
        self._trackers[name], new_id = self._start(name, model, run_id)
        if new_id is not None:
            place.parent.mkdir(parents=True, exist_ok=True)
            storage.write_file(place, json.dumps({**ids, name: new_id}).encode())

    def _start(self, name: str, model: Any, run_id: str | None) -> tuple[Any, str | None]:
        """Return a tracker with an active run, next to the other runs of the process, and the id of the run."""
        args, group = self._args, str(self._args.run_name).rpartition("/")[0]
        if name == "tensorboard":
            tracker = TensorBoardTracker(self._board.name, self._board.parent)
            tracker.start()
            tracker.writer.add_text("args", args.to_json_string())
            if getattr(model, "config", None) is not None:
                tracker.writer.add_text("model_config", model.config.to_json_string())
            return tracker, None
        config = getattr(model, "config", None) or {}
        settings = {
            **(config if isinstance(config, dict) else config.to_dict()),
            **args.to_dict(),
            "peft_config": self.task.task.peft_config.to_dict(),
            "num_steps": self.task.num_steps,
            "train_batch_size": self.task.hyper.train_batch_size,
        }
        settings = json.loads(json.dumps(settings, default=_plain))
        if name == "mlflow":
            tracker = MlflowTracker(args, settings, group, run_id)
            return tracker, tracker.run_id
        if name == "wandb":
            project = os.getenv("WANDB_PROJECT", "huggingface")
            options = {"name": args.run_name, "group": group, "id": run_id, "resume": "allow", "config": settings}
            # A run that is continued may have other settings from here on.
            tracker = WandBTracker(project, reinit="create_new", allow_val_change=True, **options)
            tracker.start()
            tracker.run.define_metric("train/global_step")
            tracker.run.define_metric("*", step_metric="train/global_step", step_sync=True)
            return tracker, tracker.run.id
        tracker = TrackioTracker(
            args.project,
            name=run_id or args.run_name,
            group=group,
            space_id=args.trackio_space_id,
            resume="allow" if run_id else "never",
            private=args.hub_private_repo,
            bucket_id=args.trackio_bucket_id,
            # Trackio reserves keys such as `_name_or_path`.
            config={key: value for key, value in settings.items() if not key.startswith("_")},
        )
        # Trackio finishes the one run that it believes a process to have when another one begins.
        current = import_module("trackio").context_vars.current_run
        before = current.get()
        current.set(None)
        try:
            tracker.start()
        finally:
            current.set(before)
        return tracker, tracker.run.name

    def end(self) -> None:
        """End the runs with the present status of the task; runs that have ended stay unchanged."""
        status, reason = self.task.status, self.task.reason
        # The training ends before the task does.
        ending = "interrupted" if status in (TaskStatus.WAITING, TaskStatus.RUNNING) else status
        while self._trackers:
            name, tracker = self._trackers.popitem()
            with self._guarded(name, "on_train_end"):
                if name == "wandb":
                    tracker.run.summary.update({"task_status": ending, "task_reason": reason})
                    tracker.run.finish(exit_code=int(ending == TaskStatus.FAILED))
                elif name == "mlflow":
                    tracker.finish(ending, reason)
                else:
                    tracker.finish()

    @contextmanager
    def _guarded(self, name: str, event: str) -> Iterator[None]:
        """Log what a logger raises in the `with` block, once for each event."""
        try:
            with guard_user_code(self.task.name, "logger", self._listener, watches_model=False):
                yield
        except UserCodeError as error:
            if (name, event) not in self._reported:
                self._reported.add((name, event))
                log_warning(_logger, f'task "{self.task.name}": its logger {name} failed in {event}: {error}')


def _plain(value: Any) -> Any:
    return sorted(map(str, value)) if isinstance(value, (set, frozenset)) else str(value)


class MlflowTracker:
    """A run of MLflow in the experiment of `MLFLOW_EXPERIMENT_NAME`; below the active run, if there is one.

    Logs are sent in the background, so that a slow server delays no task.

    Args:
        args: the task's arguments.
        settings: all settings of the task, as plain JSON, which become its parameters.
        group: the group of all tasks' runs.
        run_id: the run to continue, whose parameters cannot change; `None` for a new one.
    """

    def __init__(
        self, args: MultiTaskTrainingArguments, settings: dict[str, Any], group: str, run_id: str | None
    ) -> None:
        self._mlflow = mlflow = import_module("mlflow")
        self._client = mlflow.MlflowClient()
        self._under_way: deque[Any] = deque()
        if run_id is not None:
            try:
                self._client.update_run(run_id, status="RUNNING")
                self.run_id = run_id
                return
            except mlflow.MlflowException as error:
                _logger.warning("%s: its run %s in MLflow cannot be continued (%s)", args.run_name, run_id, error)
        tags = {"group": group}
        if (parent := mlflow.active_run()) is not None:
            tags["mlflow.parentRunId"] = parent.info.run_id
        tags |= json.loads(os.getenv("MLFLOW_TAGS") or "{}")
        run = self._client.create_run(
            import_module("mlflow.tracking.fluent")._get_experiment_id(),
            run_name=args.run_name,
            tags=import_module("mlflow.tracking.context.registry").resolve_tags(tags),
        )
        self.run_id = run.info.run_id
        # Trainer's callback reads the same environment variables.
        limits = import_module("mlflow.utils.validation")
        if os.getenv("MLFLOW_FLATTEN_PARAMS", "FALSE").upper() in ENV_VARS_TRUE_VALUES:
            settings = flatten_dict(settings)
        longest = limits.MAX_PARAM_VAL_LENGTH
        if too_long := [key for key, value in settings.items() if len(str(value)) > longest]:
            without = ", ".join(too_long)
            _logger.warning("MLflow accepts parameters of at most %d characters: left out %s", longest, without)
        most = os.getenv("MLFLOW_MAX_LOG_PARAMS", "")
        kept = [mlflow.entities.Param(key, str(value)) for key, value in settings.items() if key not in too_long]
        kept = kept[: int(most)] if most.isdigit() else kept
        for first in range(0, len(kept), limits.MAX_PARAMS_TAGS_PER_BATCH):
            self._send(params=kept[first : first + limits.MAX_PARAMS_TAGS_PER_BATCH])

    def log(self, values: dict[str, Any], step: int | None) -> None:
        """Log numbers, under keys that MLflow accepts."""
        now_ms = int(time.time() * 1000)
        self._send(
            metrics=[
                self._mlflow.entities.Metric(re.sub(r"[^0-9A-Za-z_\-. :/]", "_", key), value, now_ms, step)
                for key, value in values.items()
                if isinstance(value, (int, float))
            ]
        )

    def finish(self, status: str, reason: str) -> None:
        """Terminate the run when all its logs have arrived; its tags say how the task has ended."""
        try:
            while self._under_way:
                self._under_way.popleft().wait()
        finally:
            self._client.set_tag(self.run_id, "task_status", status)
            if reason:
                self._client.set_tag(self.run_id, "task_reason", reason)
            self._client.set_terminated(self.run_id, _MLFLOW_ENDINGS.get(status, "KILLED"))

    def _send(self, **contents: Any) -> None:
        """Send a log in the background; an error of an older one may be raised here."""
        self._under_way.append(self._client.log_batch(self.run_id, synchronous=False, **contents))
        if len(self._under_way) > _MOST_UNDER_WAY:
            self._under_way.popleft().wait()
