"""Exceptions of peft_mux, how their messages are written, checks of plain values, and installed versions.

Every message says what must hold *where* (task and field), what was *got*, and what to *do*. Configuration faults
are collected and raised together, so that a script reports all of them in one run.

A new exception belongs here if a caller could want to catch it separately; it also inherits the built-in class that it
specialises, so `except ValueError` keeps working.
"""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, NamedTuple


class PeftMuxError(Exception):
    """Base of all errors that peft_mux raises on purpose.

    Attributes:
        faults: everything that was found wrong, if the message was made from it.
    """

    faults: tuple[Fault, ...] = ()


class ConfigError(PeftMuxError, ValueError):
    """Something that the user wrote (a task, an argument, a file) cannot be run."""


class DataError(PeftMuxError, ValueError):
    """A row or a column of a dataset cannot be trained on."""


class UnsupportedModelError(PeftMuxError, ValueError):
    """The backbone cannot be multiplexed without changing its results."""


class PlanError(PeftMuxError, RuntimeError):
    """No plan satisfies the request."""


class MemoryBudgetError(PeftMuxError, RuntimeError):
    """The run does not fit into its memory."""


class CheckpointError(PeftMuxError, RuntimeError):
    """A checkpoint is missing, torn or corrupt, or could not be written."""


class ProcessError(PeftMuxError, RuntimeError):
    """The processes of a run have lost contact, or are no longer in step."""


class TaskFailedError(PeftMuxError, RuntimeError):
    """Tasks have failed in a run with `raise_on_failure=True`, which has ended and saved all others."""


class MetricsError(PeftMuxError, RuntimeError):
    """A task's own `compute_metrics`, `preprocess_logits_for_metrics` or loss has failed in an evaluation."""


class ForcedInterrupt(KeyboardInterrupt):
    """The second Ctrl-C of a run, which ends it at once.

    The guard around user code lets it pass, while a `KeyboardInterrupt` raised by that code fails its task.
    """


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong, in the four parts of a message.

    Attributes:
        where: dotted path of the field, such as `tasks.sql.learning_rate`; the subject of the message.
        got: the value that was found, as the user would recognise it.
        allowed: the values that are accepted; continues "must be".
        fix: the next step to take; empty if `allowed` says it already.
    """

    where: str
    got: str
    allowed: str
    fix: str = ""

    def __str__(self) -> str:
        """Return the message of this fault on one line."""
        fix = f" {self.fix}" if self.fix else ""
        return f"{self.where} must be {self.allowed}, got {self.got}.{fix}"


def raise_faults(faults: Sequence[Fault], error: type[PeftMuxError] = ConfigError) -> None:
    """Raise all faults as one error; do nothing when there are none.

    Args:
        faults: everything that was found wrong, in reading order.
        error: the exception class to raise.

    Raises:
        PeftMuxError: of the given class, when `faults` is not empty.
    """
    if not faults:
        return
    if len(faults) == 1:
        message = str(faults[0])
    else:
        lines = "\n".join(f"  {number}. {fault}" for number, fault in enumerate(faults, start=1))
        message = f"{len(faults)} things are wrong:\n{lines}"
    refusal = error(message)
    refusal.faults = tuple(faults)
    raise refusal


def shown(value: object) -> str:
    """Return any value in the form that messages show: on one line, with at most 100 characters."""
    try:
        text = repr(value)
    except Exception:  # an integer of too many digits, or an object whose own code fails
        text = f"a value of type {type(value).__name__} that cannot be shown"
    text = " ".join(text.split("\n"))
    return text if len(text) <= 100 else f"{text[:100]}..."


def printable(text: str) -> str:
    """Return any text in a form that can be printed next to the output of other tasks.

    Control characters, which move a terminal's cursor, and lone surrogates, which cannot be written to a file, are
    escaped; further lines are indented, so that none looks like a line of the run.
    """
    lines = text.expandtabs().splitlines()
    return "\n  ".join("".join(char if char.isprintable() else repr(char)[1:-1] for char in line) for line in lines)


def closest(word: str, options: Iterable[str]) -> str:
    """Return a sentence that names the option closest to `word`, or an empty string."""
    if not isinstance(word, str) or len(word) > 100:  # any value that a user took for a name
        return ""
    options = list(options)
    # `adamw` is the beginning of a name rather than a typo in another one.
    matches = [option for option in options if len(word) > 2 and option.startswith(f"{word}_")]
    if not matches:
        near = difflib.get_close_matches(word, options, n=3, cutoff=0.6)
        # Among equally close ones the same letters decide: `lroa` is `lora` rather than `road`.
        ratios = {option: difflib.SequenceMatcher(None, option, word).ratio() for option in near}
        matches = sorted(near, key=lambda option: (-ratios[option], sorted(option) != sorted(word)))
    return f'Did you mean "{matches[0]}"?' if matches else ""


def is_integer(value: object, least: float = -math.inf, most: float = math.inf) -> bool:
    """Whether a value is an integer from `least` to `most`; `True` and `False` are not."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def is_real(value: object) -> bool:
    """Whether a value is a finite number that a float can hold."""
    try:
        return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer beyond all floats
        return False


def is_text(value: object) -> bool:
    """Whether a value is a string of at least one character."""
    return isinstance(value, str) and bool(value)


class Rule(NamedTuple):
    """The values that a setting accepts.

    Attributes:
        is_valid: checks a value.
        allowed: the accepted values in words; continues "must be".
    """

    is_valid: Callable[[Any], bool]
    allowed: str


def rule_faults(values: Mapping[str, Any], rules: Mapping[str, Rule], prefix: str = "") -> list[Fault]:
    """Return a fault for each value that its rule does not accept; settings without a value or a rule have none.

    Args:
        values: values of settings, by name.
        rules: rules of settings, by name.
        prefix: dotted path of the settings, with a dot at its end.
    """
    return [
        Fault(f"{prefix}{name}", shown(values[name]), rule.allowed)
        for name, rule in rules.items()
        if name in values and not rule.is_valid(values[name])
    ]


if sys.version_info >= (3, 11):
    from enum import StrEnum
else:
    from enum import Enum

    class StrEnum(str, Enum):
        """String enumeration whose members print as their values."""

        __str__ = str.__str__


@cache
def installed_version(package: str) -> str | None:
    """Return the version of a distribution such as "peft-mux"; `None` if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None
