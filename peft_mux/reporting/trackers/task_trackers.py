"""`TaskTrackers`: the runs of one task in loggers, where each task has runs of its own (`report_per_task`)."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainerControl
from transformers.integrations import TensorBoardCallback

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.own_code import Listener, OwnCodeError, nobody, own_code
from peft_mux.reporting.trackers.mlflow_run import MlflowRun
from peft_mux.reporting.trackers.task_run_tracker import Ending
from peft_mux.reporting.trackers.trackio_run import TrackioRun
from peft_mux.reporting.trackers.wandb_run import WandbRun
from peft_mux.task import TaskStatus
from peft_mux.tasks.task_run import TaskRun

_logger = logging.getLogger(__name__)

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
        self.listener: Listener = nobody
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
                with own_code(self._run.name, "logger", self.listener):
                    getattr(tracker, event)(self._args, self._run.state, self._control, **facts)
            except OwnCodeError as error:
                if (tracker, event) not in self._told:
                    self._told.add((tracker, event))
                    kind = type(tracker).__name__
                    _logger.warning('task "%s": its logger %s failed in %s: %s', self._run.name, kind, event, error)


def _settings(run: TaskRun, args: MultiTaskTrainingArguments, model: Any) -> dict[str, Any]:
    """Return all settings of a task as plain JSON: those of the backbone, of its adapter, and its arguments."""
    config = getattr(model, "config", None) or {}
    own = {"peft_config": run.task.peft_config.to_dict(), "num_steps": run.num_steps}
    own["train_batch_size"] = run.hyper.train_batch_size
    settings = {**(config if isinstance(config, dict) else config.to_dict()), **args.to_dict(), **own}
    return json.loads(json.dumps(settings, default=_plain))


def _plain(value: Any) -> Any:
    return sorted(map(str, value)) if isinstance(value, (set, frozenset)) else str(value)
