"""`tasks.yaml`: the same settings as in Python, read into arguments and tasks; all faults at once, with line numbers.

    model: Qwen/Qwen3-0.6B
    output_dir: runs/support
    run: {bf16: true, logging_steps: 10}                  # MultiTaskTrainingArguments
    defaults: {learning_rate: 2.0e-4, peft: {type: lora, r: 16, target_modules: all-linear}}
    tasks:
      sql:  {dataset: data/sql.jsonl, num_train_epochs: 3}
      math: {dataset: org/math, eval_split: test, peft: {r: 64}, early_stopping: {patience: 3}}

Paths are relative to the file. `dataset` is a .jsonl, .json, .csv or .parquet file, a folder, or a hub id. In the two
fields of `SECRETS`, `${HF_TOKEN}` is a variable of the environment: a file is shared and kept under version control, a
token is not. Elsewhere a variable would make the file train something else on another machine.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml
from peft import PEFT_TYPE_TO_CONFIG_MAPPING, PeftType
from transformers import TrainingArguments

from peft_mux.arguments import (
    ADAPTER_NAMES,
    RENAMED,
    SETTABLE_FIELDS,
    MultiTaskTrainingArguments,
    belongs,
    reason_against,
)
from peft_mux.data.sources import SOURCES, rows_of
from peft_mux.errors import ConfigError, Fault, closest, raise_faults, shown
from peft_mux.modeling.generation.options import GenerateOptions
from peft_mux.scheduler.costs.hardware import DEVICES, Cluster, Link, parse_devices
from peft_mux.task import TASK_FIELDS, EarlyStopping, Task

SECRETS = ("run.hub_token", "model_init_kwargs.token")
"""The fields that hold secrets; neither is written into a run folder."""
DATA_KEYS = ("dataset", "dataset_config", "split", "eval_dataset", "eval_split")
_NOT_IN_FILES = "name peft_config train_dataset eval_dataset callbacks compute_metrics preprocess_logits_for_metrics"
TASK_KEYS = (*DATA_KEYS, "peft", *(name for name in TASK_FIELDS if name not in _NOT_IN_FILES.split()))
"""The keys of a task in a file."""
_TOP_KEYS = ("model", "tokenizer", "output_dir", "run", "defaults", "tasks", "model_init_kwargs")
_MAX_BYTES, _MAX_NODES = 2**23, 200_000
"""Limits of a file, and of its values once aliases are written out."""
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
    """

    model: str
    tokenizer: str | None
    args: MultiTaskTrainingArguments
    tasks: list[Task]
    model_init_kwargs: dict[str, Any]
    file: str = ""
    lines: Mapping[str, int] = field(default_factory=dict)

    def located(self, faults: Iterable[Fault]) -> list[Fault]:
        """Return the faults of objects that were made from the file, with the file's own names and lines."""
        return _located(faults, self.file, self.lines)


def read_config(
    path: str | Path,
    overrides: Sequence[str] = (),
    before_rows: Callable[[MultiTaskTrainingArguments], None] = lambda args: None,
) -> RunConfig:
    """Return what a file describes.

    Args:
        path: path of the YAML file.
        overrides: texts such as `tasks.sql.learning_rate=1e-4`; each replaces or adds one value.
        before_rows: called with the arguments of the run, if they are without faults, before rows are loaded.

    Raises:
        ConfigError: naming every fault, with its line if it has one.
    """
    path = Path(path)
    node, data = _parsed(_text_of(path, f" peft-mux init {path} writes one."), str(path))
    if not isinstance(data, dict):
        allowed = f"a mapping with the keys {', '.join(_TOP_KEYS)}"
        raise ConfigError(f"{path} must be {allowed}, got {type(data).__name__}.")
    lines: dict[str, int] = {}  # of each key, by its dotted path
    faults = _look_at_keys(node, "", lines, set())
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
    # Objects are made as far as possible even now, so that one call reports all faults of a file.
    config, more = _make_run_config(data, path.parent, before_rows)
    known = {fault.where for fault in faults}
    faults += [fault for fault in more if fault.where not in known]
    raise_faults(_located(faults, path.name, lines))
    assert config is not None, "a configuration without faults was made"
    return replace(config, file=path.name, lines=lines)


_CLUSTER_KEYS = {
    "device": "the name of a device",
    "nodes": "an integer of 1 or more",
    "devices_per_node": "an integer of 1 or more",
    "ports_per_node": "an integer of 1 or more",
    "intra_node_gb_per_s": "a number above 0",
    "intra_node_latency_us": "a number of 0 or more",
    "inter_node_gb_per_s": "a number above 0",
    "inter_node_latency_us": "a number of 0 or more",
}
"""The keys of a file that describes a cluster; only the first three are required."""


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
    node, data = _parsed(_text_of(path), str(path))
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must be a mapping with the keys {', '.join(_CLUSTER_KEYS)}, got {shown(data)}.")
    lines: dict[str, int] = {}
    faults = _look_at_keys(node, "", lines, set()) + _key_faults(data, _CLUSTER_KEYS, "")
    for key, allowed in _CLUSTER_KEYS.items():
        value = data.get(key)
        if value is None:
            if key in ("device", "nodes", "devices_per_node"):
                faults.append(Fault(key, "nothing", allowed))
            continue
        if key == "device":
            is_right = isinstance(value, str)
        elif allowed.startswith("an integer"):
            is_right = type(value) is int and value >= 1
        else:
            is_number = type(value) in (int, float) and math.isfinite(value)
            is_right = is_number and (value >= 0 if "latency" in key else value > 0)
        if not is_right:
            faults.append(Fault(key, shown(value), allowed))
    cluster = None
    if not faults:
        try:
            cluster = parse_devices(f"{data['nodes']}x{data['devices_per_node']}x{data['device']}")
        except ValueError:
            fix = closest(data["device"], DEVICES)
            faults.append(Fault("device", shown(data["device"]), f"one of {', '.join(DEVICES)}", fix))
    raise_faults(_located(faults, path.name, lines))
    assert cluster is not None, "a cluster without faults was made"

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


def _text_of(path: Path, fix: str = "") -> str:
    """Return the text of a YAML file of the user's.

    Raises:
        ConfigError: if it cannot be read.
    """
    try:
        if path.exists() and not path.is_file():  # a pipe may never end
            raise OSError("it is not a regular file")
        if (size_bytes := path.stat().st_size) > _MAX_BYTES:
            raise OSError(f"it must have at most {_MAX_BYTES} bytes, got {size_bytes}")
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} must be UTF-8 text: {error}. Save it as UTF-8.") from error
    except FileNotFoundError as error:
        raise ConfigError(f"file must be a YAML file, got {str(path)!r}, which does not exist.{fix}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error


def _located(faults: Iterable[Fault], file: str, lines: Mapping[str, int]) -> list[Fault]:
    """Return faults with the file's own names of sections, and with the line of each in the file."""
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
        located.append(replace(fault, where=f"{file}{line} {name}"))
    return located


# ----------------------------------------------------------------------------------------------------------------- YAML


class _Loader(yaml.SafeLoader):
    """Loads YAML safely, and reads `1e-4` as a number (YAML 1.1 requires `1.0e-4`).

    A few lines with aliases can expand to more values than could ever be visited (`a: &a [x, x]`, `b: &b [*a, *a]`,
    ...), or contain themselves. Both are refused before any value is made.
    """

    def __init__(self, text: str, where: str) -> None:
        super().__init__(text)
        self._where = where
        self._num_nodes = 0
        self._sizes: dict[yaml.Node, int] = {}  # in nodes, of those that are complete

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event, num_before = self.peek_event(), self._num_nodes
        node = super().compose_node(parent, index)
        assert node is not None, "the base class returns one, whatever its stubs say"
        place = f"{self._where}: line {event.start_mark.line + 1}"
        if not isinstance(event, yaml.AliasEvent):
            self._num_nodes += 1
            self._sizes[node] = self._num_nodes - num_before
        elif node in self._sizes:
            self._num_nodes += self._sizes[node]
        else:
            raise ConfigError(f"{place} must have aliases without cycles, got *{event.anchor} within itself.")
        if self._num_nodes > _MAX_NODES:
            raise ConfigError(
                f"{place} must have at most {_MAX_NODES} values once aliases (*name) are written out. Put what tasks "
                "share into the section defaults."
            )
        return node


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
    return _parsed(text, where)[1]


def _parsed(text: str, where: str) -> tuple[Any, Any]:
    """Parse a text; return its node, which has line numbers, and its value."""
    try:
        loader = _Loader(text, where)
        node = loader.get_single_node()
        return node, None if node is None else loader.construct_document(node)
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


def _look_at_keys(node: yaml.MappingNode, prefix: str, lines: dict[str, int], seen: set[int]) -> list[Fault]:
    """Record the line of each key; return faults of keys: duplicates, and keys that are not strings (`yes` is true)."""
    faults: list[Fault] = []
    seen.add(id(node))  # an alias may refer to it again, even from within
    for key, value in node.value:
        where = f"{prefix}{key.value}"
        if where in lines:
            faults.append(Fault(where, "the same key twice", "written once"))
            # The keys in the second section are not duplicates.
            for own in [line for line in lines if line.startswith(f"{where}.")]:
                del lines[own]
        lines[where] = key.start_mark.line + 1
        kind = key.tag.rsplit(":", 1)[-1]
        if kind not in ("str", "merge") and not where.startswith(_FREE_SECTIONS):
            meanings = {"bool": "true or false", "null": "nothing", "int": "a number", "float": "a number"}
            got = f"a key that YAML reads as {meanings.get(kind, f'a {kind}')}"
            fix = f'Write it in quotes: "{key.value}".' if isinstance(key, yaml.ScalarNode) else ""
            faults.append(Fault(where, got, "a name", fix))
        if isinstance(value, yaml.MappingNode) and id(value) not in seen:
            faults += _look_at_keys(value, f"{where}.", lines, seen)
    return faults


def _expand_secrets(data: dict[str, Any]) -> list[Fault]:
    """Replace environment variables in fields that hold secrets, in place; return their faults."""
    faults = []
    for path in SECRETS:
        section, key = path.split(".")
        own = data.get(section)
        if not isinstance(own, dict) or not isinstance(text := own.get(key), str):
            continue
        names = re.findall(r"\$\{(.*?)\}", text)
        own[key] = None  # set below if it has no fault
        # No message shows the text: it may be the secret itself.
        if re.fullmatch(r"\$\w+", text):
            fix = "Write ${NAME} for the variable NAME."
            faults.append(Fault(path, "a variable without braces", "a token or a variable in braces", fix))
        elif missing := [f"${{{name}}}" for name in names if not os.environ.get(name)]:
            fix = "Set it in the shell that starts the run, or leave the field out to use the login of this machine."
            got = f"{', '.join(missing)}, an environment variable that is not set"
            faults.append(Fault(path, got, "made of variables that are set", fix))
        else:
            own[key] = re.sub(r"\$\{(.*?)\}", lambda found: os.environ[found[1]], text)
    # In all other fields they are refused. Each value is visited once, because aliases may repeat it.
    waiting: list[tuple[str, Any]] = [("", data)]
    seen: set[int] = set()
    while waiting:
        where, value = waiting.pop()
        if isinstance(value, (dict, list)):
            items = value.items() if isinstance(value, dict) else [("", own) for own in value]
            if id(value) not in seen:
                waiting += [(f"{where}.{key}".strip("."), own) for key, own in items]
            seen.add(id(value))
            continue
        # Chat templates use such braces themselves.
        is_exempt = where in SECRETS or where.endswith(".chat_template")
        if isinstance(value, str) and not is_exempt and re.search(r"\$\{\w+\}", value):
            allowed = f"the value itself (variables may be in {' and '.join(SECRETS)} only)"
            faults.append(Fault(where, shown(value), allowed, "Write the value, or give it with --set."))
    return faults


# -------------------------------------------------------------------------------------------------------- the sections


def _mapping(value: Any) -> dict[str, Any]:
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


def _structure_faults(data: dict[str, Any]) -> list[Fault]:
    """Return what is wrong with the keys of all sections, and with values that no object checks."""
    faults = _key_faults(data, _TOP_KEYS, "")
    for key in ("model", "tasks"):
        if not data.get(key):
            faults.append(Fault(key, shown(data.get(key)), "set, because every file needs it"))
    for key in ("model", "tokenizer", "output_dir"):
        if data.get(key) is not None and not isinstance(data[key], str):
            faults.append(Fault(key, shown(data[key]), "a string"))
    for key in ("model_init_kwargs", "run", "defaults", "tasks"):
        if data.get(key) and not isinstance(data[key], dict):
            faults.append(Fault(key, shown(data[key]), "a mapping"))
    defaults, tasks = _mapping(data.get("defaults")), _mapping(data.get("tasks"))
    faults += _key_faults(_mapping(data.get("run")), SETTABLE_FIELDS - {"output_dir"}, "run.", _hint_of_run)
    faults += _key_faults(defaults, TASK_KEYS, "defaults.", _hint_of_task)
    for name, task in tasks.items():
        where = f"tasks.{name}"
        if not isinstance(task, dict):
            faults.append(Fault(where, shown(task), "a mapping"))
            continue
        faults += _key_faults(task, TASK_KEYS, f"{where}.", _hint_of_task)
        # With the defaults, as they may hold what a task leaves out.
        own = _value_faults({**defaults, **task}, where)
        if "dataset" not in task and len(task) == 1:  # a misspelt name in --set makes a task of one setting
            meant = closest(str(name), [str(one) for one in tasks if one != name])
            own = [replace(one, fix=meant) if one.where == f"{where}.dataset" else one for one in own]
        faults += own
    # The defaults need not name a dataset.
    return faults + _value_faults({"dataset": "-", **defaults}, "defaults")


def _value_faults(task: Mapping[str, Any], where: str) -> list[Fault]:
    """Return the faults of values that are not passed on to a `Task`: sources of rows, and nested sections."""
    faults = []
    if not isinstance(task.get("dataset"), str) or not task["dataset"]:
        faults.append(Fault(f"{where}.dataset", shown(task.get("dataset")), SOURCES))
    for key in ("eval_dataset", "dataset_config", "split", "eval_split"):
        if task.get(key) is not None and not isinstance(task[key], str):
            faults.append(Fault(f"{where}.{key}", shown(task[key]), SOURCES if key == "eval_dataset" else "a name"))
    for key in ("peft", "early_stopping"):
        if task.get(key) is not None and not isinstance(task[key], dict):
            faults.append(Fault(f"{where}.{key}", shown(task[key]), "a mapping"))
    return faults


# --------------------------------------------------------------------------------------------------------- the objects


def _attempt(where: str, make: Callable[..., Any], *arguments: Any) -> tuple[Any, list[Fault]]:
    """Call a function; return its result, or `None` and the faults that it raises."""
    try:
        return make(*arguments), []
    except ConfigError as error:
        return None, list(error.faults) or [Fault(where, "a fault", str(error))]


def _make_run_config(
    data: dict[str, Any], folder: Path, before_rows: Callable[[MultiTaskTrainingArguments], None]
) -> tuple[RunConfig | None, list[Fault]]:
    """Return what a file describes, or what is wrong with the objects that it stands for."""
    output_dir = data.get("output_dir")
    given = {key: value for key, value in _mapping(data.get("run")).items() if key in SETTABLE_FIELDS}
    given["output_dir"] = output_dir if isinstance(output_dir, str) and output_dir else "peft_mux_output"
    args, faults = _attempt("run", lambda: MultiTaskTrainingArguments(**given))
    if args is not None:
        before_rows(args)
    defaults = _mapping(data.get("defaults"))
    default_peft = _mapping(defaults.get("peft"))
    sections = {name: one for name, one in _mapping(data.get("tasks")).items() if isinstance(one, dict)}
    has_held_out = {
        name: any({**defaults, **one}.get(key) is not None for key in ("eval_dataset", "eval_split"))
        for name, one in sections.items()
    }
    tasks: list[Task] = []
    for name, settings in sections.items():
        # A task of another type than the defaults has none of their options.
        peft = {**default_peft, **_mapping(settings.get("peft"))}
        if str(peft.get("type", "lora")).lower() != str(default_peft.get("type", "lora")).lower():
            peft = _mapping(settings.get("peft"))
        merged = {**defaults, **settings, "peft": peft}
        if any(has_held_out.values()) and not has_held_out[name]:
            # As with the arguments of a run: defaults about evaluations do not apply to tasks without held-out rows.
            merged = {key: value for key, value in merged.items() if key in settings or key not in _WHEN_EVALUATED}
        task, own = _make_task(str(name), merged, folder)
        faults += own
        tasks += [] if task is None else [task]
    if faults or args is None or not isinstance(data.get("model"), str) or not tasks:
        return None, faults
    # A folder next to the file, or else a hub id or a path.
    names: list[Any] = [data["model"], data.get("tokenizer")]
    model, tokenizer = [
        str(folder / name) if isinstance(name, str) and (folder / name).is_dir() else name for name in names
    ]
    return RunConfig(model, tokenizer, args, tasks, _mapping(data.get("model_init_kwargs"))), []


def _make_task(name: str, settings: Mapping[str, Any], folder: Path) -> tuple[Task | None, list[Fault]]:
    """Return a task with its rows loaded, or all that is wrong with it.

    Args:
        name: name of the task.
        settings: its section of the file, completed with the defaults.
        folder: folder that relative paths start from.
    """
    where = f"tasks.{name}"
    own = {key: value for key, value in settings.items() if key in TASK_KEYS and key not in (*DATA_KEYS, "peft")}
    held_out, split = settings.get("eval_dataset"), settings.get("eval_split")
    held_out_key = "dataset" if held_out is None else "eval_dataset"
    own["train_dataset"], faults = _attempt(where, _rows, settings, "dataset", settings.get("split"), folder, where)
    if held_out is not None or split is not None:
        own["eval_dataset"], more = _attempt(where, _rows, settings, held_out_key, split, folder, where)
        faults += more
    without_rows = [which for which in ("train_dataset", "eval_dataset") if own.get(which, _NO_ROWS) is None]
    own |= dict.fromkeys(without_rows, _NO_ROWS)
    if isinstance(start := own.get("init_adapter"), str) and (folder / start).is_dir():
        own["init_adapter"] = str(folder / start)  # a folder next to the file, or else a hub id or a path
    if settings.get("peft") or own.get("init_adapter") is None:
        own["peft_config"], more = _attempt(where, _make_peft_config, _mapping(settings.get("peft")), f"{where}.peft")
        faults += more
    for key, kind in (("early_stopping", EarlyStopping), ("eval_generate", GenerateOptions)):
        if isinstance(own.get(key), dict):
            own[key], more = _attempt(where, _make_section, kind, own[key], where, key)
            faults += more
    task, more = _attempt(where, lambda: Task(name=name, **own))
    for fault in more:
        # Faults that only come from a stand-in for an invalid value are not the user's.
        is_of_rows = without_rows and fault.where.endswith(_OF_ROWS)
        if not is_of_rows and not (own.get("peft_config", "") is None and "peft_config" in fault.where):
            faults.append(fault)
    return (None, faults) if faults else (task, [])


def _rows(settings: Mapping[str, Any], key: str, split: Any, folder: Path, where: str) -> Any:
    """Return the rows of a dataset; `None` for values of wrong types, which `_value_faults` names."""
    source, config = settings.get(key), settings.get("dataset_config")
    if not source or not all(text is None or isinstance(text, str) for text in (source, split, config)):
        return None
    return rows_of(source, split or "train", config, folder, where, key)


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
        raise_faults(
            [
                Fault(
                    where,
                    shown(dict(settings)),
                    "settings that PEFT accepts",
                    f"PEFT: {' '.join(str(error).split()).rstrip('.')}.",
                )
            ]
        )
