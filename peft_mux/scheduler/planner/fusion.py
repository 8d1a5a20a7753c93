"""Task fusion (M §3.3, Eq. 6): which neighbours in the order of token counts share an hTask; and grouping of hTasks.

`fuse` works on numbers alone: the latency of every hTask of consecutive tasks, infinite if memory forbids it. Latencies
(Eq. 4) and memory (Eq. 5) come from the cost model; the template orders and interleaves the hTasks.

Eq. 6 as printed, and what stands here:

* It writes H_{(i+1)->k} where k is not bound. The last hTask holds the tasks i+1 to m: H_{(i+1)->m}.
* It lets i reach m, which would be an hTask without tasks. Here i < m, so all N hTasks hold at least one task.
* It charges the hTask of the shortest tasks its whole latency L and every other one L / S, "one forward-backward pass".
  Under equal stages L = 2 (S - 1 + C) t by Eq. 4, so that L / S is what an hTask adds to the steady phase, 2 C t, for
  C = 1 only; for more micro-batches it is too little. And the template runs the *longest* hTask first (§3.4.1, rule 1),
  so that the warm-up is the longest one's. As printed, Eq. 6 therefore splits too much, and hides a long hTask behind a
  short one that is charged whole. Here the longest hTask is charged whole, every other one C / (S - 1 + C) of its
  latency: what it adds to the steady phase (Appendix A, lemma 2). `benchmarks/planner/fusion.py` compares both with the
  best of all partitions.
* Its charges add up, so that the best number of hTasks needs no state: O(M^2) time instead of O(M^3).

`group` is Eq. 7 (M §3.4), workload-balanced grouping: hTasks into buckets of similar first-stage latency. hTasks of one
bucket are interleaved within a pipeline clock, buckets across clocks. Here the number of buckets P is given; which P is
best is decided by simulation.

Eq. 7 minimises the sum over buckets of the squared deviation of their load from the mean load. The mean is the total
over P whatever the grouping, so that this is the sum of squared loads up to a constant, and that is what is minimised.
The paper names no method: the problem is NP-hard. Up to `EXACT_HTASKS` hTasks it is solved exactly by branch and bound;
beyond, by longest processing time first and then the best move or swap until none helps.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Interval = tuple[int, int]
"""Half-open range of tasks in fusion order: one hTask."""


def fuse(latency_s: NDArray[np.float64], num_stages: int, *, num_micro_batches: int) -> tuple[Interval, ...]:
    """Return the hTasks of least estimated latency, each a range of tasks, ascending, together all (M §3.3, Eq. 6).

    The result minimises share * sum(L) + (1 - share) * max(L) over all partitions into consecutive ranges. A bound on
    the longest latency makes the sum a shortest path; the bound is then searched for by branch and bound over the
    sorted latencies. D(bound), the least sum under a bound, never grows with the bound, so that a range of bounds
    lo..hi cannot give less than share * D(hi) + (1 - share) * lo.

    Args:
        latency_s: [M, M], seconds of 0 or more; entry [i, j] with j >= i is L(H_{i->j}) of Eq. 4 for tasks i to j, both
            included, counted from 0 by ascending tokens; inf if Eq. 5 says that they do not fit. Entries below the
            diagonal are not read.
        num_stages: S, stages of the pipeline.
        num_micro_batches: C of each hTask.

    Raises:
        ValueError: if a task does not fit alone.
    """
    latency = np.where(np.tri(len(latency_s), k=-1, dtype=bool), np.inf, latency_s)
    share = num_micro_batches / (num_stages - 1 + num_micro_batches)
    # The longest latency of any partition is an entry of the matrix: no other bound need be tried.
    bounds = np.unique(latency[np.isfinite(latency)])
    best: tuple[Interval, ...] = ()
    best_s = np.inf
    # What a range of bounds can give at best, its first and last bound, and the least sum under its last bound.
    ranges = [(0.0, 0, len(bounds) - 1, 0.0)]
    while ranges:
        least_s, low, high, least_sum_s = heapq.heappop(ranges)
        # Ranges come in the order of what they can give at best: if this one cannot win, none can.
        if low > high or least_s >= best_s:
            break
        # The first probe leaves the longest free: it shows whether anything fits, and is the answer for S = 1.
        middle = (low + high) // 2 if best else high
        intervals = cheapest_partition(np.where(latency <= bounds[middle], latency, np.inf))
        if intervals is not None:
            latencies = [float(latency[start, stop - 1]) for start, stop in intervals]
            sum_s, longest_s = sum(latencies), max(latencies)
            objective_s = share * sum_s + (1 - share) * longest_s
            if objective_s < best_s:
                best, best_s = intervals, objective_s
            # Down to its own longest, no lower bound gives a lower sum: continue below that.
            below = int(np.searchsorted(bounds, longest_s)) - 1
            if low <= below:
                heapq.heappush(ranges, (share * sum_s + (1 - share) * float(bounds[low]), low, below, sum_s))
        # Above the probe a sum may be as low as is known for the whole range, but the longest is the next bound or
        # more.
        if middle < high:
            above_s = share * least_sum_s + (1 - share) * float(bounds[middle + 1])
            heapq.heappush(ranges, (above_s, middle + 1, high, least_sum_s))
    if not best:
        task = int(np.argmax(np.isinf(latency.diagonal())))
        raise ValueError(
            f"latency_s[{task}, {task}] is inf: task {task} (in fusion order) does not fit in memory even "
            "alone. Give it smaller or more micro-batches, activation checkpointing, or more stages."
        )
    return best


def cheapest_partition(cost: NDArray[np.float64], num_htasks: int | None = None) -> tuple[Interval, ...] | None:
    """Return the partition of least summed cost, into any number of intervals or exactly `num_htasks`.

    `None` if all are infinite. Of equal ones the last interval is the largest.

    Args:
        cost: [M, M]; entry [i, j] is the cost of tasks i to j, both included; inf below the diagonal.
        num_htasks: the number of intervals; `None` for any.
    """
    num_tasks = len(cost)
    # Both recurrences read all starts of one stop; transposed, these lie side by side in memory.
    by_stop = np.ascontiguousarray(cost.T)
    least = np.full(num_tasks + 1, np.inf)
    least[0] = 0.0
    if num_htasks is None:
        # F(m) = min over i < m of F(i) + cost(i..m).
        starts = np.zeros((1, num_tasks), dtype=np.int64)
        for stop in range(1, num_tasks + 1):
            candidates = least[:stop] + by_stop[stop - 1, :stop]
            starts[0, stop - 1] = start = candidates.argmin()  # the smallest of equal ones
            least[stop] = candidates[start]
    else:
        # F(m, n) = min over i < m of F(i, n - 1) + cost(i..m).
        starts = np.zeros((num_htasks, num_tasks), dtype=np.int64)
        for number in range(num_htasks):
            candidates = least[:-1] + by_stop
            starts[number] = candidates.argmin(axis=1)
            least = np.concatenate(([np.inf], candidates.min(axis=1)))
    if not np.isfinite(least[num_tasks]):
        return None
    cuts = [num_tasks]
    while cuts[-1] > 0:
        cuts.append(int(starts[-len(cuts) % len(starts), cuts[-1] - 1]))
    return tuple(itertools.pairwise(cuts[::-1]))


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
    bucket_of_htask = [0] * len(order)
    for index, bucket in zip(order, best, strict=True):
        bucket_of_htask[index] = bucket
    return bucket_of_htask


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
