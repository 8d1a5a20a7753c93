"""`ReplicaRates`: how much slower each replica is than the others, learned from the time of its share of each step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

_WEIGHT = 0.3
"""Of the last step; a replica that becomes slow is known to 80 % after five."""
_LARGEST_STEP = math.log(4.0)
"""A single step moves a rate no further than this times `_WEIGHT`, in logarithms: one odd step does little."""
_GRAIN = 0.05
"""Rates that differ by less count as equal, so that equal replicas stay so."""


class ReplicaRates:
    """Follows the rates of replicas over the steps of a run; at first all are equally fast.

    Example:
        >>> rates = ReplicaRates(2)
        >>> for _ in range(20):
        ...     rates.observe(expected=[1.0, 1.0], measured=[0.5, 1.0])
        >>> rates.slowness
        (1.0, 2.0)
    """

    def __init__(self, num_replicas: int) -> None:
        self._logs = [0.0] * num_replicas

    @property
    def slowness(self) -> tuple[float, ...]:
        """Seconds that each replica takes for work that takes the fastest one 1 s."""
        fastest = min(self._logs)
        grains = [round((log - fastest) / _GRAIN) for log in self._logs]
        return tuple(round(math.exp(_GRAIN * number), 2) for number in grains)

    def observe(self, expected: Sequence[float], measured: Sequence[float]) -> None:
        """Compare the time of each replica with the predicted time of its share, from the same predictor for all.

        Nothing is learned of a replica without a share, or one that was not timed.

        Args:
            expected: what each share should take on a replica that is as fast as its kind, in any unit.
            measured: seconds that each replica took for its share.
        """
        logs = {
            number: math.log(took / should)
            for number, (should, took) in enumerate(zip(expected, measured, strict=True))
            if should > 0 and took > 0
        }
        # A rate is relative to the other replicas: with one alone, it may be the prediction that is off.
        if len(logs) < 2:
            return
        typical = median(logs.values()) - median(self._logs[number] for number in logs)
        for number, log in logs.items():
            change = log - typical - self._logs[number]
            self._logs[number] += _WEIGHT * max(-_LARGEST_STEP, min(_LARGEST_STEP, change))
