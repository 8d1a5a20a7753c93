"""Sums, maxima and minima over all ranges of consecutive tasks, as arrays `[M, M]`: entry [i, j] is of tasks i to j."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray


def range_sums(values: NDArray[Any]) -> NDArray[Any]:
    """Return the sum of each range of values `[M]`; 0 below the diagonal."""
    # Differences of prefix sums: all M^2 ranges cost no more than the array that holds them.
    ends = np.concatenate(([0.0], np.cumsum(values)))
    return np.triu(ends[None, 1:] - ends[:-1, None])


def range_maxima(values: NDArray[Any]) -> NDArray[Any]:
    """Return the largest of each range of values `[M]` of 0 or more; 0 below the diagonal."""
    return np.maximum.accumulate(np.triu(np.broadcast_to(values, (len(values), len(values)))), axis=1)


def range_minima(values: NDArray[Any]) -> NDArray[Any]:
    """Return the least of each range of values `[M]`; inf below the diagonal."""
    count = len(values)
    return np.minimum.accumulate(np.where(np.tri(count, k=-1, dtype=bool), np.inf, values[None, :]), axis=1)
