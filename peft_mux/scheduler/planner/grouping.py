"""Workload-balanced grouping (M §3.4, Eq. 7): hTasks into buckets of like first-stage latency.

hTasks of one bucket are interleaved within a pipeline clock, buckets across clocks. Which number of buckets P is best
is for the orchestration to find out; here P is given.

Eq. 7 minimises the sum over buckets of the squared deviation of their load from the mean load. The mean is the total
over P whatever the grouping, so that this is the sum of squared loads up to a constant, and that is what is minimised.
The paper names no method: the problem is NP-hard. Up to `EXACT_HTASKS` hTasks it is solved exactly by branch and bound;
beyond, by longest processing time first and then the best move or swap until none helps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

EXACT_HTASKS = 10
"""Up to as many hTasks the grouping is the best there is."""

_LEAST_GAIN = 1e-12
"""Part of the squared total below which a change counts as rounding."""

Buckets = tuple[tuple[int, ...], ...]


def group(latencies_s: Sequence[float], num_buckets: int) -> Buckets:
    """Group hTasks into buckets of balanced load (M §3.4, Eq. 7).

    Args:
        latencies_s: L^(1)(H_i), first-stage latency of each hTask, in seconds.
        num_buckets: P, between 1 and the number of hTasks.

    Returns:
        For each bucket the indices of its hTasks, ascending; buckets by descending load, as the template runs them
        (§3.4.1, rule 1), equal ones by their first hTask. No bucket is empty.

    Raises:
        ValueError: for P out of range, or a latency that is negative or not finite.
    """
    latencies = _checked(latencies_s, num_buckets)
    bucket_of = _longest_first(latencies, num_buckets)
    # With one bucket, or as many as hTasks, there is only one grouping.
    if 1 < num_buckets < len(latencies):
        bucket_of = _improve(latencies, bucket_of, num_buckets)
        if len(latencies) <= EXACT_HTASKS:
            bucket_of = _BranchAndBound(latencies, num_buckets, bucket_of).solve()
    return _as_buckets(latencies, bucket_of, num_buckets)


def _descending(latencies: Sequence[float]) -> list[int]:
    return sorted(range(len(latencies)), key=lambda index: -latencies[index])


def _longest_first(latencies: Sequence[float], num_buckets: int) -> list[int]:
    """Return the bucket of each hTask; among buckets of equal load the emptier one, so that none stays empty."""
    loads, sizes = [0.0] * num_buckets, [0] * num_buckets
    bucket_of = [0] * len(latencies)
    for index in _descending(latencies):
        bucket = min(range(num_buckets), key=lambda number: (loads[number], sizes[number], number))
        bucket_of[index] = bucket
        loads[bucket] += latencies[index]
        sizes[bucket] += 1
    return bucket_of


def _improve(latencies: Sequence[float], bucket_of: list[int], num_buckets: int) -> list[int]:
    """Make the move or swap that lowers the sum of squares most, until none does.

    To hand d seconds from load a to load b changes the sum of squares by 2 d (b - a + d). A move is a swap with
    nothing: the last column. A move never empties a bucket, as it helps only where a - b > d, and d is a's whole load.
    """
    weights = np.array(latencies, dtype=np.float64)
    # Seconds that each hTask (row) hands over in a swap with another one, or in a move (column).
    given = weights[:, None] - np.concatenate((weights, np.zeros(num_buckets)))[None, :]
    # Eq. 7 is in squared seconds, and so is what counts as rounding.
    tolerance = _LEAST_GAIN * float(weights.sum()) ** 2
    buckets = np.array(bucket_of)
    while True:
        loads = np.bincount(buckets, weights=weights, minlength=num_buckets)
        load_to = loads[np.concatenate((buckets, np.arange(num_buckets)))]
        change = 2 * given * (load_to[None, :] - loads[buckets][:, None] + given)
        same = buckets[:, None] == np.concatenate((buckets, np.arange(num_buckets)))[None, :]
        # A swap that hands over less than nothing is the same swap seen from its other side.
        change[same | (given <= 0)] = 0.0
        giver, taker = (int(index) for index in np.unravel_index(change.argmin(), change.shape))
        if not change[giver, taker] < -tolerance:
            return [int(bucket) for bucket in buckets]
        if taker < len(weights):
            buckets[[giver, taker]] = buckets[[taker, giver]]
        else:
            buckets[giver] = taker - len(weights)


class _BranchAndBound:
    """Exact grouping: hTasks by descending latency into every bucket of different load, cut off by a bound.

    Args:
        latencies: first-stage latency of each hTask, in seconds.
        num_buckets: P, between 1 and the number of hTasks.
        bucket_of: the bucket of each hTask in a first grouping, which is kept unless a better one is found.
    """

    def __init__(self, latencies: Sequence[float], num_buckets: int, bucket_of: list[int]) -> None:
        # The longest first: they decide most of the loads, so that the bound cuts early.
        self._order = _descending(latencies)
        self._weights = [latencies[index] for index in self._order]
        self._left_s = [math.fsum(self._weights[position:]) for position in range(len(self._weights) + 1)]
        self._loads = [0.0] * num_buckets
        self._chosen = [0] * len(latencies)
        self._best = [bucket_of[index] for index in self._order]
        self._least_gain = _LEAST_GAIN * self._left_s[0] ** 2
        loads = [0.0] * num_buckets
        for weight, bucket in zip(self._weights, self._best, strict=True):
            loads[bucket] += weight
        self._best_squares = sum(load * load for load in loads)

    def solve(self) -> list[int]:
        """Return the bucket of each hTask."""
        self._branch(0, 0)
        bucket_of = [0] * len(self._order)
        for index, bucket in zip(self._order, self._best, strict=True):
            bucket_of[index] = bucket
        return bucket_of

    def _branch(self, position: int, num_open: int) -> None:
        """Try every bucket for the hTask at `position`; the first `num_open` buckets hold something."""
        num_buckets = len(self._loads)
        if _least_squares(self._loads, self._left_s[position]) >= self._best_squares - self._least_gain:
            return
        if position == len(self._weights):
            self._best, self._best_squares = self._chosen.copy(), sum(load * load for load in self._loads)
            return
        weight = self._weights[position]
        # With as many hTasks left as empty buckets, each of them has to open one.
        must_open = len(self._weights) - position <= num_buckets - num_open
        tried: list[float] = []
        for bucket in range(num_open if must_open else 0, min(num_open + 1, num_buckets)):
            load = self._loads[bucket]
            # Buckets of equal load are alike: a second one would only repeat the search under other numbers.
            if bucket < num_open and load in tried:
                continue
            tried.append(load)
            self._chosen[position], self._loads[bucket] = bucket, load + weight
            self._branch(position + 1, max(num_open, bucket + 1))
            self._loads[bucket] = load


def _least_squares(loads: Sequence[float], left_s: float) -> float:
    """Return the least sum of squares that `left_s` seconds, cut at will, can still lead to: filled up to one level."""
    ascending = sorted(loads)
    filled_s = left_s
    for count, load in enumerate(ascending, start=1):
        filled_s += load
        level = filled_s / count
        # Buckets that lie above the level already keep their load; those below are filled up to it.
        if count == len(ascending) or level <= ascending[count]:
            # level * filled_s is count * level ** 2.
            return level * filled_s + sum(above * above for above in ascending[count:])
    raise AssertionError("a grouping has no buckets")


def _as_buckets(latencies: Sequence[float], bucket_of: Sequence[int], num_buckets: int) -> Buckets:
    buckets = [tuple(i for i, bucket in enumerate(bucket_of) if bucket == number) for number in range(num_buckets)]
    assert all(buckets), "a bucket is empty"
    return tuple(sorted(buckets, key=lambda bucket: (-math.fsum(latencies[index] for index in bucket), bucket)))


def _checked(latencies_s: Sequence[float], num_buckets: int) -> list[float]:
    latencies = [float(latency) for latency in latencies_s]
    for index, latency in enumerate(latencies):
        if not 0 <= latency < math.inf:
            raise ValueError(
                f"latencies_s[{index}] is {latency}; allowed: finite, 0 or more, in seconds. "
                "Group only hTasks that fit in memory."
            )
    if not latencies:
        raise ValueError("latencies_s is empty; allowed: one latency per hTask, at least one. Fuse tasks first.")
    if not 1 <= num_buckets <= len(latencies):
        raise ValueError(
            f"num_buckets is {num_buckets}; allowed: 1 to {len(latencies)}, the number of hTasks. "
            "A bucket may not be empty."
        )
    return latencies
