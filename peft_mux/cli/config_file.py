"""YAML as people write it, from files that nobody has vouched for: bounded before anything is made of it.

PyYAML makes its objects by recursion and shares what aliases repeat, so a file of a few lines can stand for more than
any walk through it comes to an end with (`a: &a [x, x]`, `b: &b [*a, *a]`, ...), contain itself, or be nested beyond
the stack. The stream of its events shows all three before a single object is made.
"""

# MERGED: `${HF_TOKEN}` in `tasks.yaml`: variables of the environment, in the fields that hold secrets and in no others.
# MERGED: A file is shared and kept under version control, a token is not. Elsewhere a variable would make a file that
# MERGED: trains
# MERGED: something else on another machine.
# MERGED: The sections of `tasks.yaml` as the objects that they stand for, with every fault that each of them has.
# MERGED: `tasks.yaml`: the same words as in Python, turned into arguments and tasks; all faults at once, with line
# MERGED: numbers.
# MERGED:     model: Qwen/Qwen3-0.6B
# MERGED:     output_dir: runs/support
# MERGED:     run: {bf16: true, logging_steps: 10}                  # MultiTaskTrainingArguments
# MERGED:     defaults: {learning_rate: 2.0e-4, peft: {type: lora, r: 16, target_modules: all-linear}}
# MERGED:     tasks:
# MERGED:       sql:  {dataset: data/sql.jsonl, num_train_epochs: 3}
# MERGED:       math: {dataset: org/math, eval_split: test, peft: {r: 64}, early_stopping: {patience: 3}}
# MERGED: Paths are relative to the file. `dataset` is a .jsonl, .json, .csv or .parquet file, a folder, or a hub id.
# MERGED: Where a
# MERGED: secret stands (`secret_values.SECRETS`), `${HF_TOKEN}` is a variable of the environment.

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import yaml

from peft_mux.arguments import REASONS, SETTABLE_FIELDS, MultiTaskTrainingArguments
from peft_mux.data.sources import SOURCES, rows_of
from peft_mux.errors import ConfigError, Fault, closest, raise_faults, shown
from peft_mux.hyper_parameters import EarlyStopping
from peft_mux.modeling.generation.options import GenerateOptions
from peft_mux.moved_names import OF_THE_ADAPTER, belongs
from peft_mux.task import TASK_FIELDS, Task

MAX_BYTES, MAX_NODES, MAX_DEPTH = 2**23, 200_000, 50
"""Of a file; of what it stands for once aliases are written out; of sections within sections."""

_FREE_KEYS = ("model_init_kwargs",)
"""Sections that are handed on, in which numbers may be keys (`max_memory: {0: 10GiB}`)."""


class _Loader(yaml.SafeLoader):
    """YAML as people write it: `1e-4` is a number (YAML 1.1 wants `1.0e-4`)."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9][0-9_]*(?:\.[0-9_]*)?[eE][-+]?[0-9]+"), list("-+0123456789")
)


def read_yaml(path: Path) -> tuple[Any, dict[str, int], list[Fault]]:
    """Return what a file holds.

    Args:
        path: path of the file.

    Returns:
        What the file holds; the line of each key, by its dotted path; and what is wrong with keys.

    Raises:
        ConfigError: if the file cannot be read, is no YAML, or is too large.
    """
    text = _text_of(path)
    node, data = _parsed(text, str(path))
    lines: dict[str, int] = {}
    faults: list[Fault] = []
    _look_at_keys(node, "", lines, faults)
    return data, lines, faults


def parse_value(text: str, where: str) -> Any:
    """Return what a text stands for, such as the value of `--set`.

    Args:
        text: the text that is parsed.
        where: what it is the value of, for messages.

    Raises:
        ConfigError: if it is no YAML, or too large.
    """
    return _parsed(text, where)[1]


def _text_of(path: Path) -> str:
    try:
        kind = path.stat()
        # Others, such as a pipe, may never come to an end.
        if not stat.S_ISREG(kind.st_mode):
            raise ConfigError(f"{path}: cannot be read: it is no regular file; allowed: a YAML file.")
        if kind.st_size > MAX_BYTES:
            raise ConfigError(f"{path}: got {kind.st_size} bytes; allowed: at most {MAX_BYTES}.")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: cannot be read: {error}; allowed: UTF-8. Save it as UTF-8.") from error
    except FileNotFoundError as error:
        raise ConfigError(
            f"file: got {str(path)!r}, which is not there; allowed: a YAML file. peft-mux init {path} writes one."
        ) from error
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: cannot be read: {error}") from error


def _parsed(text: str, where: str) -> tuple[Any, Any]:
    """Return the nodes of a text, which know their lines, and the object that it stands for."""
    try:
        _require_bounded(text, where)
        return yaml.compose(text, Loader=_Loader), yaml.load(text, Loader=_Loader)
    except ConfigError:
        raise
    except yaml.YAMLError as error:
        raise ConfigError(f"{where}{_yaml_words(error)}") from error
    # What PyYAML raises of values such as the date 2024-13-01, or a number of 5,000 digits.
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError) as error:
        raise ConfigError(f"{where}: is not YAML: a value cannot be read: {error}. Write it in quotes.") from error


def _yaml_words(error: yaml.YAMLError) -> str:
    """Return line, column and fault in one line; PyYAML draws them over six."""
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return f": is not YAML: {' '.join(str(error).split())}"
    began, context = getattr(error, "context_mark", None), getattr(error, "context", None) or ""
    since = f", {context} that begins in line {began.line + 1}" if began is not None and context else ""
    problem = getattr(error, "problem", None) or "it cannot be read"
    return f":{mark.line + 1}: is not YAML: column {mark.column + 1}: {problem}{since}."


def _require_bounded(text: str, where: str) -> None:
    """Refuse a text that stands for too much, is nested too deeply, or contains itself."""
    sizes: dict[str, tuple[int, int]] = {}  # nodes and depth of what each anchor stands for
    open_ones: list[_Open] = []
    for event in yaml.parse(text, Loader=_Loader):
        line = event.start_mark.line + 1
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in sizes and any(one.anchor == event.anchor for one in open_ones):
                raise ConfigError(
                    f"{where}: line {line}: got *{event.anchor} within itself; allowed: sections that end."
                )
            nodes, depth = sizes.get(event.anchor, (1, 0))
        elif isinstance(event, (yaml.MappingStartEvent, yaml.SequenceStartEvent)):
            open_ones.append(_Open(event.anchor))
            nodes, depth = 0, 0
        elif isinstance(event, (yaml.MappingEndEvent, yaml.SequenceEndEvent)):
            ended = open_ones.pop()
            nodes, depth = ended.nodes, ended.depth + 1
            sizes |= {ended.anchor: (nodes, depth)} if ended.anchor else {}
        elif isinstance(event, yaml.ScalarEvent):
            nodes, depth = 1, 0
            sizes |= {event.anchor: (1, 0)} if event.anchor else {}
        else:
            continue
        if open_ones:
            open_ones[-1].nodes += nodes
            open_ones[-1].depth = max(open_ones[-1].depth, depth)
        if len(open_ones) + depth > MAX_DEPTH:
            raise ConfigError(f"{where}: line {line}: got sections in more than {MAX_DEPTH} others; allowed: fewer.")
        if sum(one.nodes for one in open_ones) > MAX_NODES:
            raise ConfigError(
                f"{where}: line {line}: got more than {MAX_NODES} values once aliases (*name) are written out; "
                "allowed: fewer. Put what tasks share into the section defaults."
            )


class _Open:
    """A section that has not ended yet: what it is called, and the values and depth that it has so far."""

    def __init__(self, anchor: str | None) -> None:
        """Start with the section itself."""
        self.anchor, self.nodes, self.depth = anchor, 1, 0


def _look_at_keys(node: Any, prefix: str, lines: dict[str, int], faults: list[Fault]) -> None:
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        where = f"{prefix}{key.value}"
        is_second = where in lines
        lines[where] = key.start_mark.line + 1
        if is_second:
            faults.append(Fault(where, "the same key twice", "each key once"))
            # What stands in it is not what is meant to be there twice.
            for own in [line for line in lines if line.startswith(f"{where}.")]:
                del lines[own]
        faults += _key_faults(key, where) if not where.startswith(_FREE_KEYS) else ()
        _look_at_keys(value, f"{where}.", lines, faults)


def _key_faults(key: Any, where: str) -> Iterator[Fault]:
    """Yield a fault for a key that YAML reads as something else than its text: `yes` is true, and `null` is nothing."""
    kind = key.tag.rsplit(":", 1)[-1]
    if kind in ("str", "merge"):
        return
    meant = {"bool": "true or false", "null": "nothing", "int": "a number", "float": "a number"}.get(kind, f"a {kind}")
    fix = f'Write it in quotes: "{key.value}".' if isinstance(key, yaml.ScalarNode) else ""
    yield Fault(where, f"a key that YAML reads as {meant}", "a name", fix)


SECRETS = ("run.hub_token", "model_init_kwargs.token")
"""The fields that hold secrets; neither is written into a run folder."""

_VARIABLE = re.compile(r"\$\{(.*?)\}")
_BARE = re.compile(r"\$(\w+)")
_TEMPLATES = (".chat_template",)
"""Fields whose text has a language of its own."""


def expand_secrets(data: dict[str, Any]) -> list[Fault]:
    """Put variables of the environment into the fields that hold secrets, in place; return what is wrong with others.

    Args:
        data: what a file holds.
    """
    faults: list[Fault] = []
    for path in SECRETS:
        section, key = path.split(".")
        own = data.get(section)
        if isinstance(own, dict) and isinstance(own.get(key), str):
            own[key], more = _expanded(own[key], path)
            faults += more
    allowed = f"the value itself; variables stand in {' and '.join(SECRETS)} alone"
    for where, text in _texts(data, ""):
        if where not in SECRETS and not where.endswith(_TEMPLATES) and re.search(r"\$\{\w+\}", text):
            faults.append(Fault(where, shown(text), allowed, "Write the value, or give it with --set."))
    return faults


def _expanded(text: str, where: str) -> tuple[str | None, list[Fault]]:
    """Return a secret with its variables in it, `None` where one of them is not there."""
    names = _VARIABLE.findall(text)
    if bare := _BARE.fullmatch(text):
        return None, [Fault(where, shown(text), "a token, or a variable in braces", f"Write ${{{bare[1]}}}.")]
    fix = "Set it where the run is started, or leave the field out: then the log-in of the machine counts."
    missing = [name for name in names if not os.environ.get(name)]
    if missing:
        got = f"${{{missing[0]}}}, a variable of the environment that is not set"
        return None, [Fault(where, got, "variables that are set", fix)]
    return _VARIABLE.sub(lambda found: os.environ[found[1]], text), []


def _texts(value: Any, where: str) -> Iterator[tuple[str, str]]:
    """Yield each text of a file with its dotted path."""
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, dict):
        for key, own in value.items():
            yield from _texts(own, f"{where}.{key}" if where else str(key))
    elif isinstance(value, list):
        for own in value:
            yield from _texts(own, where)


DATA_KEYS = ("dataset", "dataset_config", "split", "eval_dataset", "eval_split")
_NOT_IN_FILES = ("name", "peft_config", "train_dataset", "eval_dataset", "callbacks", "compute_metrics")
TASK_KEYS = (
    *DATA_KEYS,
    "peft",
    *(name for name in TASK_FIELDS if name not in (*_NOT_IN_FILES, "preprocess_logits_for_metrics")),
)
"""What may be said of a task in a file."""
_NO_ROWS = [{"input_ids": [0, 0]}]
"""Stands for rows that could not be loaded, so that the other faults of a task are told with that one."""
_OF_ROWS = ("loss_type", "objective", "objective_args", "early_stopping.metric", "compute_metrics", "max_steps")
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


_SHORT_NAMES = {
    "lr": "learning_rate",
    "batch_size": "train_batch_size",
    "per_device_train_batch_size": "train_batch_size",
    "epochs": "num_train_epochs",
    "num_epochs": "num_train_epochs",
    "steps": "max_steps",
    "data": "dataset",
    "train_dataset": "dataset",
    "peft_config": "peft",
    "rank": "r",
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "args": "run",
    "base_model": "model",
}
"""What settings are called elsewhere, too far from our names to be guessed by their letters."""


def unknown_keys(
    section: Mapping[str, Any], allowed: Sequence[str], prefix: str, hint: Callable[[str], str] | None = None
) -> list[Fault]:
    """Return a fault for each key that a section may not have, with what was meant.

    Args:
        section: the section as it was read.
        allowed: its keys.
        prefix: its dotted path, with a dot at its end.
        hint: returns what to do about a key where more is known of it than its nearest name; "" where not.
    """
    faults = []
    for key in section:
        if key not in allowed:
            meant = _SHORT_NAMES.get(str(key), "")
            fix = f'Did you mean "{meant}"?' if meant in allowed else hint(str(key)) if hint else ""
            fix = fix or closest(str(key), allowed)
            # The whole list helps nobody who was told what is meant.
            choices = "the keys of this section" if fix else ", ".join(sorted(allowed))
            faults.append(Fault(f"{prefix}{key}", "an unknown key", choices, fix))
    return faults


def make_task(name: str, settings: Mapping[str, Any], folder: Path) -> tuple[Task | None, list[Fault]]:
    """Return a task with its rows loaded, or all that is wrong with it.

    Args:
        name: name of the task.
        settings: its section of the file with the defaults in it.
        folder: folder that relative paths begin at.
    """
    where = f"tasks.{name}"
    own = {key: value for key, value in settings.items() if key in TASK_KEYS and key not in (*DATA_KEYS, "peft")}
    parts: dict[str, Any] = {}
    faults: list[Fault] = []

    def take(field: str, make: Callable[[], Any], otherwise: Any) -> None:
        try:
            parts[field] = make()
        except ConfigError as error:
            faults.extend(error.faults or [Fault(f"{where}.{field}", "a fault", str(error))])
            parts[field] = otherwise

    take("train_dataset", lambda: _rows(settings, "dataset", settings.get("split"), folder, where), _NO_ROWS)
    take("eval_dataset", lambda: _held_out(settings, folder, where), _NO_ROWS)
    take("peft_config", lambda: make_peft_config(name, _mapping(settings.get("peft"))), None)
    for field, kind in (("early_stopping", EarlyStopping), ("eval_generate", GenerateOptions)):
        if isinstance(own.get(field), dict):
            given = own.pop(field)
            take(field, lambda given=given, field=field, kind=kind: _section(kind, given, f"{where}.{field}"), None)
    has_rows = parts["train_dataset"] is not _NO_ROWS and parts["eval_dataset"] is not _NO_ROWS
    task, more = _task(name, {**own, **parts})
    # Of what stands in for something that is at fault, nothing is told.
    told = [fault for fault in more if has_rows or not fault.where.endswith(_OF_ROWS)]
    told = [fault for fault in told if parts["peft_config"] is not None or "peft_config" not in fault.where]
    faults += told
    return (None, faults) if faults else (task, [])


def _task(name: str, settings: dict[str, Any]) -> tuple[Task | None, list[Fault]]:
    try:
        return Task(name=name, **settings), []
    except ConfigError as error:
        return None, list(error.faults)


def _mapping(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _rows(settings: Mapping[str, Any], key: str, split: Any, folder: Path, where: str) -> Any:
    source = settings.get(key)
    texts = (source, split, settings.get("dataset_config"))
    if not source or not all(text is None or isinstance(text, str) for text in texts):
        return _NO_ROWS  # a fault of the structure, which is told already
    return rows_of(source, split or "train", settings.get("dataset_config"), folder, where, key)


def _held_out(settings: Mapping[str, Any], folder: Path, where: str) -> Any:
    if settings.get("eval_dataset") is not None:
        return _rows(settings, "eval_dataset", settings.get("eval_split"), folder, where)
    if settings.get("eval_split") is not None:
        return _rows(settings, "dataset", settings["eval_split"], folder, where)
    return None


def _section(kind: type, given: dict[str, Any], where: str) -> Any:
    faults = unknown_keys(given, [item.name for item in fields(kind)], f"{where}.")
    known = {key: value for key, value in given.items() if key in {item.name for item in fields(kind)}}
    try:
        made = kind(**known)
    except ConfigError as error:
        head, leaf = where.rsplit(".", 1)
        own = [fault.where if fault.where.startswith(f"{leaf}.") else f"{leaf}.{fault.where}" for fault in error.faults]
        faults += [
            Fault(f"{head}.{place}", fault.got, fault.allowed, fault.fix)
            for place, fault in zip(own, error.faults, strict=True)
        ]
    if faults:
        refusal = ConfigError("\n".join(map(str, faults)))
        refusal.faults = tuple(faults)
        raise refusal
    return made


def make_peft_config(name: str, settings: Mapping[str, Any]) -> Any:
    """Return the configuration of an adapter.

    Args:
        name: name of its task.
        settings: its type, `lora` by default, and its options.

    Raises:
        ConfigError: naming a type that there is not, and options that the type does not have.
    """
    from peft import PEFT_TYPE_TO_CONFIG_MAPPING, PeftType

    from peft_mux.errors import raise_faults

    options, where = dict(settings), f"tasks.{name}.peft"
    kind = str(options.pop("type", "lora"))
    known = {str(item.value): item for item in PeftType}
    if kind.upper() not in known:
        names = [key.lower() for key in known]
        variant = _LORA_VARIANTS.get(kind.lower().replace("_", "").replace("-", ""))
        fix = f"Write peft: {variant}." if variant else closest(kind.lower(), names)
        raise_faults([Fault(f"{where}.type", repr(kind), "a type of docs/peft_types.md, such as lora", fix)])
    config_class = PEFT_TYPE_TO_CONFIG_MAPPING[known[kind.upper()]]
    allowed = [item.name for item in fields(config_class) if item.init]
    raise_faults(unknown_keys(options, allowed, f"{where}."))
    try:
        return config_class(**options)
    except Exception as error:  # PEFT checks little: what it raises is whatever its code comes upon
        raise_faults([Fault(where, shown(dict(settings)), f"what PEFT takes: it says {' '.join(str(error).split())}")])


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
