"""`state.json` of a checkpoint: where a task stood, and with which settings it was trained."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import TrainerState

from peft_mux import storage
from peft_mux.checkpoint.run_record import count, text
from peft_mux.errors import CheckpointError
from peft_mux.modeling.objectives.task_objective import args_of, objective_of
from peft_mux.task import TaskStatus
from peft_mux.tasks.task_run import TaskRun

STATE_NAME = "state.json"
_FREE_TO_CHANGE = frozenset(
    (
        "eval_steps save_steps data_timeout_s eval_generate eval_delay eval_on_start load_best_model_at_end "
        "metric_for_best_model greater_is_better"
    ).split()
)
_FROM_HERE_ON = frozenset(
    (
        "learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps weight_decay max_grad_norm adam_beta1 "
        "adam_beta2 adam_epsilon max_steps num_train_epochs num_steps"
    ).split()
)
"""What a resumed task may have otherwise than before: none of it says anything of the steps that were taken."""
_OF_OLDER_STATES = {"label_smoothing_factor": 0.0, "neftune_noise_alpha": 0.0}
"""Settings that older states do not name, as there was only this."""
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
    settings["loss"] = _loss_settings(run)
    if run.task.generate_options is not None:
        settings["eval_generate"] = run.task.generate_options.described
    # Through JSON, as the saved settings went: tuples become lists and keys strings before they are compared.
    return json.loads(json.dumps(settings, default=str))


def _loss_settings(run: TaskRun) -> dict[str, Any]:
    """Return what a task is trained towards; a function of its own is not told from another one."""
    args = vars(args_of(run.task))
    # The share that is smoothed is one of the hyper-parameters.
    own = {key: value for key, value in args.items() if key != "label_smoothing_factor" and not callable(value)}
    return {"objective": objective_of(run.task).name, **own}


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, (set, frozenset)) else value


def check_settings(run: TaskRun, saved: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return what has changed of the settings that hold from here on, each as it was and as it is.

    Raises:
        ChangedSettingsError: naming each setting that has changed and must not.
    """
    now = task_settings(run)
    # Older states say nothing of the loss, or of arguments that it has got since.
    loss = saved.get("loss", {})
    saved = {**_OF_OLDER_STATES, **saved, "loss": {**now["loss"], **loss} if isinstance(loss, dict) else loss}
    changed = {
        key: (saved.get(key), now[key]) for key in now if key not in _FREE_TO_CHANGE and saved.get(key) != now[key]
    }
    refused = {key: values for key, values in changed.items() if key not in _FROM_HERE_ON or key in run.swept}
    if refused:
        raise ChangedSettingsError(
            f'task "{run.name}": got other settings than its checkpoint has ({_listed(refused)}); allowed: the same,'
            f" but for {', '.join(sorted(_FROM_HERE_ON - run.swept - {'num_steps'}))}, which may change from here on."
            " Undo the change, or train under another name or output_dir."
        )
    return changed


def told_changes(run: TaskRun, saved: SavedTask, changed: Mapping[str, tuple[Any, Any]]) -> str:
    """Return in a line what a task goes on with that is other than before; "" where nothing is.

    Args:
        run: the task.
        saved: where it stood.
        changed: what has changed of its settings, as it was and as it is.
    """
    if not changed:
        return ""
    if saved.status.is_final and not goes_on(run, saved):
        return f'task "{run.name}": has ended, so that other settings come to nothing: {_listed(changed)}'
    anew = "; its optimizer begins anew, as that of a task that has ended is not kept" if goes_on(run, saved) else ""
    return f'task "{run.name}": goes on from step {saved.step} with other settings: {_listed(changed)}{anew}'


def goes_on(run: TaskRun, saved: SavedTask) -> bool:
    """Whether a task that had taken all its steps has got more of them."""
    return saved.status is TaskStatus.SUCCEEDED and run.num_steps > saved.step


def _listed(changed: Mapping[str, tuple[Any, Any]]) -> str:
    return ", ".join(f"{key} {before!r} -> {now!r}" for key, (before, now) in changed.items())
