"""Types of the fields of a `PeftConfig`: PEFT declares them and checks none, so a wrong one fails deep inside it."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, fields, is_dataclass
from typing import Any, NamedTuple

from peft_mux.errors import Fault, is_integer, is_text, shown


class FieldType(NamedTuple):
    """What may stand in a field.

    Attributes:
        is_valid: whether a value is of the type.
        allowed: the same in words, for messages.
    """

    is_valid: Callable[[Any], bool]
    allowed: str


def _is_index(value: object) -> bool:
    return is_integer(value, 0)


def _are(is_valid: Callable[[Any], bool], value: object, kinds: tuple[type, ...]) -> bool:
    return isinstance(value, kinds) and all(is_valid(item) for item in value)  # type: ignore[attr-defined]


# PEFT writes the configuration as JSON, which it turns sets into lists for, but no other collection.
_NAMES = FieldType(
    lambda value: value is None or isinstance(value, str) or _are(is_text, value, (list, set, tuple)),
    "a string, a list of strings, or None",
)
_TEXT = FieldType(lambda value: value is None or isinstance(value, str), "a string or None")
FLAG = FieldType(lambda value: isinstance(value, bool), "True or False")
INITIALISER = FieldType(lambda value: isinstance(value, (bool, str)), "True, False or a name")
PATTERN = FieldType(
    lambda value: isinstance(value, dict) and all(is_text(key) for key in value),
    "a dict from names of modules to numbers",
)
MODULES = FieldType(
    lambda value: value is None or _are(is_text, value, (list, set, tuple)), "a list of names of modules, or None"
)
BIAS = FieldType(
    lambda value: isinstance(value, str) and value in ("none", "all", "lora_only"), "'none', 'all' or 'lora_only'"
)


def _are_tokens(value: object) -> bool:
    # PEFT writes the same row twice in an order of its own.
    return _are(_is_index, value, (list,)) and 0 < len(set(value)) == len(value)  # type: ignore[arg-type, call-overload]


TOKENS = FieldType(
    lambda value: (
        value is None
        or _are_tokens(value)
        or (
            isinstance(value, dict)
            and bool(value)
            and all(map(is_text, value))
            and all(map(_are_tokens, value.values()))
        )
    ),
    "a list of different numbers of tokens, a dict from names of layers to such lists, or None",
)

COMMON_TYPES: Mapping[str, FieldType] = {
    "auto_mapping": FieldType(lambda value: value is None or isinstance(value, dict), "a dict or None"),
    "peft_version": _TEXT,
    "base_model_name_or_path": _TEXT,
    "revision": _TEXT,
    "inference_mode": FLAG,
    "megatron_core": _TEXT,
    "qalora_group_size": FieldType(_is_index, "an integer of at least 0"),
    "target_modules": _NAMES,
    "exclude_modules": _NAMES,
    "layers_pattern": _NAMES,
    "layers_to_transform": FieldType(
        lambda value: value is None or _is_index(value) or _are(_is_index, value, (list, tuple)),
        "the number of a layer, a list of them, or None",
    ),
}
"""Of the fields that configurations of several PEFT types have."""


def type_faults(config: Any, where: str, own: Mapping[str, FieldType], supported: Collection[str]) -> list[Fault]:
    """Return a fault for every field whose value is of another type than PEFT declares, or cannot be saved.

    Args:
        config: a `PeftConfig` of one task.
        where: prefix of the fields, such as `tasks.sql.peft_config`.
        own: types of fields that only this PEFT type has, by name.
        supported: fields that may be set; any of them is written to the adapter's folder, as JSON.
    """
    types = {**COMMON_TYPES, **own}
    faults = []
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name in types:
            kind = types[field.name]
            if not kind.is_valid(value) or not _is_plain(value):
                faults.append(Fault(f"{where}.{field.name}", shown(value), kind.allowed))
        elif field.name in supported and not _is_plain(value):
            faults.append(Fault(f"{where}.{field.name}", shown(value), "a value that can be written as JSON"))
    return faults


def _is_plain(value: object) -> bool:
    try:
        # PEFT turns configurations within a configuration into dictionaries.
        value = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
        json.dumps(list(value) if isinstance(value, set) else value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True
