"""Checks of arguments that dispatch and deployment share."""

from __future__ import annotations


def check_at_least_one(**numbers: int) -> None:
    """Refuse numbers below 1.

    Args:
        numbers: each number by the name of the argument that it came in.

    Raises:
        ValueError: with the first of them that is below 1.
    """
    for field, number in numbers.items():
        if number < 1:
            raise ValueError(f"{field} is {number}; allowed: 1 or more.")
