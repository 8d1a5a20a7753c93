"""How far predicted times and memory may be off, and what tells so.

The bands of a measured profile and of memory are the worst errors of `benchmarks.planner.accuracy` that are stored in
`benchmarks/results/planner-accuracy*.json`, rounded up to whole 5 %: a test holds them to these files. They were found
with a backbone on a CPU. A profile from data sheets was never held against its device: what else runs there, the number
of threads and the rate that sizes as small as these reach make it an order of magnitude (a factor of 5 was seen on a
shared CPU).
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Band(NamedTuple):
    """Between which multiples of a predicted value the real one is expected.

    Attributes:
        low: least multiple.
        high: greatest multiple.
        words: the band in words.
        source: what the prediction is made from, and so the band.
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
