"""`Parts`: the parts of a step that are timed apart: six numbers, which are seconds, or factors over a profile's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple


class Parts(NamedTuple):
    """One number for each part of a step.

    Attributes:
        fixed: what a pass takes whatever its size.
        tokens: what grows with tokens in the backbone: layers without attention products, embedding, output head.
        attention: attention products, which grow with the square of lengths, and their launches.
        adapters: adapters of all tasks in a pass.
        communication: sums and gatherings over devices within a pass, and messages between stages.
        optimizer: what lies between the passes of two steps: updates, and the step's own overhead.
    """

    fixed: float = 0.0
    tokens: float = 0.0
    attention: float = 0.0
    adapters: float = 0.0
    communication: float = 0.0
    optimizer: float = 0.0

    @property
    def total(self) -> float:
        """The sum: seconds of all parts together."""
        return sum(self)

    def times(self, factors: Parts) -> Parts:
        """Return these seconds, each part by its factor.

        Args:
            factors: what each part is multiplied by.
        """
        return Parts(*(own * factor for own, factor in zip(self, factors, strict=True)))

    def __str__(self) -> str:
        """Return the numbers in words, two decimals each."""
        return ", ".join(f"{name} {value:.2f}" for name, value in self._asdict().items())


AS_PROFILED = Parts(1.0, 1.0, 1.0, 1.0, 1.0, 1.0)
"""The factors of a profile that holds as it is."""


def summed(parts: Iterable[Parts]) -> Parts:
    """Return the sum of seconds of several passes, part by part."""
    return Parts(*(sum(column) for column in zip(*parts, strict=True)))


def factors_of(numbers: Mapping[str, Any]) -> Parts | None:
    """Return factors that were written as a mapping by name; `None` where one is missing or is no factor.

    Args:
        numbers: a factor for each part, by its name.
    """
    values = [numbers.get(name) for name in Parts._fields]
    if any(isinstance(value, bool) or not isinstance(value, (int, float)) for value in values):
        return None
    factors = Parts(*(float(value) for value in values if value is not None))
    return factors if all(1e-6 < factor < 1e6 for factor in factors) else None
