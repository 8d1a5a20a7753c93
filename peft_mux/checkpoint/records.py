"""The JSON files of a run folder that say where a run and its tasks stand.

`RunRecord` (`state/run-<step>.json`) says which checkpoints belong together, which tasks were removed, and what decided
the last bits of results. `task_state` (`state.json` of a checkpoint) says where one task stood, and with which settings
it was trained. A seal detects accidental changes only, so every field is also validated before it is used.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from transformers.trainer_callback import ExportableState

from peft_mux import storage
from peft_mux.engine.tasks.active_task import ActiveTask
from peft_mux.errors import CheckpointError
from peft_mux.modeling.adapters.files import weights_digest
from peft_mux.task import TaskStatus
from peft_mux.user_code import UserCodeError, guard_user_code

FORMAT_VERSION = 5
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
        "adam_beta2 adam_epsilon max_steps num_train_epochs num_steps loraplus_lr_ratio router_aux_loss_coef"
    ).split()
)
"""Settings that a resumed task may change: they do not describe the steps that were taken."""
_NOT_OF_THE_ADAPTER = frozenset(
    {"base_model_name_or_path", "revision", "inference_mode", "peft_version", "auto_mapping"}
)
_FILE_NAME = re.compile(r"run-(\d{8,})\.json")
_MOST_STEPS = 2**53
_MALFORMED = (OSError, KeyError, TypeError, ValueError, AttributeError, OverflowError, RecursionError)

# ---------------------------------------------------------------- run records


@dataclass(frozen=True, slots=True)
class RecordedTask:
    """Where a task of a run stood.

    Attributes:
        status: its status.
        reason: why it failed, stopped or was removed.
        step: number of optimizer steps taken, which is the number of its checkpoint.
        generation: how many tasks of this name were removed before it.
    """

    status: TaskStatus
    reason: str
    step: int
    generation: int = 0


@dataclass(frozen=True, slots=True)
class RunRecord:
    """The state of a run at one of its steps.

    Attributes:
        run_step: steps of the run.
        version: format of the file; a record of a version that cannot be read has no other field.
        backbone: digest of the frozen weights.
        tasks: the tasks of the run, in the order of the stream.
        removed: tasks that were removed, and have not been registered again.
        numerics: settings and versions on which the last bits of a result depend.
        run: id of the run, which its checkpoints have too.
        launch: the launch that wrote it (`launch_id`); "" for none.
    """

    run_step: int
    version: int = FORMAT_VERSION
    backbone: str = ""
    tasks: Mapping[str, RecordedTask] = field(default_factory=dict)
    removed: Mapping[str, RecordedTask] = field(default_factory=dict)
    numerics: Mapping[str, Any] = field(default_factory=dict)
    run: str = ""
    launch: str = ""

    def to_bytes(self) -> bytes:
        """Return the record as sealed JSON."""
        tables: dict[str, dict[str, Any]] = {"tasks": {}, "removed": {}}
        for key, tasks in (("tasks", self.tasks), ("removed", self.removed)):
            for name, task in tasks.items():
                entry = {"status": task.status.value, "reason": task.reason, "step": task.step}
                # Only of a task whose name another one had before it.
                tables[key][name] = {**entry, "generation": task.generation} if task.generation else entry
        return storage.sealed_json(
            {
                "format_version": FORMAT_VERSION,
                "run": self.run,
                "launch": self.launch,
                "run_step": self.run_step,
                "backbone": self.backbone,
                "order": list(self.tasks),
                "numerics": dict(self.numerics),
                **tables,
            }
        )


def record_path(folder: Path, run_step: int) -> Path:
    """Return the file of the record of a step."""
    return folder / f"run-{run_step:08d}.json"


def record_paths(folder: Path) -> list[Path]:
    """Return the records of a folder, valid or not, oldest first.

    Raises:
        CheckpointError: if the folder cannot be read.
    """
    paths = [path for path in storage.listed(folder) if path.match("run-*.json")]
    return sorted(paths, key=lambda path: (len(path.name), path.name))


def read_record(path: Path) -> RunRecord:
    """Return a record.

    Raises:
        CheckpointError: naming the file, if it is missing, torn or changed, or a field has an invalid value.
    """
    value = storage.unsealed_json(path)
    try:
        if (named := _FILE_NAME.fullmatch(path.name)) is None:
            raise ValueError("its name is not one that is written")
        # The caller refuses other formats by their version.
        if (version := _count(value["format_version"], "format_version")) != FORMAT_VERSION:
            return RunRecord(int(named[1]), version)
        run_step, order = _count(value["run_step"], "run_step"), value["order"]
        if record_path(path.parent, run_step).name != path.name:
            raise ValueError(f"it is of step {run_step}")
        tables: list[dict[str, RecordedTask]] = []
        for entries in (value["tasks"], value["removed"]):
            if not isinstance(entries, dict):
                raise TypeError(f"tasks are a {type(entries).__name__}")
            for name in entries:
                if (fault := storage.name_fault(name, "task")) is not None:  # it might lead out of the folder
                    raise ValueError(str(fault))
            tables.append(
                {
                    name: RecordedTask(
                        TaskStatus(_text(entry["status"], "status")),
                        _text(entry["reason"], "reason"),
                        _count(entry["step"], "step"),
                        _count(entry.get("generation", 0), "generation"),
                    )
                    for name, entry in entries.items()
                }
            )
        tasks, removed = tables
        if not isinstance(order, list) or not all(isinstance(name, str) for name in order) or set(order) != set(tasks):
            raise ValueError("its order does not name its tasks")
        if removed.keys() & tasks.keys():
            raise ValueError("a task is removed and in the run")
        numerics = value["numerics"]
        if not isinstance(numerics, dict) or any(isinstance(item, (dict, list)) for item in numerics.values()):
            raise ValueError("numerics are not plain values")
        backbone, run = _text(value["backbone"], "backbone"), _text(value["run"], "run")
        launch, tasks = _text(value["launch"], "launch"), {name: tasks[name] for name in order}
        return RunRecord(run_step, version, backbone, tasks, removed, numerics, run, launch)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is not the record of a run ({error}).") from error


def _count(value: Any, name: str) -> int:
    """Return a number of steps or tokens that was read from a file."""
    if type(value) is not int or not 0 <= value < _MOST_STEPS:
        raise ValueError(f"{name} is not a count")
    return value


def _text(value: Any, name: str) -> str:
    """Return a string that was read from a file."""
    if not isinstance(value, str):
        raise ValueError(f"{name} is no text")
    value.encode()  # half of a surrogate pair cannot be printed
    return value


# ---------------------------------------------------------------- states of tasks


class ChangedSettingsError(CheckpointError):
    """A task is resumed with other settings than its checkpoint has; an older checkpoint would have the same."""


def task_state(task: ActiveTask) -> dict[str, Any]:
    """Return where a task stands as JSON, without its optimizer."""
    callbacks: list[tuple[str, dict[str, Any]]] = []
    for callback in task.task.callbacks:
        attributes: dict[str, Any] = {}
        if isinstance(callback, ExportableState):
            # Attributes that cannot be saved are left out.
            with suppress(UserCodeError), guard_user_code(task.name, "callback"):
                attributes = json.loads(json.dumps(callback.state()["attributes"]))
        callbacks.append((type(callback).__name__, attributes))
    return {
        "settings": task_settings(task),
        "step": task.step,
        "status": task.status.value,
        "reason": task.reason,
        "num_tokens": task.num_tokens,
        "last_loss": str(task.last_loss),
        "loss_mean": [task.loss_mean.total, task.loss_mean.count],
        "best": task.best.state(),
        "callbacks": callbacks,
        "trainer_state": {
            "global_step": task.state.global_step,
            "epoch": task.state.epoch,
            "log_history": task.state.log_history,
        },
    }


def restore_callbacks(task: ActiveTask, states: list[tuple[str, dict[str, Any]]]) -> None:
    """Set the saved attributes of a task's callbacks, unless others have taken their places."""
    for callback, (kind, attributes) in zip(task.task.callbacks, states, strict=False):
        if isinstance(callback, ExportableState) and type(callback).__name__ == kind:
            with suppress(UserCodeError), guard_user_code(task.name, "callback"):
                vars(callback).update(attributes)


def read_task_state(path: Path) -> dict[str, Any]:
    """Return what `task_state` wrote, with the tree of the state of its `optimizer`, `None` for a task that has ended.

    Raises:
        CheckpointError: naming the file, if it cannot be read, or a field has an invalid value.
    """
    try:
        value = json.loads(storage.read_regular(path))
        total, number = value["loss_mean"]
        seen = value["trainer_state"]
        for entry in seen["log_history"]:
            for key in entry:
                if key.startswith("eval_"):
                    float(entry[key])  # read again by the report of the run
        if value["status"] == TaskStatus.RUNNING.value and value.get("optimizer") is None:
            raise ValueError("a running task has no optimizer")
        for name in ("settings", "best"):
            if not isinstance(value[name], dict):
                raise TypeError(f"{name} are a {type(value[name]).__name__}")
        return {
            "settings": value["settings"],
            "step": _count(value["step"], "step"),
            "status": TaskStatus(_text(value["status"], "status")),
            "reason": _text(value["reason"], "reason"),
            "num_tokens": _count(value["num_tokens"], "num_tokens"),
            "last_loss": float(_text(value["last_loss"], "last_loss")),
            "loss_mean": (float(total), _count(number, "loss_mean")),
            "best": value["best"],
            "callbacks": [
                (_text(kind, "callback"), dict(attributes)) for kind, attributes in value.get("callbacks", [])
            ],
            "trainer_state": {
                "global_step": _count(seen["global_step"], "global_step"),
                "epoch": None if seen["epoch"] is None else float(seen["epoch"]),
                "log_history": list(seen["log_history"]),
            },
            "optimizer": value.get("optimizer"),
        }
    except _MALFORMED as error:
        raise CheckpointError(f"{path} is not the state of a task ({type(error).__name__}: {error}).") from error


def task_settings(task: ActiveTask) -> dict[str, Any]:
    """Return what must not change between a checkpoint and its resumption, as plain JSON."""
    config = task.task.peft_config.to_dict()
    # The smoothed share of the loss is one of the hyper-parameters. Two functions cannot be compared.
    loss_args = {
        key: value
        for key, value in vars(task.resolved.loss_args).items()
        if key != "label_smoothing_factor" and not callable(value)
    }
    settings = {
        **asdict(task.hyper),
        "router_aux_loss_coef": task.router_coefficient,
        "num_steps": task.num_steps,
        "shuffle": task.task.shuffle,
        "peft_config": {
            key: sorted(value) if isinstance(value, (set, frozenset)) else value
            for key, value in config.items()
            if key not in _NOT_OF_THE_ADAPTER
        },
        "rows": getattr(getattr(task.loader, "dataset", None), "fingerprint", None),
        "loss": {"objective": task.resolved.objective.name, **loss_args},
        # By its content: the reference of a resumed run is read from it again.
        "init_adapter": None if task.task.init_adapter is None else weights_digest(Path(task.task.init_adapter)),
        "reference": "adapter" if task.resolved.has_adapter_reference else None,
    }
    if task.task.generate_options is not None:
        settings["eval_generate"] = task.task.generate_options.described
    # Through JSON, like the saved settings: tuples become lists, and keys strings, before they are compared.
    return json.loads(json.dumps(settings, default=str))


def check_settings(task: ActiveTask, saved: dict[str, Any]) -> str:
    """Return which settings have changed, with old and new values, for a message; "" for none.

    Raises:
        ChangedSettingsError: naming each setting that has changed and must not.
    """
    now = task_settings(task)
    changed = {
        key: f"{key} {saved.get(key)!r} -> {now[key]!r}"
        for key in now
        if key not in _FREE_TO_CHANGE and saved.get(key) != now[key]
    }
    refused = [text for key, text in changed.items() if key not in _FROM_HERE_ON or key in task.swept]
    if refused:
        raise ChangedSettingsError(
            f'task "{task.name}" must have the settings of its checkpoint, got other ones ({", ".join(refused)}). '
            f"Only {', '.join(sorted(_FROM_HERE_ON - task.swept - {'num_steps'}))} may change on resume. Undo the "
            "change, or train under another name or output_dir."
        )
    return ", ".join(changed.values())
