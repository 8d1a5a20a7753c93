"""`tasks.yaml`: the same words as in Python, turned into arguments and tasks; all faults at once, with line numbers.

    model: Qwen/Qwen3-0.6B
    output_dir: runs/support
    run: {bf16: true, logging_steps: 10}                  # MultiTaskTrainingArguments
    defaults: {learning_rate: 2.0e-4, peft: {type: lora, r: 16, target_modules: all-linear}}
    tasks:
      sql:  {dataset: data/sql.jsonl, num_train_epochs: 3}
      math: {dataset: org/math, eval_split: test, peft: {r: 64}, early_stopping: {patience: 3}}

Paths are relative to the file. `dataset` is a .jsonl, .json, .csv or .parquet file, a folder, or a hub id. Where a
secret stands (`secret_values.SECRETS`), `${HF_TOKEN}` is a variable of the environment.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peft_mux.argument_fields import REASONS
from peft_mux.arguments import SETTABLE_FIELDS, MultiTaskTrainingArguments
from peft_mux.cli.config_objects import TASK_KEYS, make_task, unknown_keys
from peft_mux.cli.secret_values import expand_secrets
from peft_mux.cli.yaml_text import parse_value, read_yaml
from peft_mux.data.sources import SOURCES
from peft_mux.errors import ConfigError, Fault, closest, raise_faults, shown
from peft_mux.moved_names import OF_THE_ADAPTER, belongs
from peft_mux.task import Task

_TOP_KEYS = ("model", "tokenizer", "output_dir", "run", "defaults", "tasks", "model_init_kwargs")
_DEFAULTS_OF = re.compile(r"^tasks\.[^.]+\.")
_WHEN_EVALUATED = ("eval_steps", "eval_delay", "eval_on_start")


@dataclass(frozen=True, slots=True)
class RunConfig:
    """What a file describes.

    Attributes:
        model: hub id or folder of the backbone.
        tokenizer: hub id or folder of the tokenizer; `None` for the model's own.
        args: the arguments of the run.
        tasks: the tasks, with their datasets loaded.
        model_init_kwargs: what `from_pretrained` is given to load the model.
    """

    model: str
    tokenizer: str | None
    args: MultiTaskTrainingArguments
    tasks: list[Task]
    model_init_kwargs: dict[str, Any]


def read_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Return what a file describes.

    Args:
        path: path of the YAML file.
        overrides: texts such as `tasks.sql.learning_rate=1e-4`, each of which replaces or adds one value.

    Raises:
        ConfigError: naming every fault, with its line where it has one.
    """
    path = Path(path)
    data, lines, faults = _parse(path)
    for override in overrides:
        _apply_override(data, override)
    faults += expand_secrets(data) + _structure_faults(data)
    # Whatever can be made is made all the same, so that one call tells all faults of a file.
    config, more = _make_run_config(data, path.parent)
    known = {fault.where for fault in faults}
    faults += [fault for fault in more if fault.where not in known]
    raise_faults([_with_line_number(fault, lines, path) for fault in faults])
    assert config is not None, "what cannot be made has a fault"
    return config


def _parse(path: Path) -> tuple[dict[str, Any], dict[str, int], list[Fault]]:
    data, lines, faults = read_yaml(path)
    if not isinstance(data, dict):
        raise ConfigError(
            f"{path}: got {type(data).__name__}; allowed: a mapping with the keys {', '.join(_TOP_KEYS)}."
        )
    return data, lines, faults


def _with_line_number(fault: Fault, lines: Mapping[str, int], path: Path) -> Fault:
    where = fault.where
    # A task's fault may stand in the defaults, and a missing field only in the section that it is missing from.
    inherited = _DEFAULTS_OF.sub("defaults.", where)
    if where not in lines and inherited in lines:
        where = inherited
    while where not in lines and "." in where:
        where = where.rsplit(".", 1)[0]
    prefix = f"{path.name}:{lines[where]} " if where in lines else f"{path.name} "
    return Fault(prefix + fault.where, fault.got, fault.allowed, fault.fix)


def _apply_override(data: dict[str, Any], override: str) -> None:
    key, separator, text = override.partition("=")
    if not separator or not key:
        raise ConfigError(f"--set: got {override!r}; allowed: key=value, such as tasks.sql.learning_rate=1e-4.")
    *parents, last = key.split(".")
    target = data
    for parent in parents:
        target = target.setdefault(parent, {})
        if not isinstance(target, dict):
            raise ConfigError(f"--set {key}: got a value where {parent} would be a mapping; allowed: an existing path.")
    target[last] = parse_value(text, f"--set {key}")


def _structure_faults(data: dict[str, Any]) -> list[Fault]:
    faults = unknown_keys(data, _TOP_KEYS, "")
    for key in ("model", "tasks"):
        if not data.get(key):
            faults.append(Fault(key, shown(data.get(key)), "a value; every file needs it"))
    for key in ("model", "tokenizer", "output_dir"):
        if data.get(key) is not None and not isinstance(data[key], str):
            faults.append(Fault(key, shown(data[key]), "a string"))
    if not isinstance(data.get("model_init_kwargs") or {}, dict):
        faults.append(_not_mapping("model_init_kwargs", data["model_init_kwargs"]))
    run_keys = sorted(SETTABLE_FIELDS - {"output_dir"})
    for key, allowed, hint in (("run", run_keys, _hint_of_run), ("defaults", TASK_KEYS, _hint_of_task)):
        section = data.get(key) or {}
        faults += (
            unknown_keys(section, allowed, f"{key}.", hint)
            if isinstance(section, dict)
            else [_not_mapping(key, section)]
        )
    tasks = data.get("tasks") or {}
    if not isinstance(tasks, dict):
        return [*faults, _not_mapping("tasks", tasks)]
    for name, task in tasks.items():
        where = f"tasks.{name}"
        faults += (
            unknown_keys(task, TASK_KEYS, f"{where}.", _hint_of_task)
            if isinstance(task, dict)
            else [_not_mapping(where, task)]
        )
        if isinstance(task, dict):
            # With the defaults, as what a task leaves out may stand there.
            own = _value_faults({**_mapping_or_empty(data.get("defaults")), **task}, where)
            # A misspelt name in --set makes a task of one setting.
            others = [str(one) for one in tasks if one != name]
            meant = closest(str(name), others) if "dataset" not in task and len(task) == 1 else ""
            faults += [replace(one, fix=meant) if one.where == f"{where}.dataset" else one for one in own]
    # Defaults need not name a dataset, so one is made up where they have none.
    return faults + _value_faults({"dataset": "-", **_mapping_or_empty(data.get("defaults"))}, "defaults")


def _mapping_or_empty(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _value_faults(task: Mapping[str, Any], where: str) -> list[Fault]:
    """Return the faults of what is not handed on as it is: where the rows lie, and the nested sections."""
    faults = []
    if not isinstance(task.get("dataset"), str) or not task["dataset"]:
        faults.append(Fault(f"{where}.dataset", shown(task.get("dataset")), SOURCES))
    for key in ("eval_dataset", "dataset_config", "split", "eval_split"):
        if task.get(key) is not None and not isinstance(task[key], str):
            faults.append(Fault(f"{where}.{key}", shown(task[key]), SOURCES if key == "eval_dataset" else "a name"))
    for key in ("peft", "early_stopping"):
        if task.get(key) is not None and not isinstance(task[key], dict):
            faults.append(_not_mapping(f"{where}.{key}", task[key]))
    return faults


def _not_mapping(where: str, value: Any) -> Fault:
    return Fault(where, shown(value), "a mapping")


def _hint_of_run(key: str) -> str:
    """Return what is known of a key of `run`: why an argument of Trainer is refused, or where another one belongs."""
    if key == "output_dir":
        return "It stands at the top of the file."
    if key in REASONS:
        return f"Reason: {REASONS[key]}."
    return "Set it on each task, or under defaults." if key in TASK_KEYS else belongs(key)


def _hint_of_task(key: str) -> str:
    if key in OF_THE_ADAPTER:
        return f"It is one of the adapter: set {OF_THE_ADAPTER[key]} under peft."
    return "It is one for the run: set it under run." if key in SETTABLE_FIELDS else belongs(key, on_task=True)


def _make_run_config(data: dict[str, Any], folder: Path) -> tuple[RunConfig | None, list[Fault]]:
    """Return what a file describes, or what is wrong with the objects that it stands for."""
    args, faults = _make_arguments(data)
    defaults = _mapping_or_empty(data.get("defaults"))
    sections = {name: one for name, one in _mapping_or_empty(data.get("tasks")).items() if isinstance(one, dict)}
    some_held_out = any(_has_held_out({**defaults, **one}) for one in sections.values())
    tasks: list[Task] = []
    for name, settings in sections.items():
        own_peft, peft = _mapping_or_empty(settings.get("peft")), _mapping_or_empty(defaults.get("peft"))
        merged = {**defaults, **settings, "peft": _merged_peft(peft, own_peft)}
        if some_held_out and not _has_held_out(merged):
            # As with the arguments of a run: when tasks are evaluated says nothing of those without held-out rows.
            merged = {key: value for key, value in merged.items() if key in settings or key not in _WHEN_EVALUATED}
        task, own = make_task(str(name), merged, folder)
        faults += [replace(fault, where=fault.where.replace(".peft_config.", ".peft.", 1)) for fault in own]
        tasks += [] if task is None else [task]
    if faults or args is None or not isinstance(data.get("model"), str) or not tasks:
        return None, faults
    config = RunConfig(
        model=_local_or_hub(data["model"], folder),
        tokenizer=_local_or_hub(data["tokenizer"], folder) if isinstance(data.get("tokenizer"), str) else None,
        args=args,
        tasks=tasks,
        model_init_kwargs=_mapping_or_empty(data.get("model_init_kwargs")),
    )
    return config, []


def _has_held_out(settings: Mapping[str, Any]) -> bool:
    return any(settings.get(key) is not None for key in ("eval_dataset", "eval_split"))


def _make_arguments(data: dict[str, Any]) -> tuple[MultiTaskTrainingArguments | None, list[Fault]]:
    given = {key: value for key, value in _mapping_or_empty(data.get("run")).items() if key in SETTABLE_FIELDS}
    output_dir = data.get("output_dir")
    try:
        folder = output_dir if isinstance(output_dir, str) and output_dir else "peft_mux_output"
        return MultiTaskTrainingArguments(**{**given, "output_dir": folder}), []
    except ConfigError as error:
        faults = error.faults or [Fault("run", "arguments that transformers refuses", str(error))]
        # In a file the sections have other names than the objects that are made of them.
        return None, [replace(fault, where=fault.where.replace("args.", "run.", 1)) for fault in faults]


def _local_or_hub(name: str, folder: Path) -> str:
    """Return the path of a folder beside the file, or the name as it is."""
    local = folder / name
    return str(local) if local.is_dir() else name


def _merged_peft(defaults: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a task's adapter; a task of another type than the defaults begins with none of theirs."""
    kinds = [str(options.get("type", "lora")).lower() for options in (defaults, {**defaults, **own})]
    return {**defaults, **own} if kinds[0] == kinds[1] else own
