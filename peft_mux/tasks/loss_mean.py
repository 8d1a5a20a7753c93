"""The mean loss of a task since it was last read."""

from __future__ import annotations


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
