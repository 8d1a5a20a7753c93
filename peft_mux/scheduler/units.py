"""Amounts in words, for messages and tables."""

from __future__ import annotations


def bytes_text(num_bytes: float) -> str:
    """Return an amount of memory in the unit that suits it: GiB, MiB or KiB.

    Args:
        num_bytes: the amount in bytes; it may be negative.
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes / 2**10:.2f} KiB"


def seconds_text(seconds: float) -> str:
    """Return a time in the unit that suits it: ms, s, min or h, with three digits.

    Args:
        seconds: the time in seconds, 0 or more.
    """
    if seconds < 1.0:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 120.0:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"
