"""Amounts in words, aligned tables, and how far predicted times and memory may be off.

The bands of a measured profile and of memory are the worst errors of `benchmarks.planner.accuracy` that are stored in
`benchmarks/results/planner-accuracy*.json`, rounded up to whole 5 %; a test compares them with these files. They were
measured with a backbone on a CPU. A profile from data sheets was never compared with its device: other processes, the
number of threads and the low rates of such small sizes make it an order of magnitude (a factor of 5 was seen on a
shared CPU).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple


def aligned(rows: Sequence[Sequence[str]], left: Collection[int] = (0,), indent: str = "") -> list[str]:
    """Return rows of cells as lines; the columns in `left` begin below each other, the others end below each other."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        pairs = enumerate(zip(row, widths, strict=True))
        cells = [cell.ljust(width) if column in left else cell.rjust(width) for column, (cell, width) in pairs]
        lines.append(indent + "  ".join(cells).rstrip())
    return lines


def bytes_text(num_bytes: float) -> str:
    """Return an amount of memory in the unit that suits it: GiB, MiB or KiB.

    Args:
        num_bytes: the amount in bytes; it may be negative.
    """
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if abs(num_bytes) >= size:
            return f"{num_bytes / size:.2f} {unit}"
    return f"{num_bytes / 2**10:.2f} KiB"


def rate_text(tokens_per_s: float | None) -> str:
    """Return a rate in a few characters, such as 9.8k; "-" for none."""
    if tokens_per_s is None:
        return "-"
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if tokens_per_s >= 10 * size or (unit == "M" and tokens_per_s >= size):
            return f"{tokens_per_s / size:.1f}{unit}"
    return f"{tokens_per_s:,.0f}"


def seconds_text(seconds: float, digits: int = 3) -> str:
    """Return a time in the unit that suits it: ms, s, min or h.

    Args:
        seconds: the time in seconds, 0 or more.
        digits: significant digits.
    """
    units = ((1.0, 1e-3, "ms"), (120.0, 1.0, "s"), (7200.0, 60.0, "min"), (math.inf, 3600.0, "h"))
    unit_s, name = next((unit_s, name) for limit_s, unit_s, name in units if seconds < limit_s)
    # Rounded before it is printed, as one digit of 95 would be printed as 1e+02.
    return f"{float(f'{seconds / unit_s:.{digits}g}'):g} {name}"


RELATIVE_ROUNDING = 1e-9
"""Relative difference of two times that is rounding; a search that followed smaller gains might never end."""


class Band(NamedTuple):
    """The multiples of a predicted value between which the real one is expected.

    Attributes:
        low: least multiple.
        high: greatest multiple.
        words: the band in words.
        source: what the prediction is made from.
    """

    low: float
    high: float
    words: str
    source: str

    def holds(self, ratio: float) -> bool:
        """Whether a real value of so many times the predicted one lies within."""
        return self.low <= ratio <= self.high

    def around(self, value: float) -> dict[str, Any]:
        """Return a predicted value with its bounds and its source, for JSON."""
        return {"predicted": value, "low": self.low * value, "high": self.high * value, "source": self.source}


MEASURED_TIME = Band(0.85, 1.15, "+-15 %", "measured profile")
ANALYTIC_TIME = Band(0.1, 10.0, "(order of magnitude)", "analytic profile")
MEMORY = Band(0.85, 1.15, "+-15 %", "analytic estimate")


def time_band(profile_source: str) -> Band:
    """Return the band of times that are predicted from a profile, "measured" or "analytic"."""
    return MEASURED_TIME if profile_source == "measured" else ANALYTIC_TIME


def step_time_text(seconds: float, profile_source: str) -> str:
    """Return the predicted time of a step with as many digits as are known, and how far it may be off."""
    band = time_band(profile_source)
    return f"{seconds_text(seconds, 3 if band is MEASURED_TIME else 1)} a step {band.words}"
