"""`LossArgs`: the arguments of a loss as a frozen dataclass, read from `Task.objective_args`, all faults at once."""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from peft_mux.errors import Fault, closest, shown

T = TypeVar("T", bound="LossArgs")

_OF_THE_TASK = ("loss_type", "label_smoothing_factor")
"""Arguments that are fields of `Task` itself."""

_BEYOND_FLOATS = 2**1000
SEVERAL = "+"
"""Between the names of variants that are added up, where a loss may be several at once."""


@dataclass(frozen=True, kw_only=True)
class LossArgs:
    """Arguments of a loss; a subclass has a field, with its default, for each that may be set.

    Attributes:
        loss_type: which variant of the loss; it is `Task.loss_type`, and none of `Task.objective_args`.
        label_smoothing_factor: share of the loss that all words of the vocabulary have alike; a field of `Task`, too.
    """

    loss_type: str = ""
    label_smoothing_factor: float = 0.0

    refused: ClassVar[Mapping[str, str]] = {}
    """Arguments that are known from TRL but not honoured, with the reason and what to do instead."""

    def faults(self, where: str) -> list[Fault]:
        """Return what is wrong with arguments beside one another; `where` is their path, `tasks.a.objective_args`."""
        return []


def argument(default: Any, allowed: str, holds: Callable[[Any], bool]) -> Any:
    """Return a field of `LossArgs`.

    Args:
        default: what stands where nothing is set; `None` may always be given where it is the default.
        allowed: what may be given, for messages.
        holds: whether a value of the right type may be given.
    """
    return field(default=default, metadata={"allowed": allowed, "holds": holds})


def at_least(minimum: float, default: float | None) -> Any:
    """Return a field for a number from `minimum` on."""
    return argument(default, f"a finite number of at least {minimum:g}", lambda value: value >= minimum)


def above(minimum: float, default: float | None) -> Any:
    """Return a field for a number above `minimum`."""
    return argument(default, f"a finite number above {minimum:g}", lambda value: value > minimum)


def between(low: float, high: float, default: float | None) -> Any:
    """Return a field for a number from `low` to `high`."""
    return argument(default, f"a number from {low:g} to {high:g}", lambda value: low <= value <= high)


def read_args(kind: type[T], given: object, loss_type: str, where: str) -> tuple[T | None, list[Fault]]:
    """Read the arguments of a loss.

    Args:
        kind: the dataclass of the arguments.
        given: what stands in `Task.objective_args`: a mapping, or `None` for nothing.
        loss_type: which variant of the loss, one of the loss's own.
        where: path for messages: `tasks.a.objective_args`.

    Returns:
        The arguments, `None` where there is a fault; and all faults.
    """
    if given is not None and (not isinstance(given, Mapping) or not all(isinstance(key, str) for key in given)):
        return None, [Fault(where, shown(given), "a dict of arguments by name")]
    values: Mapping[str, Any] = given or {}
    known = {item.name: item for item in fields(kind) if item.name not in _OF_THE_TASK and item.init}
    faults = [_unknown(name, values[name], kind, list(known), where) for name in values if name not in known]
    hints = get_type_hints(kind)
    read = {}
    for name, item in known.items():
        if name not in values:
            if item.default is MISSING and item.default_factory is MISSING:
                faults.append(Fault(f"{where}.{name}", "nothing", _allowed(item, hints[name])))
            continue
        read[name] = _converted(values[name], hints[name])
        if not _fits(read[name], item, hints[name]):
            faults.append(Fault(f"{where}.{name}", shown(values[name]), _allowed(item, hints[name])))
    if faults:
        return None, faults
    args = kind(loss_type=loss_type, **read)
    faults = args.faults(where)
    return (None if faults else args), faults


def _unknown(name: str, value: object, kind: type[LossArgs], known: list[str], where: str) -> Fault:
    allowed = ", ".join(known) or "none with this loss"
    if name in kind.refused:
        return Fault(f"{where}.{name}", shown(value), allowed, f"{name} is not supported: {kind.refused[name]}.")
    hint = f"Set Task.{name}." if name in _OF_THE_TASK else closest(name, known)
    return Fault(f"{where}.{name}", "an unknown argument", allowed, hint)


def _converted(value: Any, hint: Any) -> Any:
    """Return lists of a file as the tuples that a frozen dataclass holds, and whole numbers as floats."""
    tuples = [kind for kind in _kinds(hint) if get_origin(kind) is tuple]
    if isinstance(value, (list, tuple)) and tuples:
        return tuple(_converted(one, get_args(tuples[0])[0]) for one in value)
    if isinstance(value, int) and not isinstance(value, bool) and float in _kinds(hint) and int not in _kinds(hint):
        return float(value) if abs(value) < _BEYOND_FLOATS else value
    return value


def _kinds(hint: Any) -> tuple[Any, ...]:
    return get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)


def _fits(value: Any, item: Field[Any], hint: Any) -> bool:
    if value is None:
        return type(None) in _kinds(hint)
    if not any(_is_of(value, kind) for kind in _kinds(hint)):
        return False
    if not _is_finite(value):
        return False
    return bool(item.metadata.get("holds", lambda value: True)(value))


def _is_finite(value: Any) -> bool:
    return not isinstance(value, float) or math.isfinite(value)


def _is_of(value: Any, kind: Any) -> bool:
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is tuple:
        return isinstance(value, tuple) and all(_is_of(one, get_args(kind)[0]) and _is_finite(one) for one in value)
    if kind in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, kind) if isinstance(kind, type) else callable(value)


def _allowed(item: Field[Any], hint: Any) -> str:
    words = {float: "a finite number", int: "an integer", bool: "True or False", str: "a string", type(None): "None"}
    kinds = [
        " or ".join(map(repr, get_args(kind))) if get_origin(kind) is Literal else words.get(kind, "a value")
        for kind in _kinds(hint)
    ]
    return str(item.metadata.get("allowed", " or ".join(kinds)))
