"""`RunRecord`: which checkpoints of a run belong together, which tasks were removed, and what decided its bits.

A record is sealed JSON. Its seal tells what was changed by chance; what was sealed by others is not believed either:
every field is checked before anything is done with it.
"""

# MERGED: `state.json` of a checkpoint: where a task stood, and with which settings it was trained.

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformers import TrainerState

from peft_mux import storage
from peft_mux.engine.tasks.task_run import TaskRun
from peft_mux.errors import CheckpointError
from peft_mux.storage import name_fault
from peft_mux.task import TaskStatus

FORMAT_VERSION = 3
READABLE_VERSIONS = (2, 3)
"""Format 2 knew neither removed tasks nor what decided the bits."""
_FILE_NAME = re.compile(r"run-(\d{8,})\.json")
_MOST_STEPS = 2**53


@dataclass(frozen=True, slots=True)
class RecordedTask:
    """Where a task stood.

    Attributes:
        status: where in its life.
        reason: why it failed, stopped or was removed.
        step: number of optimizer steps taken, which is the number of its checkpoint.
        generation: how many tasks of this name were removed before it.
    """

    status: TaskStatus
    reason: str
    step: int
    generation: int = 0

    def to_json(self) -> dict[str, Any]:
        """Return the fields; format 2 had no generation, so the first one is not written."""
        fields = {"status": self.status.value, "reason": self.reason, "step": self.step}
        return {**fields, "generation": self.generation} if self.generation else fields


class Generations:
    """Which tasks were removed from a run, and how many of its name were there before a task that came later.

    Attributes:
        removed: tasks that were removed and have not come again, by name.
    """

    def __init__(self, record: RunRecord | None = None) -> None:
        """Begin with what a record knows; by default nobody was removed."""
        self.removed: dict[str, RecordedTask] = {} if record is None else dict(record.removed)
        tasks = {} if record is None else record.tasks
        self._numbers = {name: task.generation for name, task in tasks.items() if task.generation}

    def of(self, name: str) -> int:
        """Return how many tasks of a name were removed before the present one."""
        return self._numbers.get(name, 0)

    def has(self, name: str, task: RecordedTask) -> bool:
        """Whether a task of a record is still the one of its name."""
        return name not in self.removed and task.generation == self.of(name)

    def note_removed(self, name: str, reason: str, step: int) -> None:
        """Remember that a task was removed, why, and after how many of its steps."""
        self.removed[name] = RecordedTask(TaskStatus.REMOVED, reason, step, self.of(name))

    def note_arrival(self, name: str) -> bool:
        """Remember that a task begins; return whether it has the name of a removed one, whose files are not its own."""
        before = self.removed.pop(name, None)
        if before is not None:
            self._numbers[name] = before.generation + 1
        return before is not None


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The state of a run at one of its steps.

    Attributes:
        run_step: steps of the run.
        version: format of the file; one that this version does not read has no other field.
        backbone: digest of the frozen weights.
        tasks: the tasks of the run, in the order of the stream.
        removed: tasks that were removed, and have not come again.
        numerics: settings and versions on which the last bits of a result depend.
    """

    run_step: int
    version: int = FORMAT_VERSION
    backbone: str = ""
    tasks: Mapping[str, RecordedTask] = field(default_factory=dict)
    removed: Mapping[str, RecordedTask] = field(default_factory=dict)
    numerics: Mapping[str, Any] = field(default_factory=dict)

    def to_bytes(self) -> bytes:
        """Return the record as sealed JSON."""
        return storage.sealed_json(
            {
                "format_version": FORMAT_VERSION,
                "run_step": self.run_step,
                "backbone": self.backbone,
                "order": list(self.tasks),
                "tasks": {name: task.to_json() for name, task in self.tasks.items()},
                "removed": {name: task.to_json() for name, task in self.removed.items()},
                "numerics": dict(self.numerics),
            }
        )


def record_path(folder: Path, run_step: int) -> Path:
    """Return the file of the record of a step."""
    return folder / f"run-{run_step:08d}.json"


def record_paths(folder: Path) -> list[Path]:
    """Return the records of a folder, valid or not, oldest first."""
    return sorted(folder.glob("run-*.json"), key=lambda path: (len(path.name), path.name))


def read_records(folder: Path, warn: Callable[[str], None] | None = None) -> list[tuple[RunRecord, Path]]:
    """Return the valid records of a folder, oldest first.

    Args:
        folder: the folder that the records lie in.
        warn: told of each one that is not valid.
    """
    found = []
    for path in record_paths(folder):
        try:
            found.append((read_record(path), path))
        except CheckpointError as error:
            if warn is not None:
                warn(f"{error} Trying the record before it.")
    # By the number in the record, never by the time of the file, which copying changes.
    return sorted(found, key=lambda item: item[0].run_step)


def read_record(path: Path) -> RunRecord:
    """Return a record.

    Raises:
        CheckpointError: naming the file, if it is missing, torn or changed, or a field is not what we write.
    """
    value = storage.unsealed_json(path)
    try:
        return _parsed(value, path)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{path}: got a file that is no record of a run ({error}); allowed: one that a run has written."
        ) from error


def _parsed(value: Any, path: Path) -> RunRecord:
    named = _FILE_NAME.fullmatch(path.name)
    if named is None:
        raise ValueError("its name is not one that is written")
    version = count(value["format_version"], "format_version")
    # Nothing more is known of other formats; whoever would go on from one refuses it by its version.
    if version not in READABLE_VERSIONS:
        return RunRecord(int(named[1]), version)
    run_step = count(value["run_step"], "run_step")
    if record_path(path.parent, run_step).name != path.name:
        raise ValueError(f"it is of step {run_step}")
    tasks, order = _tasks(value["tasks"]), value["order"]
    if not isinstance(order, list) or not all(isinstance(name, str) for name in order) or set(order) != tasks.keys():
        raise ValueError("its order is not that of its tasks")
    removed = _tasks(value.get("removed", {}))
    if removed.keys() & tasks.keys():
        raise ValueError("a task is removed and in the run")
    numerics = value.get("numerics", {})
    if not isinstance(numerics, dict) or any(isinstance(item, (dict, list)) for item in numerics.values()):
        raise ValueError("numerics are not plain values")
    return RunRecord(
        run_step,
        version,
        text(value["backbone"], "backbone"),
        {name: tasks[name] for name in order},
        removed,
        numerics,
    )


def _tasks(value: Any) -> dict[str, RecordedTask]:
    if not isinstance(value, dict):
        raise TypeError(f"tasks are a {type(value).__name__}")
    tasks = {}
    for name, entry in value.items():
        if (fault := name_fault(name, "task")) is not None:  # not written by us; it may lead out of the folder
            raise ValueError(str(fault))
        tasks[name] = RecordedTask(
            TaskStatus(text(entry["status"], "status")),
            text(entry["reason"], "reason"),
            count(entry["step"], "step"),
            count(entry.get("generation", 0), "generation"),
        )
    return tasks


def count(value: Any, name: str) -> int:
    """Return a number of steps or tokens as it was read.

    Raises:
        ValueError: if it is not an integer of at least 0, or a number that no run reaches.
    """
    if type(value) is not int or not 0 <= value < _MOST_STEPS:
        raise ValueError(f"{name} is not a count")
    return value


def text(value: Any, name: str) -> str:
    """Return a string as it was read.

    Raises:
        ValueError: if it is none, or cannot be printed.
    """
    if not isinstance(value, str):
        raise ValueError(f"{name} is no text")
    value.encode()  # half of a surrogate pair could not be printed
    return value


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
        return _parsed_task_file(json.loads(storage.read_regular(path)))
    except _MALFORMED as error:
        raise CheckpointError(
            f"{path}: got a file that is no state of a task ({type(error).__name__}: {error}); allowed: one that a run"
            " has written."
        ) from error


def _parsed_task_file(value: dict[str, Any]) -> SavedTask:
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
    args = vars(run.resolved.loss_args)
    # The share that is smoothed is one of the hyper-parameters.
    own = {key: value for key, value in args.items() if key != "label_smoothing_factor" and not callable(value)}
    return {"objective": run.resolved.objective.name, **own}


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
