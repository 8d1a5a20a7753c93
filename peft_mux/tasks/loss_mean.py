"""The mean loss of a task, and the means of what is logged beside it, since they were last read."""

from __future__ import annotations

from collections.abc import Sequence

import torch


class LossMean:
    """Mean of a task's losses since it was last read."""

    def __init__(self) -> None:
        """Start empty."""
        self.total = 0.0
        self.count = 0

    def add(self, loss: float) -> None:
        """Take one step's loss in."""
        self.total += loss
        self.count += 1

    def read(self) -> float | None:
        """Return the mean and start anew; `None` when nothing was added."""
        if self.count == 0:
            return None
        mean = self.total / self.count
        self.total, self.count = 0.0, 0
        return mean


class StatisticsMean:
    """Means of a task's statistics since they were last read; they stay on the device until then.

    One that is not a number was of nothing in that step (rewards of good answers where all are bad) and does not count.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._totals: torch.Tensor | None = None

    def add(self, statistics_K: torch.Tensor) -> None:
        """Take the statistics `[K]` of one step in."""
        own = torch.stack([statistics_K.double().nan_to_num(nan=0.0), (~statistics_K.isnan()).double()])
        self._totals = own if self._totals is None else self._totals + own

    def read(self, names: Sequence[str]) -> dict[str, float]:
        """Return the means by name and start anew; nothing of what was of nothing in all steps."""
        if self._totals is None:
            return {}
        sums, counts = self._totals.tolist()
        self._totals = None
        return {name: total / count for name, total, count in zip(names, sums, counts, strict=True) if count}
