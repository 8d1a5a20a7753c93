"""Amounts in words, for messages and tables."""

from __future__ import annotations


def bytes_text(num_bytes: float) -> str:
    """Return an amount of memory in the unit that suits it: GiB, MiB or KiB."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes / 2**10:.2f} KiB"
