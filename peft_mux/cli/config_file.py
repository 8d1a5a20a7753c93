"""`tasks.yaml`: the same words as in Python, turned into arguments and tasks; all faults at once, with line numbers.

    model: Qwen/Qwen3-0.6B
    output_dir: runs/support
    run: {bf16: true, logging_steps: 10}                  # MultiTaskTrainingArguments
    defaults: {learning_rate: 2.0e-4, peft: {type: lora, r: 16, target_modules: all-linear}}
    tasks:
      sql:  {dataset: data/sql.jsonl, num_train_epochs: 3}
      math: {dataset: org/math, eval_split: test, peft: {r: 64}, early_stopping: {patience: 3}}

Paths are relative to the file. `dataset` is a .jsonl, .json, .csv or .parquet file, a folder, or a hub id.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from peft_mux.arguments import SETTABLE_FIELDS, MultiTaskTrainingArguments
from peft_mux.cli.encoding import encoding_fault
from peft_mux.cli.yaml_text import parse_value, read_yaml
from peft_mux.errors import ConfigError, Fault, closest, raise_faults, shown
from peft_mux.generation.options import GenerateOptions
from peft_mux.task import TASK_FIELDS, EarlyStopping, Task

_TOP_KEYS = ("model", "tokenizer", "output_dir", "run", "defaults", "tasks", "model_init_kwargs")
_DATA_KEYS = ("dataset", "dataset_config", "split", "eval_dataset", "eval_split")
_NOT_IN_FILES = ("name", "peft_config", "train_dataset", "eval_dataset", "callbacks", "compute_metrics")
_TASK_KEYS = (
    *_DATA_KEYS,
    "peft",
    *(name for name in TASK_FIELDS if name not in (*_NOT_IN_FILES, "preprocess_logits_for_metrics")),
)
_DEFAULTS_OF = re.compile(r"^tasks\.[^.]+\.")
_FILE_KINDS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}


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
    data, lines = _parse(path)
    for override in overrides:
        _apply_override(data, override)
    raise_faults([_with_line_number(fault, lines, path) for fault in _structure_faults(data)])
    return _make_run_config(data, path.parent, lines, path)


def _parse(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    data, lines, faults = read_yaml(path)
    if not isinstance(data, dict):
        raise ConfigError(
            f"{path}: got {type(data).__name__}; allowed: a mapping with the keys {', '.join(_TOP_KEYS)}."
        )
    raise_faults([_with_line_number(fault, lines, path) for fault in faults])
    return data, lines


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
    faults = _unknown_keys(data, _TOP_KEYS, "")
    for key in ("model", "tasks"):
        if not data.get(key):
            faults.append(Fault(key, shown(data.get(key)), "a value; every file needs it"))
    for key in ("model", "tokenizer", "output_dir"):
        if data.get(key) is not None and not isinstance(data[key], str):
            faults.append(Fault(key, shown(data[key]), "a string"))
    if not isinstance(data.get("model_init_kwargs") or {}, dict):
        faults.append(_not_mapping("model_init_kwargs", data["model_init_kwargs"]))
    run_keys = sorted(SETTABLE_FIELDS - {"output_dir"})
    for key, allowed in (("run", run_keys), ("defaults", _TASK_KEYS)):
        section = data.get(key) or {}
        faults += (
            _unknown_keys(section, allowed, f"{key}.") if isinstance(section, dict) else [_not_mapping(key, section)]
        )
    tasks = data.get("tasks") or {}
    if not isinstance(tasks, dict):
        return [*faults, _not_mapping("tasks", tasks)]
    for name, task in tasks.items():
        where = f"tasks.{name}"
        faults += (
            _unknown_keys(task, _TASK_KEYS, f"{where}.") if isinstance(task, dict) else [_not_mapping(where, task)]
        )
        if isinstance(task, dict):
            # With the defaults, as what a task leaves out may stand there.
            faults += _value_faults({**_mapping_or_empty(data.get("defaults")), **task}, where)
    # Defaults need not name a dataset, so one is made up where they have none.
    return faults + _value_faults({"dataset": "-", **_mapping_or_empty(data.get("defaults"))}, "defaults")


def _mapping_or_empty(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _value_faults(task: Mapping[str, Any], where: str) -> list[Fault]:
    """Return the faults of what is not handed on as it is: where the rows lie, and the nested sections."""
    source = "a .jsonl, .json, .csv or .parquet file, a folder, or a hub id"
    faults = []
    if not isinstance(task.get("dataset"), str) or not task["dataset"]:
        faults.append(Fault(f"{where}.dataset", shown(task.get("dataset")), source))
    for key in ("eval_dataset", "dataset_config", "split", "eval_split"):
        if task.get(key) is not None and not isinstance(task[key], str):
            faults.append(Fault(f"{where}.{key}", shown(task[key]), source if key == "eval_dataset" else "a name"))
    for key in ("peft", "early_stopping"):
        if task.get(key) is not None and not isinstance(task[key], dict):
            faults.append(_not_mapping(f"{where}.{key}", task[key]))
    return faults


def _unknown_keys(section: Mapping[str, Any], allowed: Sequence[str], prefix: str) -> list[Fault]:
    return [
        Fault(f"{prefix}{key}", "an unknown key", f"{', '.join(sorted(allowed))}", closest(str(key), allowed))
        for key in section
        if key not in allowed
    ]


def _not_mapping(where: str, value: Any) -> Fault:
    return Fault(where, shown(value), "a mapping")


def _make_run_config(data: dict[str, Any], folder: Path, lines: Mapping[str, int], path: Path) -> RunConfig:
    tasks: list[Task] = []
    errors: list[str] = []
    defaults = data.get("defaults") or {}
    try:
        args = MultiTaskTrainingArguments(
            output_dir=data.get("output_dir") or "peft_mux_output", **(data.get("run") or {})
        )
    except ConfigError as error:
        # Tasks are built all the same, so that one call tells all faults of a file.
        args, errors = None, _located_messages(error, lines, path, "run")
    for name, settings in data["tasks"].items():
        merged = {**defaults, **settings, "peft": _merged_peft(defaults.get("peft") or {}, settings.get("peft") or {})}
        try:
            tasks.append(_make_task(str(name), merged, folder))
        except ConfigError as error:
            errors += _located_messages(error, lines, path, f"tasks.{name}")
    if errors or args is None:
        raise ConfigError("\n".join(errors))
    return RunConfig(
        model=_local_or_hub(data["model"], folder),
        tokenizer=None if data.get("tokenizer") is None else _local_or_hub(data["tokenizer"], folder),
        args=args,
        tasks=tasks,
        model_init_kwargs=data.get("model_init_kwargs") or {},
    )


def _located_messages(error: ConfigError, lines: Mapping[str, int], path: Path, section: str) -> list[str]:
    """Return the lines of an error, each fault with the line of the file that it stands in."""
    if not error.faults:
        return [f"{path.name}:{lines[section]} {error}" if section in lines else str(error)]
    # In a file the sections have other names than the objects that are made of them.
    words = {"args.": "run.", ".peft_config.": ".peft."}
    faults = []
    for fault in error.faults:
        where = fault.where
        for ours, theirs in words.items():
            where = where.replace(ours, theirs, 1)
        faults.append(str(_with_line_number(replace(fault, where=where), lines, path)))
    return faults


def _local_or_hub(name: str, folder: Path) -> str:
    """Return the path of a folder beside the file, or the name as it is."""
    local = folder / name
    return str(local) if local.is_dir() else name


def _make_task(name: str, settings: dict[str, Any], folder: Path) -> Task:
    own = {key: value for key, value in settings.items() if key not in (*_DATA_KEYS, "peft")}
    if own.get("early_stopping") is not None:
        try:
            own["early_stopping"] = EarlyStopping(**own["early_stopping"])
        except TypeError as error:
            allowed = ", ".join(item.name for item in fields(EarlyStopping))
            raise ConfigError(f"tasks.{name}.early_stopping: {error}; allowed: {allowed}.") from error
    if isinstance(own.get("eval_generate"), dict):
        own["eval_generate"] = _generate_options(name, own["eval_generate"])
    eval_rows = None
    if settings.get("eval_dataset") is not None:
        split = settings.get("eval_split", "train")
        eval_rows = load_rows(settings["eval_dataset"], split, settings.get("dataset_config"), folder, f"tasks.{name}")
    elif settings.get("eval_split") is not None:
        split = settings["eval_split"]
        eval_rows = load_rows(settings["dataset"], split, settings.get("dataset_config"), folder, f"tasks.{name}")
    split = settings.get("split", "train")
    rows = load_rows(settings["dataset"], split, settings.get("dataset_config"), folder, f"tasks.{name}")
    peft_config = _make_peft_config(name, settings["peft"])
    return Task(name=name, peft_config=peft_config, train_dataset=rows, eval_dataset=eval_rows, **own)


def _generate_options(name: str, settings: dict[str, Any]) -> GenerateOptions:
    where = f"tasks.{name}.eval_generate."
    raise_faults(_unknown_keys(settings, [item.name for item in fields(GenerateOptions)], where))
    try:
        return GenerateOptions(**settings)
    except ConfigError as error:
        raise_faults([replace(fault, where=f"{where}{fault.where}") for fault in error.faults])
        raise


def _make_peft_config(name: str, settings: dict[str, Any]) -> Any:
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING, PeftType

    options = dict(settings)
    kind = str(options.pop("type", "lora")).upper()
    known = {str(item.value): item for item in PeftType}
    if kind not in known:
        names = [key.lower() for key in known]
        raise ConfigError(
            f"tasks.{name}.peft.type: got {kind.lower()!r}; allowed: {', '.join(names)}. {closest(kind.lower(), names)}"
        )
    config_class = PEFT_TYPE_TO_CONFIG_MAPPING[known[kind]]
    allowed = [item.name for item in fields(config_class) if item.init]
    faults = _unknown_keys(options, allowed, f"tasks.{name}.peft.")
    raise_faults(faults)
    try:
        return config_class(**options)
    except Exception as error:  # PEFT checks little: what it raises is whatever its code comes upon
        raise ConfigError(f"tasks.{name}.peft: PEFT refuses it: {error}") from error


def _merged_peft(defaults: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a task's adapter; a task of another type than the defaults begins with none of theirs."""
    kinds = [str(options.get("type", "lora")).lower() for options in (defaults, {**defaults, **own})]
    return {**defaults, **own} if kinds[0] == kinds[1] else own


def load_rows(source: str, split: str, config: str | None, folder: Path, where: str) -> Any:
    """Return the rows of a file, a folder or a hub dataset.

    Args:
        source: path of a file or folder, relative to `folder`, or else a hub id.
        split: name of the split, or a part of it such as "train[:90%]".
        config: name of the configuration of a hub dataset; `None` for its default.
        folder: folder that the configuration file lies in.
        where: dotted path of the task, for messages.

    Raises:
        ConfigError: if it cannot be loaded.
    """
    from datasets import load_dataset, load_from_disk

    path = folder / source
    try:
        if path.is_file():
            kind = _FILE_KINDS.get(path.suffix)
            if kind is None:
                raise ConfigError(f"{where}.dataset: got {source!r}; allowed: {', '.join(_FILE_KINDS)} files.")
            if not split.startswith("train"):
                raise ConfigError(
                    f"{where}.split: got {split!r} of {source!r}; allowed: train, or a part of it such as train[:90%], "
                    "as a single file has no other. Put the held-out rows into a file of their own: eval_dataset."
                )
            if kind != "parquet":
                raise_faults(encoding_fault(path, f"{where}.dataset"))
            return load_dataset(kind, data_files=str(path), split=split)
        if (path / "dataset_info.json").is_file() or (path / "dataset_dict.json").is_file():
            loaded = load_from_disk(str(path))
            return loaded[split] if hasattr(loaded, "keys") else loaded
        return load_dataset(str(path) if path.is_dir() else source, config, split=split)
    except ConfigError:
        raise
    # `datasets` and the hub raise errors of many kinds, all of which mean that there are no rows.
    except Exception as error:
        raise ConfigError(f"{where}.dataset: got {source!r}, which cannot be loaded: {error}") from error
