"""`tasks.yaml`: the same settings as in Python, read into arguments and tasks; all faults at once, with line numbers.

    model: Qwen/Qwen3-0.6B
    output_dir: runs/support
    run: {bf16: true, logging_steps: 10}                  # MultiTaskTrainingArguments
    defaults: {learning_rate: 2.0e-4, peft: {type: lora, r: 16, target_modules: all-linear}}
    tasks:
      sql:  {dataset: data/sql.jsonl, num_train_epochs: 3}
      math: {dataset: org/math, eval_split: test, peft: {r: 64}, early_stopping: {patience: 3}}

All paths, also those of `--set`, are relative to the folder of the file. `dataset` is a .jsonl, .json, .csv or .parquet
file, a folder, or a hub id. In the two fields of `SECRETS`, `${HF_TOKEN}` is a variable of the environment: a file is
shared and kept under version control, a token is not. Elsewhere a variable would make the file train something else on
another machine.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from peft import PEFT_TYPE_TO_CONFIG_MAPPING, PeftType
from transformers import TrainingArguments

from peft_mux.arguments import (
    ADAPTER_NAMES,
    FIELD_TYPES,
    RENAMED,
    SETTABLE_FIELDS,
    MultiTaskTrainingArguments,
    belongs,
    by_name,
    plain_types,
    reason_against,
)
from peft_mux.data.sources import SOURCES, rows_of
from peft_mux.errors import ConfigError, Fault, Rule, closest, is_integer, is_real, raise_faults, rule_faults, shown
from peft_mux.modeling.sampling import GenerateOptions
from peft_mux.scheduler.costs.hardware import DEVICES, Cluster, parse_devices
from peft_mux.scheduler.plan import Link
from peft_mux.storage import read_regular
from peft_mux.task import TASK_FIELDS, EarlyStopping, Task

SECRETS = ("run.hub_token", "model_init_kwargs.token")
"""The fields that hold secrets; neither is written into a run folder."""
DATA_KEYS = ("dataset", "dataset_config", "split", "eval_dataset", "eval_split", "val_size")
_PART_KEYS = ("path", "weight", "split", "dataset_config")
"""The keys of one of several data sets of a task."""
_NOT_IN_FILES = "name peft_config train_dataset eval_dataset callbacks compute_metrics preprocess_logits_for_metrics"
TASK_KEYS = (*DATA_KEYS, "peft", *(name for name in TASK_FIELDS if name not in _NOT_IN_FILES.split()))
"""The keys of a task in a file."""
_TOP_KEYS = ("model", "tokenizer", "output_dir", "run", "defaults", "tasks", "model_init_kwargs")
_PATHS = "model tokenizer dataset path eval_dataset init_adapter cost_profile resume_from_checkpoint".split()
"""Keys of files and folders that are read; most may be hub ids too."""
RECORD_NAME = "run.yaml"
"""The file of a run folder that has what its tasks were made from, for `peft-mux generate` and `eval`."""
_MAX_NODES = 200_000
"""Values of a file once aliases are written out."""
_FREE_SECTIONS = ("model_init_kwargs",)
"""Sections that are passed on unchanged, in which numbers may be keys (`max_memory: {0: 10GiB}`)."""
_WHEN_EVALUATED = ("eval_steps", "eval_delay", "eval_on_start")
_OF_ROWS = ("loss_type", "objective", "objective_args", "early_stopping.metric", "compute_metrics", "max_steps")
"""Fields whose faults may only be due to rows that could not be loaded."""
_NO_ROWS = [{"input_ids": [0, 0]}]
"""Stands for rows that could not be loaded, so that the other faults of a task are found as well."""
_SHORT_NAMES = {
    "batch_size": "train_batch_size",
    "per_device_train_batch_size": "train_batch_size",
    "data": "dataset",
    "train_dataset": "dataset",
    "peft_config": "peft",
    "peft_type": "type",
    "args": "run",
    "base_model": "model",
}
"""Names of keys in other projects, too different from ours to be found by similarity."""
_LORA_VARIANTS = {
    "dora": "{type: lora, use_dora: true}",
    "rslora": "{type: lora, use_rslora: true}",
    "pissa": "{type: lora, init_lora_weights: pissa}",
    "olora": "{type: lora, init_lora_weights: olora}",
    "loftq": "{type: lora, init_lora_weights: loftq}",
    "qlora": "{type: lora}, and model_init_kwargs: {quantization_config: {load_in_4bit: true}}",
    "qdora": "{type: lora, use_dora: true}, and model_init_kwargs: {quantization_config: {load_in_4bit: true}}",
    "lora+": "{type: lora}",
    "adapter": "{type: bottleneck}",
    "prompt": "{type: prompt_tuning}",
    "prefix": "{type: prefix_tuning}",
    "ptuning": "{type: p_tuning}",
}
"""Names of methods that are options of another type of PEFT, and how they are written."""


@dataclass(frozen=True, slots=True)
class RunConfig:
    """What a file describes.

    Attributes:
        model: hub id or folder of the backbone.
        tokenizer: hub id or folder of the tokenizer; `None` for the model's own.
        args: the arguments of the run.
        tasks: the tasks, with their datasets loaded.
        model_init_kwargs: arguments of `from_pretrained` for the model.
        file: name of the file.
        lines: line of each key, by its dotted path.
        absent: where each path that does not exist would be, by its dotted key; it may be a hub id.
        record: a file in the run folder that describes the same, without defaults and secrets.
    """

    model: str
    tokenizer: str | None
    args: MultiTaskTrainingArguments
    tasks: list[Task]
    model_init_kwargs: dict[str, Any]
    file: str = ""
    lines: Mapping[str, int] = field(default_factory=dict)
    absent: Mapping[str, str] = field(default_factory=dict)
    record: dict[str, Any] = field(default_factory=dict)


def read_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    before_rows: Callable[[MultiTaskTrainingArguments], None] = lambda args: None,
    *,
    is_added: bool = False,
) -> RunConfig:
    """Return what a file describes.

    Args:
        path: path of the YAML file.
        overrides: texts such as `tasks.sql.learning_rate=1e-4`; each replaces or adds one value.
        before_rows: called with the arguments of the run, if they are without faults, before rows are loaded.
        is_added: whether its tasks are added to a run, whose model they have; then the file needs no model.

    Raises:
        ConfigError: naming every fault, with its line if it has one.
    """
    path = Path(path)
    data, lines, faults = read_mapping(path, _TOP_KEYS, f" peft-mux init {path} writes one.")
    # All other faults of such a file follow from these.
    raise_faults(located(_indentation_faults(data), path.name, lines))
    if is_added:
        data.setdefault("model", "that of the run")
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key:
            raise ConfigError(f"--set must be key=value, such as tasks.sql.learning_rate=1e-4, got {override!r}.")
        *parents, last = key.split(".")
        target = data
        for parent in parents:
            target = target.setdefault(parent, {})
            if not isinstance(target, dict):
                got = f"a value where {parent} would be a mapping"
                raise ConfigError(f"--set {key} must be an existing path, got {got}.")
        target[last] = parse_value(text, f"--set {key}")
    faults += _expand_secrets(data) + _structure_faults(data)
    output_dir = data.get("output_dir")
    data["output_dir"] = str(
        path.parent / (output_dir if output_dir and isinstance(output_dir, str) else "peft_mux_output")
    )
    absent = _resolve_paths(data, path.parent.absolute())
    # Objects are made as far as possible even now, so that one call reports all faults of a file.
    config, more = _make_run_config(data, before_rows)
    known = {fault.where for fault in faults}
    faults += [fault for fault in more if fault.where not in known]
    raise_faults(located(faults, path.name, lines, absent))
    assert config is not None, "a configuration without faults was made"
    return replace(config, file=path.name, lines=lines, absent=absent)


def _resolve_paths(section: dict[str, Any], folder: Path, prefix: str = "") -> dict[str, str]:
    """Make relative paths that exist absolute, in place; return what to say of each other one, by its dotted key."""
    absent = {}
    for key, value in section.items():
        if isinstance(value, dict):
            absent |= _resolve_paths(value, folder, f"{prefix}{key}.")
        elif key == "dataset" and isinstance(value, list):
            parts = {str(number): part for number, part in enumerate(value) if isinstance(part, dict)}
            absent |= _resolve_paths(parts, folder, f"{prefix}{key}.")
        elif (key in _PATHS or prefix.endswith(".eval_dataset.")) and isinstance(value, str) and value:
            path = str(folder / os.path.expanduser(value))
            if os.path.exists(path):
                section[key] = path
            else:
                absent[f"{prefix}{key}"] = f"There is no {path}: paths are relative to the folder of the file."
    return absent


def read_mapping(path: Path, keys: Iterable[str], fix: str = "") -> tuple[dict[str, Any], dict[str, int], list[Fault]]:
    """Return what a YAML file holds, the line of each of its keys by dotted path, and the faults of its keys.

    Raises:
        ConfigError: if it cannot be read, or holds no mapping.
    """
    try:
        text = read_regular(path).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} must be UTF-8 text: {error}. Save it as UTF-8.") from error
    except FileNotFoundError as error:
        raise ConfigError(f"file must be a YAML file, got {str(path)!r}, which does not exist.{fix}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
    data, lines, faults = _parsed(text, str(path))
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must be a mapping with the keys {', '.join(keys)}, got {type(data).__name__}.")
    return data, lines, faults


def located(
    faults: Iterable[Fault], file: str, lines: Mapping[str, int], absent: Mapping[str, str] = MappingProxyType({})
) -> list[Fault]:
    """Return faults with the file's own names of sections, the line of each in the file, and paths that are absent."""
    located = []
    for fault in faults:
        name = fault.where.replace("args.", "run.", 1) if fault.where.startswith("args.") else fault.where
        name = "tokenizer" if name == "processing_class" else name.replace(".peft_config", ".peft", 1)
        # The fault of a task may come from the defaults; a missing field is always one of the section that lacks it.
        where, inherited = name, re.sub(r"^tasks\.[^.]+\.", "defaults.", name)
        if where not in lines and inherited in lines:
            where = inherited
        while where not in lines and "." in where:
            where = where.rsplit(".", 1)[0]
        line = f":{lines[where]}" if where in lines else ""
        fix = absent.get(name) or absent.get(inherited) or fault.fix
        located.append(replace(fault, where=f"{file}{line} {name}", fix=fix))
    return located


# ----------------------------------------------------------------------------------------------------------------- YAML


class _Loader(yaml.SafeLoader):
    """Loads YAML safely, and reads `1e-4` as a number (YAML 1.1 requires `1.0e-4`)."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+"), list("-+0123456789")
)


def parse_value(text: str, where: str) -> Any:
    """Return the value that a YAML text stands for, such as that of `--set`.

    Args:
        text: the text that is parsed.
        where: name of the value in messages.

    Raises:
        ConfigError: if it is no YAML.
    """
    return _parsed(text, where)[0]


def _parsed(text: str, where: str) -> tuple[Any, dict[str, int], list[Fault]]:
    """Parse a text; return its value, the line of each key by its dotted path, and the faults of keys."""
    lines: dict[str, int] = {}
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        # A few lines with aliases can stand for more values than could ever be visited, or contain themselves.
        waiting, num_nodes = [node], 0
        while waiting:
            num_nodes += 1
            if num_nodes > _MAX_NODES:
                raise ConfigError(
                    f"{where} must have at most {_MAX_NODES:,} values once aliases (*name) are written out, and none "
                    "within itself. Put what tasks share into the section defaults."
                )
            child = waiting.pop()
            if isinstance(child, yaml.MappingNode):
                waiting += chain.from_iterable(child.value)
            elif isinstance(child, yaml.SequenceNode):
                waiting += child.value
        # Before values are made, which writes merged keys (`<<`) into the nodes.
        faults = _record_lines(node, "", lines) if isinstance(node, yaml.MappingNode) else []
        return None if node is None else loader.construct_document(node), lines, faults
    except ConfigError:
        raise
    except yaml.YAMLError as error:
        # On one line; the message of PyYAML takes six.
        mark, began = getattr(error, "problem_mark", None), getattr(error, "context_mark", None)
        if mark is None:
            raise ConfigError(f"{where}: is not YAML: {' '.join(str(error).split())}") from error
        context, problem = getattr(error, "context", None), getattr(error, "problem", None) or "it cannot be read"
        since = f", {context} that begins on line {began.line + 1}" if began is not None and context else ""
        said = f"column {mark.column + 1}: {problem}{since}"
        raise ConfigError(f"{where}:{mark.line + 1}: is not YAML: {said}.") from error
    except RecursionError as error:
        raise ConfigError(f"{where} has sections that are nested too deeply. Use fewer levels.") from error
    # PyYAML raises these for values such as the date 2024-13-01, or a number of 5,000 digits.
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise ConfigError(f"{where}: is not YAML: a value cannot be read: {error}. Write it in quotes.") from error


def _record_lines(node: yaml.MappingNode, prefix: str, lines: dict[str, int]) -> list[Fault]:
    """Record the line of each key; return faults of keys: duplicates, and keys that are not strings (`yes` is true)."""
    faults: list[Fault] = []
    for key, value in node.value:
        where = f"{prefix}{key.value}"
        if where in lines:
            faults.append(Fault(where, "the same key twice", "written once"))
            # The keys in the second section are not duplicates.
            for inner in [line for line in lines if line.startswith(f"{where}.")]:
                del lines[inner]
        lines[where] = key.start_mark.line + 1
        kind = key.tag.rsplit(":", 1)[-1]
        if kind not in ("str", "merge") and not where.startswith(_FREE_SECTIONS):
            meanings = {"bool": "true or false", "null": "nothing", "int": "a number", "float": "a number"}
            got = f"a key that YAML reads as {meanings.get(kind, f'a {kind}')}"
            fix = f'Write it in quotes: "{key.value}".' if isinstance(key, yaml.ScalarNode) else ""
            faults.append(Fault(where, got, "a name", fix))
        if isinstance(value, yaml.MappingNode):
            faults += _record_lines(value, f"{where}.", lines)
    return faults


def _expand_secrets(section: Any, prefix: str = "") -> list[Fault]:
    """Replace environment variables in fields that hold secrets, in place; return their faults, and all other uses."""
    faults = []
    for key, value in list(section.items() if isinstance(section, dict) else enumerate(section)):
        where = f"{prefix}{key}"
        if isinstance(value, (dict, list)):
            faults += _expand_secrets(value, f"{where}.")
        elif not isinstance(value, str):
            continue
        elif where in SECRETS:
            # No message shows the text: it may be the secret itself.
            names = re.findall(r"\$\{(.*?)\}", value)
            section[key] = re.sub(r"\$\{(.*?)\}", lambda match: os.environ.get(match[1], ""), value)
            if re.fullmatch(r"\$\w+", value):
                fix = "Write ${NAME} for the variable NAME."
                faults.append(Fault(where, "a variable without braces", "a token or a variable in braces", fix))
            elif missing := [f"${{{name}}}" for name in names if not os.environ.get(name)]:
                got = f"{', '.join(missing)}, an environment variable that is not set"
                fix = "Set it in the shell that starts the run, or leave the field out to use this machine's login."
                faults.append(Fault(where, got, "made of variables that are set", fix))
        # Chat templates use such braces themselves.
        elif key != "chat_template" and re.search(r"\$\{\w+\}", value):
            allowed = f"the value itself (variables may be in {' and '.join(SECRETS)} only)"
            faults.append(Fault(where, shown(value), allowed, "Write the value, or give it with --set."))
    return faults


# -------------------------------------------------------------------------------------------------------- the sections


def as_mapping(value: Any) -> dict[str, Any]:
    """Return a section of a file; an empty one for a value of another type."""
    return value if isinstance(value, dict) else {}


def _key_faults(
    section: Mapping[str, Any], allowed: Iterable[str], prefix: str, hint: Callable[[str], str] | None = None
) -> list[Fault]:
    """Return a fault for each unknown key of a section, with the key that was meant.

    Args:
        section: the section as it was read.
        allowed: its keys.
        prefix: its dotted path, with a dot at its end.
        hint: returns what to do about a key if more is known than the closest name, else "".
    """
    allowed, faults = sorted(allowed), []
    for key in [str(key) for key in section if key not in allowed]:
        meant = [name for names in (_SHORT_NAMES, RENAMED, ADAPTER_NAMES) if (name := names.get(key)) in allowed]
        fix = f'Did you mean "{meant[0]}"?' if meant else (hint and hint(key)) or closest(key, allowed)
        choices = "a key of this section" if fix else f"one of {', '.join(allowed)}"
        faults.append(Fault(f"{prefix}{key}", "an unknown key", choices, fix))
    return faults


def _hint_of_run(key: str) -> str:
    """Return why an argument of Trainer is refused in `run`, or where another key belongs."""
    if key == "output_dir":
        return "It belongs at the top of the file."
    if key in TrainingArguments.__dataclass_fields__:
        return f"Reason: {reason_against(key)}."
    return "Set it on each task, or under defaults." if key in TASK_KEYS else belongs(key)


def _hint_of_task(key: str) -> str:
    if key in ADAPTER_NAMES:
        return f"It is a setting of the adapter: set {ADAPTER_NAMES[key]} under peft."
    return "It is a setting of the run: set it under run." if key in SETTABLE_FIELDS else belongs(key, on_task=True)


def _indentation_faults(data: Mapping[str, Any]) -> list[Fault]:
    """Return a fault for each section or task that is empty because the keys after it are not indented."""
    faults = []
    for prefix, section in (("", data), ("tasks.", as_mapping(data.get("tasks")))):
        empty, strays = "", {}
        for key, value in section.items():
            if (key in TASK_KEYS) if prefix else (key not in _TOP_KEYS):
                strays.setdefault(empty, []).append(str(key))
            else:
                empty = str(key) if value is None else ""
        for key, names in strays.items():
            if key:  # an empty section or task comes before these names
                got = f"nothing, followed by {', '.join(names)} without more indentation"
                fix = "Indent these keys by two more spaces."
                faults.append(Fault(f"{prefix}{key}", got, "a mapping with indented keys", fix))
    return faults


def _structure_faults(data: dict[str, Any]) -> list[Fault]:
    """Return what is wrong with the keys of all sections, and with values that no object checks."""
    faults = _key_faults(data, _TOP_KEYS, "")
    for key in ("model", "tasks"):
        if not data.get(key):
            faults.append(Fault(key, shown(data.get(key)), "set, because every file needs it"))
    faults += rule_faults(data, _RULES)
    defaults, tasks = as_mapping(data.get("defaults")), as_mapping(data.get("tasks"))
    faults += _key_faults(as_mapping(data.get("run")), SETTABLE_FIELDS - {"output_dir"}, "run.", _hint_of_run)
    faults += _key_faults(defaults, TASK_KEYS, "defaults.", _hint_of_task)
    for name, task in tasks.items():
        where = f"tasks.{name}"
        if not isinstance(task, dict):
            faults.append(Fault(where, shown(task), "a mapping"))
            continue
        faults += _key_faults(task, TASK_KEYS, f"{where}.", _hint_of_task)
        # With the defaults, as they may hold what a task leaves out.
        settings = _with_defaults(defaults, task)
        faults += rule_faults(settings, _TASK_RULES, f"{where}.") + _data_faults(settings, where)
        if settings.get("dataset") in (None, ""):
            # A misspelt name in --set makes a task of one setting.
            meant = closest(str(name), [str(other) for other in tasks if other != name]) if len(task) == 1 else ""
            faults.append(Fault(f"{where}.dataset", shown(settings.get("dataset")), SOURCES, meant))
    return faults + rule_faults(defaults, _TASK_RULES, "defaults.")


def _with_defaults(defaults: Mapping[str, Any], task: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a task with the defaults; its own held-out rows replace the default ones."""
    given = {key for key in ("eval_dataset", "eval_split", "val_size") if task.get(key) is not None}
    replaced = {"val_size"} if given else set()
    if "val_size" in given:
        replaced = {"eval_dataset", "eval_split"}
    return {**{key: value for key, value in defaults.items() if key not in replaced}, **task}


def _data_faults(settings: Mapping[str, Any], where: str) -> list[Fault]:
    """Return what is wrong with `val_size`, and with a list of data sets."""
    faults, size, parts = [], settings.get("val_size"), settings.get("dataset")
    if size is not None and not (is_integer(size, 1) or (isinstance(size, float) and 0 < size < 1)):
        allowed = "a number of rows of at least 1, or a fraction above 0 and below 1"
        faults.append(Fault(f"{where}.val_size", shown(size), allowed))
    for key in ("eval_dataset", "eval_split"):
        if size is not None and settings.get(key) is not None:
            faults.append(
                Fault(f"{where}.val_size", f"{shown(size)} with {key}", "None with held-out rows of their own")
            )
    if not isinstance(parts, list):
        return faults
    if not parts or not all(isinstance(part, dict) and isinstance(part.get("path"), str) for part in parts):
        allowed = f"{SOURCES}, or a list of {{path: ..., weight: ...}}"
        return [*faults, Fault(f"{where}.dataset", shown(parts), allowed)]
    for number, part in enumerate(parts):
        faults += _key_faults(part, _PART_KEYS, f"{where}.dataset.{number}.")
        weight = part.get("weight", 1)
        if not is_real(weight) or weight <= 0:
            faults.append(Fault(f"{where}.dataset.{number}.weight", shown(weight), "a finite number above 0"))
    if len({"weight" in part for part in parts}) > 1:
        faults.append(Fault(f"{where}.dataset", "weights for some", "data sets that all have a weight, or none has"))
    return faults


def _of_type(kinds: type | tuple[type, ...], allowed: str) -> Rule:
    """Return the rule of a value that has one of some types, or is left out."""
    return Rule(lambda value: value is None or isinstance(value, kinds), allowed)


_RULES = by_name(
    {
        "model tokenizer output_dir": _of_type(str, "a string"),
        "model_init_kwargs run defaults tasks": _of_type(dict, "a mapping"),
    }
)
_TASK_RULES = by_name(
    {
        "dataset": _of_type((str, list), SOURCES),
        "eval_dataset": _of_type((str, dict), f"{SOURCES}, or several by name"),
        "dataset_config split eval_split": _of_type(str, "a name"),
        "peft early_stopping": _of_type(dict, "a mapping"),
    }
)
"""Rules of the values that are not passed on to an object, which would check them."""


# --------------------------------------------------------------------------------------------------------- the objects


def _attempt(where: str, make: Callable[..., Any], *arguments: Any) -> tuple[Any, list[Fault]]:
    """Call a function; return its result, or `None` and the faults that it raises."""
    try:
        return make(*arguments), []
    except ConfigError as error:
        return None, list(error.faults) or [Fault(where, "a fault", str(error))]


def _make_run_config(
    data: dict[str, Any], before_rows: Callable[[MultiTaskTrainingArguments], None]
) -> tuple[RunConfig | None, list[Fault]]:
    """Return what a file describes, or what is wrong with the objects that it stands for."""
    given = {key: value for key, value in as_mapping(data.get("run")).items() if key in SETTABLE_FIELDS}
    given["output_dir"] = data["output_dir"]
    args, faults = _attempt("run", lambda: MultiTaskTrainingArguments(**given))
    if args is not None:
        before_rows(args)
    defaults = as_mapping(data.get("defaults"))
    default_peft = as_mapping(defaults.get("peft"))
    sections = {name: section for name, section in as_mapping(data.get("tasks")).items() if isinstance(section, dict)}
    has_held_out = {
        name: any({**defaults, **section}.get(key) is not None for key in ("eval_dataset", "eval_split", "val_size"))
        for name, section in sections.items()
    }
    tasks: list[Task] = []
    record: dict[str, Any] = {
        key: {name: value for name, value in as_mapping(data.get(key)).items() if f"{key}.{name}" not in SECRETS}
        for key in ("run", "model_init_kwargs")
    }
    record |= {"model": data.get("model"), "tokenizer": data.get("tokenizer"), "output_dir": ".", "tasks": {}}
    for name, settings in sections.items():
        # A task of another type than the defaults has none of their options.
        peft = {**default_peft, **as_mapping(settings.get("peft"))}
        if str(peft.get("type", "lora")).lower() != str(default_peft.get("type", "lora")).lower():
            peft = as_mapping(settings.get("peft"))
        merged = {**_with_defaults(defaults, settings), "peft": peft}
        if any(has_held_out.values()) and not has_held_out[name]:
            # As with the arguments of a run: defaults about evaluations do not apply to tasks without held-out rows.
            merged = {key: value for key, value in merged.items() if key in settings or key not in _WHEN_EVALUATED}
        record["tasks"][str(name)] = merged
        seed: Any = merged.get("seed", given.get("seed"))
        task, more = _make_task(str(name), merged, seed if is_integer(seed, 0, 2**32 - 1) else 42)
        faults += more
        if task is not None:
            tasks.append(task)
    if faults or args is None or not isinstance(data.get("model"), str) or not tasks:
        return None, faults
    options = as_mapping(data.get("model_init_kwargs"))
    return RunConfig(data["model"], data.get("tokenizer"), args, tasks, options, record=record), []


def _make_task(name: str, settings: Mapping[str, Any], seed: int) -> tuple[Task | None, list[Fault]]:
    """Return a task with its rows loaded, or all that is wrong with it.

    Args:
        name: name of the task.
        settings: its section of the file, completed with the defaults.
        seed: decides which rows are held out, and the order in which data sets are mixed.
    """
    where = f"tasks.{name}"
    fields = {key: value for key, value in settings.items() if key in TASK_KEYS and key not in (*DATA_KEYS, "peft")}
    loaded, faults = _load_rows(settings, seed, where)
    fields |= loaded
    without_rows = [which for which in ("train_dataset", "eval_dataset") if fields.get(which, _NO_ROWS) is None]
    fields |= dict.fromkeys(without_rows, _NO_ROWS)
    if settings.get("peft") or fields.get("init_adapter") is None:
        fields["peft_config"], more = _attempt(
            where, _make_peft_config, as_mapping(settings.get("peft")), f"{where}.peft"
        )
        faults += more
    for key, kind in (("early_stopping", EarlyStopping), ("eval_generate", GenerateOptions)):
        if isinstance(fields.get(key), dict):
            fields[key], more = _attempt(where, _make_section, kind, fields[key], where, key)
            faults += more
    task, more = _attempt(where, lambda: Task(name=name, **fields))
    for fault in more:
        # Faults that only come from a stand-in for an invalid value are not the user's.
        is_of_rows = without_rows and fault.where.endswith(_OF_ROWS)
        if not is_of_rows and not (fields.get("peft_config", "") is None and "peft_config" in fault.where):
            faults.append(fault)
    return (None, faults) if faults else (task, [])


def _load_rows(settings: Mapping[str, Any], seed: int, where: str) -> tuple[dict[str, Any], list[Fault]]:
    """Return the rows of a task by the field of `Task`, with `None` for those that cannot be loaded, and why not."""
    from datasets import concatenate_datasets, interleave_datasets

    loaded: dict[str, Any] = {}
    parts, faults = _attempt(where, _parts, settings, "dataset", None, where)
    held_out, split, size = (settings.get(key) for key in ("eval_dataset", "eval_split", "val_size"))
    if isinstance(held_out, dict):
        loaded["eval_dataset"] = held_out
    elif held_out is not None or split is not None:
        key = "dataset" if held_out is None else "eval_dataset"
        kept, more = _attempt(where, _parts, settings, key, split, where)
        loaded["eval_dataset"] = concatenate_datasets(kept) if kept else None
        faults += more
    elif size is not None and parts:
        options = {"test_size": size, "seed": seed, "shuffle": settings.get("shuffle") is not False}
        try:
            # Before data sets are mixed, which may repeat rows.
            splits = [part.train_test_split(**options) for part in parts]
            parts, kept = ([split[name] for split in splits] for name in ("train", "test"))
            loaded["eval_dataset"] = concatenate_datasets(kept)
        except (ValueError, TypeError):
            loaded["eval_dataset"] = None
            got = f"{size} with data sets of {', '.join(str(len(part)) for part in parts)} rows"
            faults.append(Fault(f"{where}.val_size", got, "a part of the rows of each data set"))
    given = settings.get("dataset")
    weights: list[Any] = [as_mapping(part).get("weight") for part in given] if isinstance(given, list) else []
    if parts and weights and all(is_real(weight) and weight > 0 for weight in weights):
        shares = [weight / sum(weights) for weight in weights]
        loaded["train_dataset"] = interleave_datasets(
            parts, probabilities=shares, seed=seed, stopping_strategy="all_exhausted"
        )
    else:
        loaded["train_dataset"] = concatenate_datasets(parts) if parts else None
    return loaded, faults


def _parts(settings: Mapping[str, Any], key: str, split: Any, where: str) -> list[Any] | None:
    """Return the data sets of a task; `None` for values of wrong types, which `_structure_faults` names.

    Raises:
        ConfigError: for rows that cannot be loaded, or data sets with different columns.
    """
    given, parts = settings.get(key), []
    for number, part in enumerate(given if isinstance(given, list) else [{"path": given}]):
        options = {"split": settings.get("split") if key == "dataset" else None, **as_mapping(part)}
        options = {"dataset_config": settings.get("dataset_config"), **options, **({"split": split} if split else {})}
        source, name, config = (options.get(option) for option in ("path", "split", "dataset_config"))
        if not source or not all(text is None or isinstance(text, str) for text in (source, name, config)):
            return None
        field = f"{key}.{number}.path" if isinstance(given, list) else key
        parts.append(rows_of(source, name or "train", config, where, field))
    columns = [sorted(part.column_names) for part in parts]
    if any(names != columns[0] for names in columns):
        got = " and ".join(", ".join(names) for names in columns)
        raise_faults([Fault(f"{where}.{key}", f"columns {got}", "data sets with the same columns")])
    return parts


def _make_section(kind: type, given: dict[str, Any], where: str, key: str) -> Any:
    """Return the object that a nested section of a task stands for.

    Raises:
        ConfigError: naming its unknown keys together with its wrong values.
    """
    names = [item.name for item in fields(kind)]
    faults = _key_faults(given, names, f"{where}.{key}.")
    made, more = _attempt(key, lambda: kind(**{name: value for name, value in given.items() if name in names}))
    for fault in more:
        place = fault.where if fault.where.startswith(f"{key}.") else f"{key}.{fault.where}"
        faults.append(replace(fault, where=f"{where}.{place}"))
    raise_faults(faults)
    return made


def _make_peft_config(settings: Mapping[str, Any], where: str) -> Any:
    """Return the configuration of an adapter from its type, `lora` by default, and its options.

    Raises:
        ConfigError: naming an unknown type, and options that the type does not have.
    """
    options = dict(settings)
    kind = str(options.pop("type", "lora"))
    known = {str(item.value): item for item in PeftType}
    if kind.upper() not in known:
        variant = _LORA_VARIANTS.get(kind.lower().replace("_", "").replace("-", ""))
        fix = f"Write peft: {variant}." if variant else closest(kind.lower(), [name.lower() for name in known])
        raise_faults([Fault(f"{where}.type", repr(kind), "a type of docs/peft_types.md, such as lora", fix)])
    config_class = PEFT_TYPE_TO_CONFIG_MAPPING[known[kind.upper()]]
    names = [item.name for item in fields(config_class) if item.init and item.name != "peft_type"]
    raise_faults(_key_faults(options, [*names, "type"], f"{where}."))
    try:
        return config_class(**options)
    except Exception as error:  # PEFT checks little, so its code may raise anything
        fix = f"PEFT: {' '.join(str(error).split()).rstrip('.')}."
        raise_faults([Fault(where, shown(dict(settings)), "settings that PEFT accepts", fix)])


# -------------------------------------------------------------------------------------- a file that describes a cluster

_DEVICE_NAMES = {name.lower() for name in DEVICES}
_CLUSTER_RULES = by_name(
    {
        "device": Rule(lambda value: str(value).lower() in _DEVICE_NAMES, f"one of {', '.join(DEVICES)}"),
        "nodes devices_per_node ports_per_node": Rule(lambda value: is_integer(value, 1), "an integer of 1 or more"),
        "intra_node_gb_per_s inter_node_gb_per_s": Rule(lambda value: is_real(value) and value > 0, "a number above 0"),
        "intra_node_latency_us inter_node_latency_us": Rule(
            lambda value: is_real(value) and value >= 0, "a number of 0 or more"
        ),
    }
)
"""Rules of the keys of a file that describes a cluster; only the device and the counts of nodes and devices are
required."""


def read_cluster(path: str | Path) -> Cluster:
    """Return the cluster that a YAML file describes; links that it does not name are those of the data sheets.

    Args:
        path: path of the file, such as::

            device: H100-80GB
            nodes: 8
            devices_per_node: 8
            ports_per_node: 8             # network ports; by default one of each device
            intra_node_gb_per_s: 380      # NVLink or PCIe, in one direction
            inter_node_gb_per_s: 25       # one port, in one direction
            inter_node_latency_us: 15

    Raises:
        ConfigError: naming every fault, with its line if it has one.
    """
    path = Path(path)
    data, lines, faults = read_mapping(path, _CLUSTER_RULES)
    faults += _key_faults(data, _CLUSTER_RULES, "")
    for key, rule in _CLUSTER_RULES.items():
        value = data.get(key)
        if value is None and key in ("device", "nodes", "devices_per_node"):
            faults.append(Fault(key, "nothing", rule.allowed))
        elif value is not None and not rule.is_valid(value):
            faults.append(Fault(key, shown(value), rule.allowed, closest(value, DEVICES) if key == "device" else ""))
    raise_faults(located(faults, path.name, lines))
    cluster = parse_devices(f"{data['nodes']}x{data['devices_per_node']}x{data['device']}")

    def link(name: str, default: Link) -> Link:
        latency_us, gb_per_s = data.get(f"{name}_latency_us"), data.get(f"{name}_gb_per_s")
        return Link(
            default.latency_s if latency_us is None else latency_us * 1e-6,
            default.bytes_per_s if gb_per_s is None else gb_per_s * 1e9,
        )

    return replace(
        cluster,
        intra_node=link("intra_node", cluster.intra_node),
        inter_node=link("inter_node", cluster.inter_node),
        ports_per_node=data.get("ports_per_node"),
    )


# --------------------------------------------------------------------------------------------------------- for editors


def print_schema(arguments: argparse.Namespace) -> int:
    """Print the JSON schema of `tasks.yaml`, with which editors complete and check it; return the exit status."""
    del arguments
    print(json.dumps(schema(), indent=1))
    return 0


def schema() -> dict[str, Any]:
    """Return the JSON schema of `tasks.yaml`."""
    run = {
        name: {
            **_kind(FIELD_TYPES[name]),
            **({"description": item.metadata["help"]} if "help" in item.metadata else {}),
        }
        for name, item in sorted(MultiTaskTrainingArguments.__dataclass_fields__.items())
        if name in SETTABLE_FIELDS and name != "output_dir"
    }
    fields = Task.__dataclass_fields__
    task: dict[str, Any] = {key: _kind(fields[key].type) for key in sorted(TASK_KEYS) if key in fields}
    task |= {key: {"type": "string"} for key in DATA_KEYS}
    task |= {"dataset": {"type": ["string", "array"]}, "val_size": {"type": "number"}}
    task["peft"] = {"type": "object", "description": "type (lora by default) and options of the adapter"}
    section = {"type": "object", "properties": task, "additionalProperties": False}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "tasks.yaml of peft-mux",
        "type": "object",
        "required": ["model", "tasks"],
        "additionalProperties": False,
        "properties": {
            "model": {"type": "string", "description": "hub id or folder of the backbone"},
            "tokenizer": {"type": "string"},
            "output_dir": {"type": "string"},
            "model_init_kwargs": {"type": "object"},
            "run": {"type": "object", "properties": run, "additionalProperties": False},
            "defaults": section,
            "tasks": {"type": "object", "minProperties": 1, "additionalProperties": section},
        },
    }


def _kind(annotation: object) -> dict[str, Any]:
    """Return what JSON may hold for a field with an annotation; anything if it has a type that is not plain."""
    kinds = {"int": "integer", "float": "number", "bool": "boolean", "str": "string", "None": "null"}
    types = plain_types(annotation)
    if not types or not set(types) <= kinds.keys():
        return {}
    # YAML has null for settings that come from elsewhere.
    return {"type": list(dict.fromkeys([*(kinds[name] for name in types), "null"]))}
