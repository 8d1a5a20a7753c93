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
    """Means of a task's statistics since they were last read; they stay on the device until then."""

    def __init__(self) -> None:
        """Start empty."""
        self._total: torch.Tensor | None = None
        self._count = 0

    def add(self, statistics_K: torch.Tensor) -> None:
        """Take the statistics `[K]` of one step in."""
        self._total = statistics_K if self._total is None else self._total + statistics_K
        self._count += 1

    def read(self, names: Sequence[str]) -> dict[str, float]:
        """Return the means by name and start anew; nothing where nothing was added."""
        if self._total is None:
            return {}
        values = (self._total.double() / self._count).tolist()
        self._total, self._count = None, 0
        return dict(zip(names, values, strict=True))
