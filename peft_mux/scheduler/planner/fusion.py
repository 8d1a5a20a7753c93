"""Task fusion (M §3.3, Eq. 6): which neighbours in the order of token counts share an hTask.

It works on numbers alone: the latency of every hTask of consecutive tasks, infinite where memory forbids it. Latencies
(Eq. 4) and memory (Eq. 5) come from the cost model; how hTasks are ordered and interleaved is the template's part.

Eq. 6 as printed, and what stands here:

* It writes H_{(i+1)->k} where k is not bound. The last hTask holds the tasks i+1 to m: H_{(i+1)->m}.
* It lets i reach m, which would be an hTask without tasks. Here i < m, so all N hTasks hold at least one task.
* It charges the hTask of the shortest tasks its whole latency L and every other one L / S, "one forward-backward pass".
  Under equal stages L = 2 (S - 1 + C) t by Eq. 4, so that L / S is what an hTask adds to the steady phase, 2 C t, for
  C = 1 only; for more micro-batches it is too little. And the template runs the *longest* hTask first (§3.4.1, rule 1),
  so that the warm-up is the longest one's. As printed, Eq. 6 therefore splits too much, and hides a long hTask behind a
  short one that is charged whole. Here the longest hTask is charged whole by default, every other one a share of its
  latency: C / (S - 1 + C) where C is given, else the paper's 1 / S. `charged_whole="lowest"` without C is Eq. 6 as
  printed. `benchmarks/planner/fusion.py` compares them with the best of all partitions.
* Its charges add up, so that the best number of hTasks needs no state: O(M^2) time instead of O(M^3).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Interval = tuple[int, int]
"""Half-open range of tasks in fusion order: one hTask."""

ChargedWhole = Literal["longest", "lowest"]
"""Which hTask counts with its whole latency: the one of greatest latency, or the one of the shortest tasks."""


@dataclass(frozen=True, slots=True)
class Fusion:
    """Tasks fused into hTasks.

    Attributes:
        intervals: one half-open range of tasks per hTask, ascending, together all tasks.
        objective_s: estimated latency of an iteration: one hTask whole, the share of all others, in seconds.
    """

    intervals: tuple[Interval, ...]
    objective_s: float


def fusion_order(tokens: Sequence[float]) -> tuple[int, ...]:
    """Return the indices of tasks by ascending token count, equal ones by index (M §3.3).

    Args:
        tokens: tokens of each task in a step.

    Raises:
        ValueError: for a count that is negative or no number.
    """
    for index, count in enumerate(tokens):
        # Written this way round so that NaN is refused as well.
        if not count >= 0:
            raise ValueError(f"tokens[{index}] is {count}; allowed: 0 or more. Give each task's tokens.")
    return tuple(sorted(range(len(tokens)), key=lambda index: tokens[index]))


def share_of_others(num_stages: int, num_micro_batches: int | None = None) -> float:
    """Return the part of its latency that an hTask not charged whole adds to an iteration.

    Of L = 2 (S - 1 + C) t (Eq. 4 with S equal stages of t seconds) the steady phase takes 2 C t, which every hTask adds
    (Appendix A, lemma 2); warm-up and drain, 2 (S - 1) t, are paid once. Stages that are not equal have a shorter
    warm-up, and so a somewhat greater share than this.

    Args:
        num_stages: S, stages of the pipeline.
        num_micro_batches: C of each hTask; without it the share is 1 / S, as in Eq. 6.

    Raises:
        ValueError: if either is below 1.
    """
    if num_stages < 1:
        raise ValueError(f"num_stages is {num_stages}; allowed: 1 or more. One device is one stage.")
    if num_micro_batches is None:
        return 1 / num_stages
    if num_micro_batches < 1:
        raise ValueError(f"num_micro_batches is {num_micro_batches}; allowed: 1 or more, or None for the share 1 / S.")
    return num_micro_batches / (num_stages - 1 + num_micro_batches)


def fuse(
    latency_s: NDArray[Any],
    num_stages: int,
    *,
    num_micro_batches: int | None = None,
    charged_whole: ChargedWhole = "longest",
) -> Fusion:
    """Fuse tasks into the hTasks of least estimated latency (M §3.3, Eq. 6).

    The result is the best of all partitions into consecutive ranges. Among equal ones the last hTask is the largest.

    Args:
        latency_s: [M, M], seconds; entry [i, j] with j >= i is L(H_{i->j}) of Eq. 4 for tasks i to j, both included,
            counted from 0 in `fusion_order`; inf where Eq. 5 says that they do not fit. Entries below the diagonal are
            not read.
        num_stages: S, stages of the pipeline.
        num_micro_batches: C of each hTask, or None for the share 1 / S of Eq. 6. Give it where it is known.
        charged_whole: which hTask counts with its whole latency: "longest", or "lowest" as in Eq. 6.

    Returns:
        The hTasks and their objective.

    Raises:
        ValueError: for a matrix that is not square, empty, or has negative or undefined entries; for numbers below 1;
            and where a task does not fit alone.
    """
    latency = _checked(latency_s)
    return _fuse(latency, share_of_others(num_stages, num_micro_batches), charged_whole, num_htasks=None)


def fuse_into(
    latency_s: NDArray[Any],
    num_stages: int,
    num_htasks: int,
    *,
    num_micro_batches: int | None = None,
    charged_whole: ChargedWhole = "longest",
) -> Fusion:
    """Fuse tasks into exactly `num_htasks` hTasks: F(M, N) of Eq. 6 for one N.

    With the longest charged whole this takes O(N M^2) time for each of some tens of probes: meant for tens of tasks.

    Args:
        latency_s: [M, M], seconds of the hTask of each range of tasks, as in `fuse`.
        num_stages: S, stages of the pipeline.
        num_htasks: N, between 1 and the number of tasks.
        num_micro_batches: C of each hTask, or None for the share 1 / S of Eq. 6.
        charged_whole: which hTask counts with its whole latency: "longest", or "lowest" as in Eq. 6.

    Raises:
        ValueError: as in `fuse`, for N out of range, and where memory does not allow so few hTasks.
    """
    latency = _checked(latency_s)
    if not 1 <= num_htasks <= len(latency):
        raise ValueError(f"num_htasks is {num_htasks}; allowed: 1 to {len(latency)}, the number of tasks.")
    return _fuse(latency, share_of_others(num_stages, num_micro_batches), charged_whole, num_htasks)


def _fuse(latency: NDArray[np.float64], share: float, charged_whole: ChargedWhole, num_htasks: int | None) -> Fusion:
    if _is_longest(charged_whole):
        intervals = _search_longest(latency, share, num_htasks)
    else:
        # Only the lowest hTask begins with task 0, so that charging it whole keeps the charges additive.
        cost = share * latency
        cost[0] = latency[0]
        intervals = _cheapest(cost, num_htasks)
    if intervals is None:
        raise ValueError(_reason_of_failure(latency, num_htasks))
    latencies = _latencies(latency, intervals)
    whole = max(latencies) if _is_longest(charged_whole) else latencies[0]
    return Fusion(intervals, _weighted_sum(share, sum(latencies), whole))


def _search_longest(latency: NDArray[np.float64], share: float, num_htasks: int | None) -> tuple[Interval, ...] | None:
    """Return the partition that minimises share * sum(L) + (1 - share) * max(L), or None where none fits.

    A bound on the longest latency makes the sum a shortest path; the bound is then searched for by branch and bound
    over the sorted latencies. D(bound), the least sum under a bound, never grows with the bound, so that a range of
    bounds lo..hi cannot give less than share * D(hi) + (1 - share) * lo.
    """
    # The longest latency of any partition is an entry of the matrix: no other bound need be tried.
    bounds = np.unique(latency[np.isfinite(latency)])
    best_s: float = np.inf
    best: tuple[Interval, ...] | None = None
    ranges = [(0.0, 0, len(bounds) - 1, 0.0)] if len(bounds) else []
    while ranges:
        least_s, low, high, least_sum_s = heapq.heappop(ranges)
        # Ranges come in the order of what they can give at best: where this one cannot win, none can.
        if least_s >= best_s:
            break
        # The first probe leaves the longest free: it tells whether anything fits, and is the answer for S = 1.
        middle = high if best is None else (low + high) // 2
        intervals = _cheapest(np.where(latency <= bounds[middle], latency, np.inf), num_htasks)
        if intervals is not None:
            latencies = _latencies(latency, intervals)
            sum_s, longest_s = sum(latencies), max(latencies)
            if (found_s := _weighted_sum(share, sum_s, longest_s)) < best_s:
                best_s, best = found_s, intervals
            # Down to its own longest, no lower bound gives a lower sum: go on below that.
            below = int(np.searchsorted(bounds, longest_s)) - 1
            if low <= below:
                heapq.heappush(ranges, (_weighted_sum(share, sum_s, float(bounds[low])), low, below, sum_s))
        # Above the probe a sum may be as low as is known for the whole range, but the longest is the next bound or
        # more.
        if middle < high:
            above_s = _weighted_sum(share, least_sum_s, float(bounds[middle + 1]))
            heapq.heappush(ranges, (above_s, middle + 1, high, least_sum_s))
    return best


def _cheapest(cost: NDArray[np.float64], num_htasks: int | None) -> tuple[Interval, ...] | None:
    """Return the partition of least summed cost, of any number of intervals or exactly `num_htasks`."""
    # Both recurrences read all starts of one stop; transposed, these lie side by side in memory.
    by_stop = np.ascontiguousarray(cost.T)
    cuts = _cuts(by_stop) if num_htasks is None else _cuts_into(by_stop, num_htasks)
    return None if cuts is None else tuple(zip(cuts[:-1], cuts[1:], strict=True))


def _cuts(by_stop: NDArray[np.float64]) -> list[int] | None:
    """Solve F(m) = min over i < m of F(i) + cost(i..m); return the cuts from 0 to M."""
    num_tasks = len(by_stop)
    least = np.full(num_tasks + 1, np.inf)
    least[0] = 0.0
    start_of = np.zeros(num_tasks + 1, dtype=np.int64)
    for stop in range(1, num_tasks + 1):
        candidates = least[:stop] + by_stop[stop - 1, :stop]
        # Of equal ones argmin takes the smallest start, which makes the last hTask the largest.
        start_of[stop] = start = candidates.argmin()
        least[stop] = candidates[start]
    if not np.isfinite(least[num_tasks]):
        return None
    cuts = [num_tasks]
    while cuts[-1] > 0:
        cuts.append(int(start_of[cuts[-1]]))
    return cuts[::-1]


def _cuts_into(by_stop: NDArray[np.float64], num_htasks: int) -> list[int] | None:
    """Solve F(m, n) = min over i < m of F(i, n - 1) + cost(i..m); return the cuts from 0 to M."""
    num_tasks = len(by_stop)
    least = np.full(num_tasks + 1, np.inf)
    least[0] = 0.0
    start_of = np.zeros((num_htasks, num_tasks), dtype=np.int64)
    for number in range(num_htasks):
        # Entries of starts at or after their stop are infinite, so that no interval is empty.
        candidates = least[:-1] + by_stop
        start_of[number] = candidates.argmin(axis=1)
        least = np.concatenate(([np.inf], candidates.min(axis=1)))
    if not np.isfinite(least[num_tasks]):
        return None
    cuts = [num_tasks]
    for number in reversed(range(num_htasks)):
        cuts.append(int(start_of[number, cuts[-1] - 1]))
    return cuts[::-1]


def _latencies(latency: NDArray[np.float64], intervals: Sequence[Interval]) -> list[float]:
    return [float(latency[start, stop - 1]) for start, stop in intervals]


def _weighted_sum(share: float, sum_s: float, whole_s: float) -> float:
    # The one that counts whole is in the sum already, with its share.
    return share * sum_s + (1 - share) * whole_s


def _is_longest(charged_whole: str) -> bool:
    if charged_whole not in ("longest", "lowest"):
        raise ValueError(f"charged_whole is {charged_whole!r}; allowed: 'longest', or 'lowest' as in Eq. 6.")
    return charged_whole == "longest"


def _checked(latency_s: NDArray[Any]) -> NDArray[np.float64]:
    """Return a copy with inf below the diagonal, where nothing is read."""
    latency = np.array(latency_s, dtype=np.float64)
    if latency.ndim != 2 or latency.shape[0] != latency.shape[1] or not latency.size:
        raise ValueError(f"latency_s has shape {latency.shape}; allowed: [M, M] with one row per task, M >= 1.")
    latency[np.tril_indices(len(latency), k=-1)] = np.inf
    wrong = np.argwhere(~(latency >= 0))
    if len(wrong):
        start, last = (int(index) for index in wrong[0])
        raise ValueError(
            f"latency_s[{start}, {last}] is {latency[start, last]}; allowed: 0 or more, in seconds, or inf for "
            "an hTask that does not fit."
        )
    return latency


def _reason_of_failure(latency: NDArray[np.float64], num_htasks: int | None) -> str:
    """Say why nothing fits: the first task that does not fit alone, or too few hTasks."""
    alone = np.flatnonzero(np.isinf(latency.diagonal()))
    # Where every hTask costs 1, the cheapest fusion is the one of fewest hTasks.
    fewest = _cheapest(np.where(np.isinf(latency), np.inf, 1.0), None)
    if fewest is None:
        return (
            f"latency_s[{alone[0]}, {alone[0]}] is inf: task {alone[0]} (in fusion order) does not fit in memory even "
            "alone. Give it smaller or more micro-batches, activation checkpointing, or more stages."
        )
    return (
        f"num_htasks is {num_htasks}, but no such fusion fits in memory; the fewest hTasks that fit are {len(fewest)}. "
        "Ask for as many, or for smaller micro-batches."
    )
