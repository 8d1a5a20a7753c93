"""`state.json` of a checkpoint: where a task stood, and with which settings it was trained."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerState

from peft_mux import storage
from peft_mux.checkpoint.run_record import count, text
from peft_mux.errors import CheckpointError
from peft_mux.task import TaskStatus
from peft_mux.tasks.task_run import TaskRun

STATE_NAME = "state.json"
_FREE_TO_CHANGE = frozenset(
    (
        "eval_steps save_steps data_timeout_s eval_generate eval_delay eval_on_start load_best_model_at_end "
        "metric_for_best_model greater_is_better"
    ).split()
)
_NOT_OF_THE_ADAPTER = frozenset(
    {"base_model_name_or_path", "revision", "inference_mode", "peft_version", "auto_mapping"}
)
_MALFORMED = (OSError, KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)


class ChangedSettingsError(CheckpointError):
    """A task is resumed with other settings than its checkpoint has; an older one would have the same."""


@dataclass(frozen=True, slots=True)
class SavedTask:
    """Where a task stood.

    Attributes:
        settings: what must not change between a checkpoint and its resumption.
        step: number of optimizer steps taken.
        status: where in its life.
        reason: why it failed or stopped.
        num_tokens: tokens that it was trained on.
        last_loss: loss of its last step.
        loss_mean: sum and number of the losses since the last log.
        best: state of the metric that early stopping follows.
        trainer_state: what callbacks see of it.
        optimizer: tree of the optimizer's state; `None` for a task that has ended.
    """

    settings: dict[str, Any]
    step: int
    status: TaskStatus
    reason: str
    num_tokens: int
    last_loss: float
    loss_mean: tuple[float, int]
    best: dict[str, Any]
    trainer_state: dict[str, Any]
    optimizer: Any = None

    def put(self, run: TaskRun) -> None:
        """Put a task to where this one stood; all but its tensors, and its status where it has not ended."""
        run.step, run.num_tokens, run.last_loss = self.step, self.num_tokens, self.last_loss
        run.loss_mean.total, run.loss_mean.count = self.loss_mean
        run.best.load(self.best)
        run.state = TrainerState(**{**asdict(run.state), **self.trainer_state})
        run.state.best_metric, run.state.best_global_step = run.best.value, run.best.step


def task_state(run: TaskRun) -> dict[str, Any]:
    """Return where a task stands, but for its optimizer, as JSON."""
    return {
        "settings": task_settings(run),
        "step": run.step,
        "status": run.status.value,
        "reason": run.reason,
        "num_tokens": run.num_tokens,
        "last_loss": str(run.last_loss),
        "loss_mean": [run.loss_mean.total, run.loss_mean.count],
        "best": run.best.state(),
        "trainer_state": {
            "global_step": run.state.global_step,
            "epoch": run.state.epoch,
            "log_history": run.state.log_history,
        },
    }


def read_task_state(path: Path) -> SavedTask:
    """Return where a task stood.

    Raises:
        CheckpointError: naming the file, if it cannot be read, or a field is not what we write.
    """
    try:
        return _parsed(json.loads(storage.read_regular(path)))
    except _MALFORMED as error:
        raise CheckpointError(
            f"{path}: got a file that is no state of a task ({type(error).__name__}: {error}); allowed: one that a run"
            " has written."
        ) from error


def _parsed(value: dict[str, Any]) -> SavedTask:
    total, number = value["loss_mean"]
    seen = value["trainer_state"]
    for entry in seen["log_history"]:
        # Read again by the report of the run.
        float(entry.get("eval_loss", 0.0))
    if value["status"] == TaskStatus.RUNNING.value and value.get("optimizer") is None:
        raise ValueError("a running task has no optimizer")
    return SavedTask(
        settings=_object(value["settings"], "settings"),
        step=count(value["step"], "step"),
        status=TaskStatus(text(value["status"], "status")),
        reason=text(value["reason"], "reason"),
        num_tokens=count(value["num_tokens"], "num_tokens"),
        last_loss=float(text(value["last_loss"], "last_loss")),
        loss_mean=(float(total), count(number, "loss_mean")),
        best=_object(value["best"], "best"),
        trainer_state={
            "global_step": count(seen["global_step"], "global_step"),
            "epoch": None if seen["epoch"] is None else float(seen["epoch"]),
            "log_history": list(seen["log_history"]),
        },
        optimizer=value.get("optimizer"),
    )


def _object(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise TypeError(f"{name} are a {type(value).__name__}")
    return value


def task_settings(run: TaskRun) -> dict[str, Any]:
    """Return what must not change between a checkpoint and its resumption, as plain JSON."""
    config = run.task.peft_config.to_dict()
    settings = {**asdict(run.hyper), "num_steps": run.num_steps, "shuffle": run.task.shuffle}
    settings["peft_config"] = {key: _plain(value) for key, value in config.items() if key not in _NOT_OF_THE_ADAPTER}
    rows = getattr(getattr(run.loader, "dataset", None), "fingerprint", None)
    settings["rows"] = None if rows is None else rows
    if run.task.generate_options is not None:
        settings["eval_generate"] = run.task.generate_options.described
    # Through JSON, as the saved settings went: tuples become lists and keys strings before they are compared.
    return json.loads(json.dumps(settings, default=str))


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, (set, frozenset)) else value


def check_settings(run: TaskRun, saved: dict[str, Any]) -> None:
    """Refuse to go on with other settings.

    Raises:
        ChangedSettingsError: naming each setting that has changed.
    """
    now = task_settings(run)
    changed = [key for key in now if key not in _FREE_TO_CHANGE and saved.get(key) != now[key]]
    if changed:
        listed = ", ".join(f"{key} {saved.get(key)!r} -> {now[key]!r}" for key in changed)
        raise ChangedSettingsError(
            f'task "{run.name}": got other settings than its checkpoint has ({listed}); allowed: the same,'
            " as a resumed run continues the interrupted one."
            " Undo the change, or train under another name or output_dir."
        )
