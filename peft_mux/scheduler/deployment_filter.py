"""Which deployments are worth solving: the second heuristic of L section 4.2 (lower-bound filtering), and an exact cut.

All deployments are enumerated lazily, twice: once for the least bound of Theorem 1, and once to keep what is near it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from peft_mux.scheduler.deployment_bounds import PlanBounds
from peft_mux.scheduler.deployment_solve import greedy_s, restrict
from peft_mux.scheduler.deployment_space import enumerate_plans
from peft_mux.scheduler.dispatch_problem import DispatchProblem

_TRIED_PER_BLOCK = 4
"""Deployments of each block on which the rules are tried, for an early time to cut by."""
_EQUAL = 1e-9
"""Relative difference of two times that is rounding."""


@dataclass(frozen=True, slots=True, eq=False)
class Bounded:
    """Deployments and their bounds.

    Attributes:
        counts: replicas of each configuration, int64 of shape `(plans, candidates)`.
        length_based_s: by Theorem 1, float64 of shape `(plans,)`.
        bounds_s: valid without premises, likewise.
    """

    counts: np.ndarray
    length_based_s: np.ndarray
    bounds_s: np.ndarray

    def __len__(self) -> int:
        return len(self.counts)

    def take(self, rows: np.ndarray) -> Bounded:
        """Return some of them, by index or mask."""
        return Bounded(self.counts[rows], self.length_based_s[rows], self.bounds_s[rows])


@dataclass(frozen=True, slots=True, eq=False)
class Filtered:
    """Deployments that are left to solve, and those that are not.

    Attributes:
        kept: left to solve, least bound first but for rounding.
        over_threshold: dropped by Theorem 1; some, least bound first.
        out_of_reach: dropped as another is known to be faster than their bound; likewise.
        num_enumerated: all.
        num_too_short: without a replica that supports the longest bucket.
        num_over_threshold: dropped by Theorem 1.
        num_out_of_reach: dropped by a bound without premises.
    """

    kept: Bounded
    over_threshold: Bounded
    out_of_reach: Bounded
    num_enumerated: int
    num_too_short: int
    num_over_threshold: int
    num_out_of_reach: int


def filter_plans(full: DispatchProblem, num_gpus: int, threshold: float | None, max_dropped: int) -> Filtered:
    """Return the deployments of `num_gpus` that are left by their bounds.

    The paper drops what is above "the current minimum" by more than the threshold; the minimum here is that of all
    deployments, so that the order of enumeration does not matter.

    Args:
        full: with one group for each candidate configuration.
        num_gpus: N.
        threshold: relative; None keeps every deployment that supports the longest bucket.
        max_dropped: how many of those dropped for either reason are returned.
    """
    bounds = PlanBounds(full)
    num_enumerated, num_feasible, least_s = _survey(bounds, num_gpus)
    limit_s = np.inf if threshold is None else least_s * (1 + threshold)
    known_s = np.inf
    nothing = Bounded(np.zeros((0, len(full.num_gpus)), dtype=np.int64), np.zeros(0), np.zeros(0))
    kept, over_threshold, out_of_reach = [nothing], nothing, nothing
    num_within = 0
    for _, counts in _feasible_blocks(bounds, num_gpus):
        block = Bounded(counts, bounds.length_based_s(counts), bounds.cheapest_s(counts))
        within = block.length_based_s <= limit_s
        over_threshold = _least([over_threshold, block.take(~within)], max_dropped)
        block = block.take(within)
        num_within += len(block)
        if threshold is not None:
            tried = np.argsort(block.bounds_s, kind="stable")[:_TRIED_PER_BLOCK]
            known_s = min([known_s, *(greedy_s(restrict(full, row)) for row in block.counts[tried])])
        reachable = block.bounds_s <= known_s * (1 + _EQUAL)
        out_of_reach = _least([out_of_reach, block.take(~reachable)], max_dropped)
        kept.append(block.take(reachable))
    block = _joined(kept)
    block = Bounded(block.counts, block.length_based_s, np.fmax(block.bounds_s, bounds.dual_s(block.counts)))
    block = block.take(_best_first(block.bounds_s, bounds.dual_s(block.counts, rounding=False)))
    reachable = block.bounds_s <= known_s * (1 + _EQUAL)
    return Filtered(
        kept=block.take(reachable),
        over_threshold=over_threshold,
        out_of_reach=_least([out_of_reach, block.take(~reachable)], max_dropped),
        num_enumerated=num_enumerated,
        num_too_short=num_enumerated - num_feasible,
        num_over_threshold=num_feasible - num_within,
        num_out_of_reach=num_within - int(reachable.sum()),
    )


def _survey(bounds: PlanBounds, num_gpus: int) -> tuple[int, int, float]:
    """Return how many deployments there are, how many support the longest bucket, and the least bound of Theorem 1."""
    num_enumerated = num_feasible = 0
    least_s = np.inf
    for block, counts in _feasible_blocks(bounds, num_gpus):
        num_enumerated += len(block)
        num_feasible += len(counts)
        least_s = min(least_s, float(bounds.length_based_s(counts).min(initial=np.inf)))
    return num_enumerated, num_feasible, least_s


def _best_first(bounds_s: np.ndarray, divisible_s: np.ndarray) -> np.ndarray:
    """Return the order of bounds; equal ones by the time that the deployment would take if sequences were divisible.

    With many replicas and few long sequences, Eq. 2 charges a replica one sequence of each bucket, and so finds very
    many deployments equally fast. Of these, the second key prefers the one with GPUs where the work is.
    """
    scale_s = bounds_s.min(initial=np.inf)
    return np.lexsort((divisible_s, np.round(bounds_s / scale_s / _EQUAL)))


def _feasible_blocks(bounds: PlanBounds, num_gpus: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield all deployments in blocks, and those of a block that support the longest bucket."""
    for block in enumerate_plans(num_gpus, bounds.problem.num_gpus.tolist()):
        yield block, block[bounds.feasible(block)]


def _joined(parts: Sequence[Bounded]) -> Bounded:
    return Bounded(
        np.concatenate([part.counts for part in parts]),
        np.concatenate([part.length_based_s for part in parts]),
        np.concatenate([part.bounds_s for part in parts]),
    )


def _least(parts: Sequence[Bounded], limit: int) -> Bounded:
    """Return those of least bound out of all parts, in order; Theorem 1 decides, then the other bound."""
    together = _joined(parts)
    return together.take(np.lexsort((together.bounds_s, together.length_based_s))[:limit])
