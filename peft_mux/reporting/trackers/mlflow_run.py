"""A task's run in MLflow."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections import deque
from collections.abc import Mapping
from importlib import import_module
from typing import Any

from transformers.utils import ENV_VARS_TRUE_VALUES
from transformers.utils.generic import flatten_dict

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.reporting.trackers.task_run_tracker import Ending, TaskRunTracker, group_of
from peft_mux.task import TaskStatus

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
