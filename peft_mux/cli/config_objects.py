"""The sections of `tasks.yaml` as the objects that they stand for, with every fault that each of them has."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from peft_mux.data.sources import rows_of
from peft_mux.errors import ConfigError, Fault, closest, shown
from peft_mux.generation.options import GenerateOptions
from peft_mux.hyper_parameters import EarlyStopping
from peft_mux.task import TASK_FIELDS, Task

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
