"""Keys in W&B, TensorBoard, Trackio and their like: `task/metric` and `run/metric`, as they are.

Their callbacks in transformers put `train/` before every key that does not begin with `eval_`, which files the
held-out loss of a task under `train/sql/eval_loss`. All of them ask one function for it.
"""

# MERGED: `TaskRunTracker`: one task's run in a logger, kept as an object, of which a process may have many at once.
# MERGED: A task's run in MLflow.
# MERGED: A task's run in Trackio.
# MERGED: A task's run in W&B.
# MERGED: `TaskTrackers`: the runs of one task in loggers, where each task has runs of its own (`report_per_task`).

from __future__ import annotations

import copy
import json
import logging
import os
import re
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from transformers import TrainerCallback, TrainerControl
from transformers.integrations import TensorBoardCallback, integration_utils
from transformers.utils import ENV_VARS_TRUE_VALUES
from transformers.utils.generic import flatten_dict

from peft_mux import storage
from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.engine.tasks.task_run import TaskRun
from peft_mux.task import TaskStatus
from peft_mux.user_code import Listener, UserCodeError, guard_user_code, ignore_timing


class NamedLogs(dict[str, float]):
    """Numbers whose keys say by themselves what they are of."""


@contextmanager
def keys_as_they_are() -> Iterator[None]:
    """Let the callbacks of transformers leave the keys of `NamedLogs` as they are, in the `with` block."""
    before: Callable[[Any], Any] = integration_utils.rewrite_logs

    def rewrite(logs: Any) -> Any:
        return dict(logs) if isinstance(logs, NamedLogs) else before(logs)

    integration_utils.rewrite_logs = rewrite
    try:
        yield
    finally:
        integration_utils.rewrite_logs = before


IDS_NAME = "logger_runs.json"
"""File in a task's folder: the id of its run in each logger."""


class Ending(NamedTuple):
    """How a task's run in a logger ends.

    Attributes:
        status: that of the task, or "interrupted" where its training ended before it did.
        reason: why; "" where there is nothing to say.
    """

    status: str
    reason: str


class TaskRunTracker(TrainerCallback, ABC):
    """Begins a task's run with its settings, gives it the numbers of the task, and ends it as the task has ended.

    A task that goes on from a checkpoint goes on with its run, whose id lies in the folder of the task. Callbacks of
    transformers know one run a process; the subclasses ask the libraries for run objects instead.
    """

    name: ClassVar[str]
    """The logger in `report_to`."""

    _run: Any = None
    """What the library has for the run; `None` before it begins and after it has ended."""

    @abstractmethod
    def begin(self, args: MultiTaskTrainingArguments, settings: dict[str, Any], run_id: str | None) -> str:
        """Set `_run` and return its id.

        Args:
            args: the task's arguments, whose `run_name` is `group/task`.
            settings: all settings of the task, as plain JSON.
            run_id: the run to go on with; `None` for a new one.
        """

    @abstractmethod
    def write(self, numbers: dict[str, Any], step: int) -> None:
        """Give numbers to the run, under Trainer's keys (`train/loss`), of a step of the task."""

    @abstractmethod
    def end(self, run: Any, ending: Ending) -> None:
        """End the run."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Begin the run, or go on with it where the task goes on."""
        if self._run is not None:
            return
        place = Path(args.output_dir) / IDS_NAME
        ids = _read_ids(place)
        # A task that begins is another one than that whose run was kept under its name.
        run_id = ids.get(self.name) if state.global_step else None
        ids[self.name] = self.begin(args, kwargs["settings"](), run_id)
        place.parent.mkdir(parents=True, exist_ok=True)
        storage.write_file(place, json.dumps(ids).encode())

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Give the numbers of a log or of an evaluation to the run."""
        if self._run is not None:
            self.write(integration_utils.rewrite_logs(kwargs["logs"]), state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End the run, once."""
        run, self._run = self._run, None
        if run is not None:
            self.end(run, kwargs["ending"])


def group_of(args: MultiTaskTrainingArguments) -> str:
    """Return the name that the runs of all tasks of one training have in common."""
    return str(args.run_name).rpartition("/")[0]


def _read_ids(place: Path) -> dict[str, str]:
    """Return the ids of a task's runs, by logger; none where there is no file that we have written."""
    try:
        ids = json.loads(storage.read_regular(place))
    except (OSError, ValueError, RecursionError):
        return {}
    return {key: value for key, value in ids.items() if isinstance(value, str)} if isinstance(ids, Mapping) else {}


_logger = logging.getLogger(__name__)

_MOST_UNDER_WAY = 32
"""Logs that are on their way to the server before the oldest is waited for."""
_ENDINGS: Mapping[str, str] = {
    TaskStatus.SUCCEEDED: "FINISHED",
    TaskStatus.STOPPED_EARLY: "FINISHED",
    TaskStatus.FAILED: "FAILED",
}


class MlflowRun(TaskRunTracker):
    """A run of MLflow in the experiment of `MLFLOW_EXPERIMENT_NAME`; below the active run, where there is one.

    Logs are sent in the background: a server that is far away holds up no task.
    """

    name = "mlflow"

    def __init__(self) -> None:
        """Have no log under way."""
        self._under_way: deque[Any] = deque()

    def begin(self, args: MultiTaskTrainingArguments, settings: dict[str, Any], run_id: str | None) -> str:
        """Begin a run with the settings as its parameters, or go on with one, whose parameters cannot change."""
        mlflow = import_module("mlflow")
        self._mlflow, self._client = mlflow, mlflow.MlflowClient()
        if run_id is not None:
            try:
                self._client.update_run(run_id, status="RUNNING")
                self._run = run_id
                return run_id
            except mlflow.MlflowException as error:
                _logger.warning("%s: its run %s in MLflow is not gone on with (%s)", args.run_name, run_id, error)
        run = self._client.create_run(_experiment_id(), run_name=args.run_name, tags=_tags(args, mlflow))
        self._run = run.info.run_id
        limits = import_module("mlflow.utils.validation")
        items = _parameters(settings, limits.MAX_PARAM_VAL_LENGTH)
        parameters = [mlflow.entities.Param(key, value) for key, value in items.items()]
        for first in range(0, len(parameters), limits.MAX_PARAMS_TAGS_PER_BATCH):
            self._send(params=parameters[first : first + limits.MAX_PARAMS_TAGS_PER_BATCH])
        return self._run

    def write(self, numbers: dict[str, Any], step: int) -> None:
        """Log numbers, under keys that MLflow takes."""
        now_ms = int(time.time() * 1000)
        found = {key: value for key, value in numbers.items() if isinstance(value, (int, float))}
        self._send(
            metrics=[
                self._mlflow.entities.Metric(re.sub(r"[^0-9A-Za-z_\-. :/]", "_", key), value, now_ms, step)
                for key, value in found.items()
            ]
        )

    def end(self, run: Any, ending: Ending) -> None:
        """Terminate the run when all its logs have arrived; its tags say how the task has ended."""
        try:
            while self._under_way:
                self._under_way.popleft().wait()
        finally:
            self._client.set_tag(run, "task_status", ending.status)
            if ending.reason:
                self._client.set_tag(run, "task_reason", ending.reason)
            self._client.set_terminated(run, _ENDINGS.get(ending.status, "KILLED"))

    def _send(self, **contents: Any) -> None:
        """Send a log in the background; what became of the oldest one that is under way may be raised here."""
        self._under_way.append(self._client.log_batch(self._run, synchronous=False, **contents))
        if len(self._under_way) > _MOST_UNDER_WAY:
            self._under_way.popleft().wait()


def _experiment_id() -> str:
    """Return the experiment that `mlflow.start_run` would take: that of the script, or of the environment."""
    return import_module("mlflow.tracking.fluent")._get_experiment_id()


def _tags(args: MultiTaskTrainingArguments, mlflow: Any) -> dict[str, str]:
    """Return what MLflow's own runs are tagged with, the group, and what `MLFLOW_TAGS` has."""
    own = {"group": group_of(args)}
    if (parent := mlflow.active_run()) is not None:
        own["mlflow.parentRunId"] = parent.info.run_id
    own |= json.loads(os.getenv("MLFLOW_TAGS") or "{}")
    return import_module("mlflow.tracking.context.registry").resolve_tags(own)


def _parameters(settings: dict[str, Any], max_length: int) -> dict[str, str]:
    """Return settings as MLflow takes them, by the variables of the environment that Trainer's callback heeds."""
    if os.getenv("MLFLOW_FLATTEN_PARAMS", "FALSE").upper() in ENV_VARS_TRUE_VALUES:
        settings = flatten_dict(settings)
    texts = {key: str(value) for key, value in settings.items()}
    if too_long := [key for key, value in texts.items() if len(value) > max_length]:
        _logger.warning("MLflow takes parameters of at most %d characters: without %s", max_length, ", ".join(too_long))
    most = os.getenv("MLFLOW_MAX_LOG_PARAMS", "")
    kept = [(key, value) for key, value in texts.items() if key not in too_long]
    return dict(kept[: int(most)] if most.isdigit() else kept)


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


_logger_task_trackers = logging.getLogger(__name__)

TRACKERS: Mapping[str, Callable[[], TrainerCallback]] = {
    "tensorboard": TensorBoardCallback,
    **{one.name: one for one in (WandbRun, MlflowRun, TrackioRun)},
}
"""What keeps a task's run, by the logger in `report_to`: those of `argument_fields.LOGGERS_OF_MANY_RUNS`."""


@contextmanager
def without_one_for_all(args: MultiTaskTrainingArguments) -> Iterator[None]:
    """Let `report_to` be empty in the `with` block where each task has a run of its own: Trainer would make one."""
    before = args.report_to
    args.report_to = [] if args.report_per_task else before
    try:
        yield
    finally:
        args.report_to = before


class TaskTrackers:
    """Begins, feeds and ends a task's runs in loggers; there are none where all tasks share one.

    What a logger raises is told, once for each thing that it was asked for, and ends neither the task nor the run.

    Args:
        run: the task.
        args: a copy of the run's arguments with the task's settings.

    Attributes:
        listener: told how long the loggers took.
    """

    def __init__(self, run: TaskRun, args: MultiTaskTrainingArguments) -> None:
        """Begin nothing yet."""
        self._run, self._args, self._control = run, copy.copy(args), TrainerControl()
        self.listener: Listener = ignore_timing
        self._told: set[tuple[TrainerCallback, str]] = set()
        root = Path(str(args.output_dir))
        self._args.output_dir, self._args.run_name = str(root / run.name), f"{args.run_name or root.name}/{run.name}"
        is_kept = args.report_per_task and args.process_index == 0
        self._trackers = [TRACKERS[name]() for name in args.report_to or ()] if is_kept else []
        for tracker in self._trackers:
            # Of TensorBoard, from its variable of the environment, which is one for all.
            if getattr(tracker, "logging_dir", None):
                tracker.logging_dir = str(Path(tracker.logging_dir) / run.name)  # type: ignore[attr-defined]

    def take(self, before: TaskTrackers) -> None:
        """Go on with the runs that the same task had before it was started anew."""
        self._trackers = before._trackers

    def hear(self, event: str, model: Any, **facts: Any) -> None:
        """Pass on what happens to the task; most of it is nothing to loggers.

        Args:
            event: name of the event, such as `on_log`.
            model: the multi-task model.
            **facts: what comes with the event, such as `logs`.
        """
        if event == "on_log":
            self._call(event, **facts)
        elif event == "on_train_end":
            self.end()
        # One that had ended before it was resumed has nothing to tell.
        elif event == "on_train_begin" and self._trackers and not self._run.status.is_final:
            self._call(event, model=model, settings=lambda: _settings(self._run, self._args, model))

    def end(self) -> None:
        """End the runs with the status that the task has now; runs that have ended stay as they are."""
        status = self._run.status
        is_cut_off = status in (TaskStatus.WAITING, TaskStatus.RUNNING)
        self._call("on_train_end", ending=Ending("interrupted" if is_cut_off else status, self._run.reason))

    def _call(self, event: str, **facts: Any) -> None:
        for tracker in self._trackers:
            try:
                with guard_user_code(self._run.name, "logger", self.listener):
                    getattr(tracker, event)(self._args, self._run.state, self._control, **facts)
            except UserCodeError as error:
                if (tracker, event) not in self._told:
                    self._told.add((tracker, event))
                    kind = type(tracker).__name__
                    _logger_task_trackers.warning(
                        'task "%s": its logger %s failed in %s: %s', self._run.name, kind, event, error
                    )


def _settings(run: TaskRun, args: MultiTaskTrainingArguments, model: Any) -> dict[str, Any]:
    """Return all settings of a task as plain JSON: those of the backbone, of its adapter, and its arguments."""
    config = getattr(model, "config", None) or {}
    own = {"peft_config": run.task.peft_config.to_dict(), "num_steps": run.num_steps}
    own["train_batch_size"] = run.hyper.train_batch_size
    settings = {**(config if isinstance(config, dict) else config.to_dict()), **args.to_dict(), **own}
    return json.loads(json.dumps(settings, default=_plain))


def _plain(value: Any) -> Any:
    return sorted(map(str, value)) if isinstance(value, (set, frozenset)) else str(value)
