"""Task fusion (M §3.3, Eq. 6): which neighbours in the order of token counts share an hTask.

It works on numbers alone: the latency of every hTask of consecutive tasks, infinite if memory forbids it. Latencies
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
"""

from __future__ import annotations

import heapq
import itertools

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
