"""Which deployments are worth solving: the second heuristic of L section 4.2 (lower-bound filtering), and an exact cut.

All deployments are enumerated lazily, twice: once for the least bound of Theorem 1, and once to keep what is near it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from peft_mux.scheduler.deployment.bounds import PlanBounds
from peft_mux.scheduler.deployment.solve import greedy_s, restrict
from peft_mux.scheduler.deployment.space import enumerate_plans
from peft_mux.scheduler.dispatching.problem import RELATIVE_ROUNDING, DispatchProblem

_TRIED_PER_BLOCK = 4
"""Deployments of each block on which the rules are tried, for an early time to cut by."""


@dataclass(frozen=True, slots=True, eq=False)
class BoundedPlans:
    """Deployments and their bounds.

    Attributes:
        counts: replicas of each candidate in each deployment, int64 of shape `(plans, candidates)`.
        length_based_s: bounds of Theorem 1 in seconds, float64 of shape `(plans,)`.
        bounds_s: bounds in seconds that are valid without premises, float64 of shape `(plans,)`.
    """

    counts: np.ndarray
    length_based_s: np.ndarray
    bounds_s: np.ndarray

    def __len__(self) -> int:
        return len(self.counts)

    def take(self, rows: np.ndarray) -> BoundedPlans:
        """Return some of the deployments, by index or mask."""
        return BoundedPlans(self.counts[rows], self.length_based_s[rows], self.bounds_s[rows])


@dataclass(frozen=True, slots=True, eq=False)
class FilteredPlans:
    """Deployments that are left to solve, and those that are not.

    Attributes:
        kept: deployments that are left to solve, least bound first but for rounding.
        over_threshold: some of those dropped by Theorem 1, least bound first.
        out_of_reach: some of those dropped as another one is known to be faster than their bound, least bound first.
        num_enumerated: number of all deployments.
        num_too_short: how many have no replica that supports the longest bucket.
        num_over_threshold: how many were dropped by Theorem 1.
        num_out_of_reach: how many were dropped by a bound without premises.
    """

    kept: BoundedPlans
    over_threshold: BoundedPlans
    out_of_reach: BoundedPlans
    num_enumerated: int
    num_too_short: int
    num_over_threshold: int
    num_out_of_reach: int


def filter_plans(full: DispatchProblem, num_gpus: int, threshold: float | None, max_dropped: int) -> FilteredPlans:
    """Return the deployments of `num_gpus` that are left by their bounds.

    The paper drops what is above "the current minimum" by more than the threshold; the minimum here is that of all
    deployments, so that the order of enumeration does not matter.

    Args:
        full: the linear form with one group of one replica for each candidate configuration.
        num_gpus: GPUs of the whole deployment (N in L).
        threshold: how far above the least bound of Theorem 1 a deployment's own may be, relative to it; None keeps
            every deployment that supports the longest bucket.
        max_dropped: how many of those dropped for either reason are returned.
    """
    bounds = PlanBounds(full)
    num_enumerated, num_feasible, least_s = _count_and_least_s(bounds, num_gpus)
    limit_s = np.inf if threshold is None else least_s * (1 + threshold)
    known_s = np.inf
    nothing = BoundedPlans(np.zeros((0, len(full.num_gpus)), dtype=np.int64), np.zeros(0), np.zeros(0))
    kept, over_threshold, out_of_reach = [nothing], nothing, nothing
    num_within = 0
    for _, counts in _feasible_blocks(bounds, num_gpus):
        block = BoundedPlans(counts, bounds.length_based_s(counts), bounds.cheapest_s(counts))
        within = block.length_based_s <= limit_s
        # Cut to `max_dropped` block by block, so that memory stays small however many are dropped.
        over_threshold = _of_least_bound([over_threshold, block.take(~within)], max_dropped)
        block = block.take(within)
        num_within += len(block)
        if threshold is not None:
            known_s = min([known_s, *_times_by_rules(full, block)])
        reachable = block.bounds_s <= known_s * (1 + RELATIVE_ROUNDING)
        out_of_reach = _of_least_bound([out_of_reach, block.take(~reachable)], max_dropped)
        kept.append(block.take(reachable))
    # The dual bound costs far more than the others, and so comes last, on what they have left.
    block = _ordered_by_dual(bounds, _concatenated(kept))
    reachable = block.bounds_s <= known_s * (1 + RELATIVE_ROUNDING)
    return FilteredPlans(
        kept=block.take(reachable),
        over_threshold=over_threshold,
        out_of_reach=_of_least_bound([out_of_reach, block.take(~reachable)], max_dropped),
        num_enumerated=num_enumerated,
        num_too_short=num_enumerated - num_feasible,
        num_over_threshold=num_feasible - num_within,
        num_out_of_reach=num_within - int(reachable.sum()),
    )


def _count_and_least_s(bounds: PlanBounds, num_gpus: int) -> tuple[int, int, float]:
    """Return how many deployments there are, how many support the longest bucket, and the least bound of Theorem 1."""
    # Known before any deployment is dropped by it, the least bound asks for a pass over all of them by itself.
    num_enumerated = num_feasible = 0
    least_s = np.inf
    for block, counts in _feasible_blocks(bounds, num_gpus):
        num_enumerated += len(block)
        num_feasible += len(counts)
        least_s = min(least_s, float(bounds.length_based_s(counts).min(initial=np.inf)))
    return num_enumerated, num_feasible, least_s


def _times_by_rules(full: DispatchProblem, block: BoundedPlans) -> list[float]:
    """Return the seconds that the rules reach on the best of a block; no bound that is kept later may exceed them."""
    tried = np.argsort(block.bounds_s, kind="stable")[:_TRIED_PER_BLOCK]
    return [greedy_s(restrict(full, row)) for row in block.counts[tried]]


def _ordered_by_dual(bounds: PlanBounds, plans: BoundedPlans) -> BoundedPlans:
    """Return deployments in the order of their bounds, which the dual bound has raised."""
    # Both are bounds, and so is the greater one.
    bounds_s = np.fmax(plans.bounds_s, bounds.dual_s(plans.counts))
    plans = BoundedPlans(plans.counts, plans.length_based_s, bounds_s)
    return plans.take(_order_of_bounds(bounds_s, bounds.dual_s(plans.counts, rounding=False)))


def _order_of_bounds(bounds_s: np.ndarray, divisible_s: np.ndarray) -> np.ndarray:
    """Return the rows by bound; equal ones by the time that the deployment would take if sequences were divisible.

    With many replicas and few long sequences, Eq. 2 charges a replica one sequence of each bucket, and so finds very
    many deployments equally fast. Of these, the second key prefers the one with GPUs where the work is.

    Args:
        bounds_s: bound of each deployment in seconds, of shape `(plans,)`.
        divisible_s: bound of each deployment without rounding in seconds, of shape `(plans,)`.
    """
    scale_s = bounds_s.min(initial=np.inf)
    # In steps of the rounding, so that bounds that are equal on paper leave the choice to the second key.
    return np.lexsort((divisible_s, np.round(bounds_s / scale_s / RELATIVE_ROUNDING)))


def _feasible_blocks(bounds: PlanBounds, num_gpus: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield all deployments in blocks, and those of a block that support the longest bucket."""
    for block in enumerate_plans(num_gpus, bounds.problem.num_gpus.tolist()):
        yield block, block[bounds.feasible(block)]


def _concatenated(parts: Sequence[BoundedPlans]) -> BoundedPlans:
    return BoundedPlans(
        np.concatenate([part.counts for part in parts]),
        np.concatenate([part.length_based_s for part in parts]),
        np.concatenate([part.bounds_s for part in parts]),
    )


def _of_least_bound(parts: Sequence[BoundedPlans], limit: int) -> BoundedPlans:
    """Return those of least bound out of all parts, in order; Theorem 1 decides, then the other bound."""
    every = _concatenated(parts)
    return every.take(np.lexsort((every.bounds_s, every.length_based_s))[:limit])
