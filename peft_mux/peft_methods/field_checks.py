"""Checks of the numbers in a configuration of our own methods."""

from __future__ import annotations

import math
from collections.abc import Iterable

from peft_mux.errors import Fault, shown


def whole_number_faults(value: object, where: str) -> list[Fault]:
    """Return a fault for what is no integer of at least 1."""
    # `True` is an int to Python.
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1:
        return []
    return [Fault(where, shown(value), "an integer of at least 1")]


def is_number(value: object) -> bool:
    """Return whether a value is a finite number."""
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def flag_faults(values: Iterable[tuple[str, object]], where: str) -> list[Fault]:
    """Return a fault for each field that is neither True nor False."""
    return [
        Fault(f"{where}.{name}", shown(value), "True or False") for name, value in values if not isinstance(value, bool)
    ]


def regex_clash_faults(config: object, where: str) -> list[Fault]:
    """Return a fault for fields that choose among layers beside a `target_modules` that is a pattern, as PEFT does."""
    targets = getattr(config, "target_modules", None)
    names = ("layers_to_transform", "layers_pattern")
    if not isinstance(targets, str):
        return []
    set_ones = [(name, getattr(config, name, None)) for name in names]
    allowed = "None where target_modules is a string"
    return [Fault(f"{where}.{name}", shown(value), allowed) for name, value in set_ones if value is not None]
