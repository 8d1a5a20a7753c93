"""Checks of the numbers in a configuration of our own methods."""

# MERGED: Makes a method of our own known to PEFT, whose `PeftType` lists only its own.

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, cast

from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.utils import register_peft_method
from peft.utils.peft_types import PeftType

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


def own_peft_type(name: str) -> PeftType:
    """Return a member of `PeftType` for a method of our own, made where there is none.

    A later PEFT may bring a type of this name. Then that name is PEFT's, and ours is called `MUX_<name>`.

    Args:
        name: in upper case, as PEFT writes types into `adapter_config.json`.
    """
    # At import time of PEFT all of its own types are members, so that a member is PEFT's unless we made it.
    taken = PeftType.__members__.get(name)
    if taken is None:
        return _extended(name)
    return taken if getattr(taken, _MARK, False) else own_peft_type(f"MUX_{name}")


def register_method(peft_type: PeftType, config: type, model: Any) -> None:
    """Register a method with PEFT, once.

    Args:
        peft_type: from `own_peft_type`.
        config: its configuration.
        model: its tuner, which names its prefix.
    """
    if peft_type not in PEFT_TYPE_TO_CONFIG_MAPPING:
        register_peft_method(name=peft_type.value.lower(), config_cls=config, model_cls=model, prefix=model.prefix)


_MARK = "is_of_peft_mux"


def _extended(name: str) -> PeftType:
    """Add a member to the enumeration, as its own class would have made it."""
    member = str.__new__(PeftType, name)
    member._name_, member._value_ = name, name
    member.__objclass__ = PeftType  # type: ignore[attr-defined]
    member._sort_order_ = len(PeftType.__members__)  # type: ignore[attr-defined]
    setattr(member, _MARK, True)
    # Attribute first: once the name is in the map, the enumeration refuses to set it.
    type.__setattr__(PeftType, name, member)
    enumeration = cast(Any, PeftType)
    enumeration._member_names_.append(name)
    enumeration._member_map_[name] = member
    enumeration._value2member_map_[name] = member
    return member
