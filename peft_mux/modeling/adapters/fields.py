"""Types of the fields of a `PeftConfig`: PEFT declares them and checks none, so a wrong one fails deep inside it."""

# MERGED: Checks of a `PeftConfig` that all kinds of adapters share: which fields are set, and for which task type.
# MERGED: Fields are held to a list of supported ones: any other field that is not at its default is refused by name,
# MERGED: so that an
# MERGED: option of a later PEFT is never accepted and ignored.
# MERGED: Types of fields, read off the defaults that PEFT declares: for types of which no list is kept here.

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from typing import Any, NamedTuple

from peft_mux.errors import Fault, is_integer, is_real, is_text, shown
from peft_mux.modeling.backbone.modules import SUPPORTED_TASK_TYPES, head_kind_for


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


BOOKKEEPING_FIELDS = frozenset(
    "task_type peft_type auto_mapping peft_version base_model_name_or_path revision inference_mode megatron_core "
    "qalora_group_size".split()
)
"""That no training reads, whatever stands in them."""


def field_faults(config: Any, where: str, *, supported: Collection[str], reasons: Mapping[str, str]) -> list[Fault]:
    """Return a fault for every field that is set and cannot be trained.

    Args:
        config: a `PeftConfig` of one task.
        where: prefix of the fields, such as `tasks.sql.peft_config`.
        supported: fields that may be set.
        reasons: why a field may not be set, by its name; a field that is not named here has no multiplexed layer yet.
    """
    faults = []
    for field in fields(config):
        if field.name in supported or field.name in BOOKKEEPING_FIELDS:
            continue
        default = field.default if field.default is not MISSING else field.default_factory()  # type: ignore[misc]
        value = getattr(config, field.name)
        if _asks_for_nothing(field.name, value, default):
            continue
        trained = head_kind_for(config.task_type).trained_modules if field.name == "modules_to_save" else ()
        if trained and isinstance(value, (list, tuple, set)) and all(item in trained for item in value):
            continue  # as PEFT itself writes it for classifiers
        reason = reasons.get(field.name, "it has no multiplexed layer yet")
        faults.append(
            Fault(f"{where}.{field.name}", shown(value), f"its default {default!r}", f"Not supported: {reason}.")
        )
    return faults


def _asks_for_nothing(name: str, value: Any, default: Any) -> bool:
    """Whether a value is the default of its field, or stands for nothing in a field that is empty by default."""
    try:
        if value == default:
            return True
    except Exception:  # whatever is raised by the comparison of an array, or of an object of the user's
        return False
    # PEFT reads this one wherever it is not None.
    is_empty = value is None or (isinstance(value, (list, tuple, set, dict)) and not value)
    return is_empty and not default and not isinstance(default, bool) and name != "trainable_token_indices"


_OF_WHOLE_MODELS: Mapping[str, str] = {
    "use_dora": "it reads whole rows of frozen weights",
    "lora_bias": "its biases are not divided",
    "use_bdlora": "its blocks are not divided",
    "init_lora_weights": "it decomposes whole frozen weights",
    "bias": "biases of the backbone are not divided",
    "modules_to_save": "copies of modules are not divided",
    "trainable_token_indices": "rows of embeddings are not divided",
}
"""Fields that only a process with the whole backbone can honour, and why."""


def divided_model_faults(config: Any, where: str, layout: str) -> list[Fault]:
    """Return a fault for every field that cannot be honoured where processes divide the backbone among them.

    Args:
        config: a `PeftConfig` of one task.
        where: prefix of the fields, such as `tasks.sql.peft_config`.
        layout: how the backbone is divided, for messages.
    """
    faults = []
    heads = head_kind_for(config.task_type).trained_modules
    for name, reason in _OF_WHOLE_MODELS.items():
        value = getattr(config, name, None)
        if value in (None, False, "none") or (name == "modules_to_save" and set(value) <= set(heads)):
            continue
        if name == "init_lora_weights" and not str(value).startswith(("pissa", "olora", "corda", "lora_ga")):
            continue
        fix = f"Not supported there: {reason}. Give every process the whole model."
        faults.append(Fault(f"{where}.{name}", f"{shown(value)} with {layout}", "its default", fix))
    return faults


def task_type_faults(config: Any, where: str) -> list[Fault]:
    """Return a fault for a task type that cannot be trained."""
    if config.task_type is None or (isinstance(config.task_type, str) and config.task_type in SUPPORTED_TASK_TYPES):
        return []
    names = ", ".join(sorted(name for name in SUPPORTED_TASK_TYPES if name is not None))
    return [Fault(f"{where}.task_type", str(config.task_type), f"{names} or None")]


def complete_heads(config: Any) -> None:
    """Let a task's own copy of a configuration train a classification head beside the adapter, as PEFT completes it."""
    trained = head_kind_for(config.task_type).trained_modules
    if trained:
        config.modules_to_save = [*trained, *(set(config.modules_to_save or ()) - set(trained))]


_NUMBER = FieldType(is_real, "a finite number")
_SHARE = FieldType(lambda value: is_real(value) and 0 <= value < 1, "a number in [0, 1)")  # type: ignore[operator]
_COUNT = FieldType(lambda value: is_integer(value, 1), "an integer of at least 1")
_INDEX = FieldType(lambda value: is_integer(value, 0), "an integer of at least 0")
_TEXT_default_types = FieldType(lambda value: isinstance(value, str), "a string")
_NUMBERS = FieldType(
    lambda value: (
        isinstance(value, dict)
        and all(isinstance(key, str) and key and is_real(number) and number > 0 for key, number in value.items())
    ),
    "a dict from names of modules to numbers above 0",
)
_REAL_NAMES = ("alpha", "lambda", "scaling")
"""Parts of the names of factors, which PEFT gives whole numbers by default and multiplies with."""


def types_of_defaults(config_type: type, names: Collection[str]) -> Mapping[str, FieldType]:
    """Return what may stand in the fields of a configuration, by the values that they have by default.

    Args:
        config_type: the dataclass of the configurations of a PEFT type.
        names: the fields that are asked for; those that are common to many types, or empty by default, have none.
    """
    types: dict[str, FieldType] = {}
    for field in fields(config_type):
        default = field.default if field.default is not MISSING else _made(field)
        found = _type_of(field.name, str(field.type), default)
        if field.name in names and field.name not in COMMON_TYPES and found is not None:
            types[field.name] = found
    return types


def _made(field: Any) -> Any:
    return None if field.default_factory is MISSING else field.default_factory()


def _type_of(name: str, declared: str, default: Any) -> FieldType | None:
    if default is None:
        return _optional(name, declared)
    if isinstance(default, bool):
        return INITIALISER if "str" in declared or "Literal" in declared else FLAG
    if isinstance(default, dict):
        return _NUMBERS
    if isinstance(default, int) and not any(part in name for part in _REAL_NAMES):
        return _COUNT if default > 0 and not name.endswith(("seed", "key")) else _INDEX if default >= 0 else None
    if isinstance(default, (int, float)):
        return _SHARE if "dropout" in name else _NUMBER
    return (
        _TEXT_default_types if isinstance(default, str) and "bool" not in declared and "None" not in declared else None
    )


def _optional(name: str, declared: str) -> FieldType | None:
    if "dict" in declared:
        found = _NUMBERS
    elif "int" not in declared and "float" not in declared:
        return None
    elif "float" in declared or any(part in name for part in _REAL_NAMES):
        found = _NUMBER
    else:
        found = _INDEX if name.endswith("seed") else _COUNT
    return FieldType(lambda value: value is None or found.is_valid(value), f"{found.allowed}, or None")
