"""Workload-balanced grouping (M §3.4, Eq. 7): hTasks into buckets of similar first-stage latency.

hTasks of one bucket are interleaved within a pipeline clock, buckets across clocks. Here the number of buckets P is
given; which P is best is decided by simulation.

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
"""Up to this number of hTasks the grouping is optimal."""

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
    """
    latencies = [float(latency) for latency in latencies_s]
    assert 1 <= num_buckets <= len(latencies), "a bucket may not be empty"
    # The longest first, each into the bucket of least load; of equal ones the emptier one, so that none stays empty.
    loads, sizes = [0.0] * num_buckets, [0] * num_buckets
    bucket_of = [0] * len(latencies)
    for index in sorted(range(len(latencies)), key=lambda index: -latencies[index]):
        bucket = min(range(num_buckets), key=lambda number: (loads[number], sizes[number], number))
        bucket_of[index] = bucket
        loads[bucket] += latencies[index]
        sizes[bucket] += 1
    # With one bucket, or as many as hTasks, there is only one grouping.
    if 1 < num_buckets < len(latencies):
        bucket_of = _improved(latencies, bucket_of, num_buckets)
        if len(latencies) <= EXACT_HTASKS:
            bucket_of = _exact(latencies, bucket_of, num_buckets)
    buckets = [tuple(i for i, bucket in enumerate(bucket_of) if bucket == number) for number in range(num_buckets)]
    assert all(buckets), "a bucket is empty"
    return tuple(sorted(buckets, key=lambda bucket: (-math.fsum(latencies[index] for index in bucket), bucket)))


def _improved(latencies: Sequence[float], bucket_of: list[int], num_buckets: int) -> list[int]:
    """Make the move or swap that lowers the sum of squares most, until none does.

    Handing d seconds from load a to load b changes the sum of squares by 2 d (b - a + d). A move is a swap with
    nothing: the last column. A move never empties a bucket, as it helps only if a - b > d, and d is a's whole load.
    """
    weights = np.array(latencies, dtype=np.float64)
    # Seconds that each hTask (row) hands over in a swap with another one, or in a move (column).
    given = weights[:, None] - np.concatenate((weights, np.zeros(num_buckets)))[None, :]
    # Eq. 7 is in squared seconds, and so is what counts as rounding.
    tolerance = _LEAST_GAIN * float(weights.sum()) ** 2
    buckets = np.array(bucket_of)
    while True:
        loads = np.bincount(buckets, weights=weights, minlength=num_buckets)
        other = np.concatenate((buckets, np.arange(num_buckets)))
        change = 2 * given * (loads[other][None, :] - loads[buckets][:, None] + given)
        # A swap that hands over less than nothing is the same swap seen from its other side.
        change[(buckets[:, None] == other[None, :]) | (given <= 0)] = 0.0
        giver, taker = (int(index) for index in np.unravel_index(change.argmin(), change.shape))
        if not change[giver, taker] < -tolerance:
            return buckets.tolist()
        if taker < len(weights):
            buckets[[giver, taker]] = buckets[[taker, giver]]
        else:
            buckets[giver] = taker - len(weights)


def _exact(latencies: Sequence[float], bucket_of: list[int], num_buckets: int) -> list[int]:
    """Return the optimal grouping: hTasks by descending latency into every bucket of different load, with a bound."""
    # The longest first: they decide most of the loads, so that the bound cuts early.
    order = sorted(range(len(latencies)), key=lambda index: -latencies[index])
    weights = [latencies[index] for index in order]
    left_s = [math.fsum(weights[position:]) for position in range(len(weights) + 1)]
    loads, chosen = [0.0] * num_buckets, [0] * len(latencies)
    best = [bucket_of[index] for index in order]
    given = np.bincount(best, weights=weights, minlength=num_buckets)
    best_squares, least_gain = float(np.sum(given**2)), _LEAST_GAIN * left_s[0] ** 2

    def branch(position: int, num_open: int) -> None:
        """Try every bucket for the hTask at `position`; the first `num_open` buckets hold something."""
        nonlocal best, best_squares
        if _least_squares(loads, left_s[position]) >= best_squares - least_gain:
            return
        if position == len(weights):
            best, best_squares = chosen.copy(), sum(load * load for load in loads)
            return
        # With as many hTasks left as empty buckets, each of them has to open one.
        must_open = len(weights) - position <= num_buckets - num_open
        tried: list[float] = []
        for bucket in range(num_open if must_open else 0, min(num_open + 1, num_buckets)):
            load = loads[bucket]
            # A second bucket of equal load would only repeat the search under other numbers.
            if bucket < num_open and load in tried:
                continue
            tried.append(load)
            chosen[position], loads[bucket] = bucket, load + weights[position]
            branch(position + 1, max(num_open, bucket + 1))
            loads[bucket] = load

    branch(0, 0)
    found = [0] * len(order)
    for index, bucket in zip(order, best, strict=True):
        found[index] = bucket
    return found


def _least_squares(loads: Sequence[float], left_s: float) -> float:
    """Return the least sum of squares that `left_s` seconds, cut at will, can still lead to: filled up to one level."""
    ascending = sorted(loads)
    filled_s = left_s
    for count, load in enumerate(ascending, start=1):
        filled_s += load
        level = filled_s / count
        # Buckets above the level keep their load; those below are filled up to it.
        if count == len(ascending) or level <= ascending[count]:
            # level * filled_s is count * level ** 2.
            return level * filled_s + sum(above * above for above in ascending[count:])
    raise AssertionError("a grouping has no buckets")
