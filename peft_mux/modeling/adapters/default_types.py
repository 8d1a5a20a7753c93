"""Types of fields, read off the defaults that PEFT declares: for types of which no list is kept here."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from typing import Any

from peft_mux.errors import is_integer, is_real
from peft_mux.modeling.adapters.field_types import COMMON_TYPES, FLAG, INITIALISER, FieldType

_NUMBER = FieldType(is_real, "a finite number")
_SHARE = FieldType(lambda value: is_real(value) and 0 <= value < 1, "a number in [0, 1)")  # type: ignore[operator]
_COUNT = FieldType(lambda value: is_integer(value, 1), "an integer of at least 1")
_INDEX = FieldType(lambda value: is_integer(value, 0), "an integer of at least 0")
_TEXT = FieldType(lambda value: isinstance(value, str), "a string")
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
    return _TEXT if isinstance(default, str) and "bool" not in declared and "None" not in declared else None


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
