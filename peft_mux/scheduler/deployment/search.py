"""How fast a deployment can be at best, for many deployments at once (L Theorem 1), and bounds that need no premises.

All bounds are of the linear form of L Eq. 2, in which configuration i spends g_ij = n_i c_ij GPU seconds on a sequence
of bucket j. Rows of `counts` are deployments, columns are candidate configurations. Nothing is solved here.
"""

# MERGED: Which deployments are worth solving: the second heuristic of L section 4.2 (lower-bound filtering), and an
# MERGED: exact cut.
# MERGED: All deployments are enumerated lazily, twice: once for the least bound of Theorem 1, and once to keep what
# MERGED: is near it.
# MERGED: Which replicas to deploy for a joint run: the first stage of LobRA (L section 4.2, Eq. 2, Appendix A).
# MERGED: `plan_deployment` puts the parts together: candidate configurations and their combinations (`space.py`),
# MERGED: lower bounds
# MERGED: (`bounds.py`, `filter.py`), an integer programme for each combination left (`solve.py`). Each step's
# MERGED: sequences are then
# MERGED: spread by `dispatch`. The value that comes out is in `plan.py`.

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from peft_mux.scheduler.deployment.plan import Candidate, DeploymentPlan, PlanningStatistics
from peft_mux.scheduler.deployment.solve import SolvedPlans, SolverOptions, greedy_s, restrict, solve_plans
from peft_mux.scheduler.deployment.space import (
    benchmark_lengths,
    configurations_that_fit,
    count_plans,
    enumerate_plans,
    propose_configurations,
)
from peft_mux.scheduler.dispatching.bucketing import (
    DEFAULT_INTERVAL_TOKENS,
    DEFAULT_NUM_BUCKETS,
    Bucketing,
    bucket_boundaries,
    check_at_least_one,
)
from peft_mux.scheduler.dispatching.dispatch import DEFAULT_RELATIVE_GAP, Dispatch, dispatch
from peft_mux.scheduler.dispatching.ilp import check_solver_name
from peft_mux.scheduler.dispatching.problem import RELATIVE_ROUNDING, DispatchProblem, build_problem
from peft_mux.scheduler.replicas.configs import DeployableTimeModel, ParallelConfig, ReplicaGroup, TimeModel

_DUAL_STEPS = 60
"""Subgradient steps of the dual bound; every number of them gives a valid one."""
_DUAL_BLOCK = 4096
"""Deployments whose dual is ascended together, so that the work fits into a cache."""
_LEAST_WEIGHT = 1e-30
"""Keeps 0 times inf away from configurations that are not deployed."""


@dataclass(frozen=True, slots=True, eq=False)
class PlanBounds:
    """Bounds over all candidate configurations of one planning problem.

    Attributes:
        problem: the linear form with every candidate as a group of one replica.
    """

    problem: DispatchProblem

    @property
    def gpu_s(self) -> np.ndarray:
        """GPU seconds of one sequence, g_ij: shape `(candidates, buckets)`, inf where a bucket does not fit."""
        return self.problem.sequence_s * self.problem.num_gpus[:, None]

    def feasible(self, counts: np.ndarray) -> np.ndarray:
        """Return whether some replica of each deployment supports the longest bucket: bool of shape `(plans,)`."""
        return np.any(counts[:, self.problem.max_tokens >= self.problem.lengths[-1]] > 0, axis=1)

    def length_based_s(self, counts: np.ndarray) -> np.ndarray:
        """Return sum_i N_i t_i / N under length-based dispatch (L Theorem 1, Eq. 5): seconds of shape `(plans,)`.

        Sequences are divisible here, as tokens are in the proof. Configurations with the same `max_tokens` are one
        replica in the theorem, balanced within; of these the cheapest is charged, which keeps it a lower bound. N is
        the GPUs that have a replica. The premise is that length-based dispatch gives each bucket to its cheapest
        configuration (Property 1, Assumption 1); it can fail, and so the paper takes the bound as relative only.
        inf where a bucket fits nowhere.
        """
        patterns, which = _patterns(counts)
        # Tiers ascend in `max_tokens`: the first one with an offer is the smallest that supports a bucket.
        tiers = np.unique(self.problem.max_tokens, return_inverse=True)[1]
        gpu_s = np.full((len(patterns), self.gpu_s.shape[1]), np.inf)
        for tier in range(int(tiers.max()) + 1):
            members = np.flatnonzero(tiers == tier)
            offer_s = _least_over(patterns[:, members], self.gpu_s[members])
            gpu_s = np.where(np.isinf(gpu_s), offer_s, gpu_s)
        total_gpu_s = _weighted(gpu_s, self.problem.num_sequences).sum(axis=1)
        return total_gpu_s[which] / (counts @ self.problem.num_gpus)

    def cheapest_s(self, counts: np.ndarray) -> np.ndarray:
        """Return a bound without premises: seconds of shape `(plans,)`.

        The buckets from any one on run on the replicas that support it and take the least GPU seconds on each; and any
        single sequence takes its time on the fastest replica. Equal to `length_based_s`, or above it, where the premise
        of that one holds.
        """
        patterns, which = _patterns(counts)
        problem = self.problem
        gpu_s = _weighted(_least_over(patterns, self.gpu_s), problem.num_sequences)
        single_s = np.where(problem.num_sequences > 0, _least_over(patterns, problem.sequence_s), 0.0)
        bound_s = single_s.max(axis=1)[which]
        from_bucket_s = np.cumsum(gpu_s[:, ::-1], axis=1)[:, ::-1]
        # What supports a longer bucket supports this one too, so that the buckets from here on have no other GPUs than
        # those of this one.
        for bucket in range(len(problem.lengths)):
            num_gpus = counts @ np.where(problem.fits[:, bucket], problem.num_gpus, 0)
            # No replica for a bucket gives inf, or NaN where it is empty too, which fmax passes over.
            with np.errstate(divide="ignore", invalid="ignore"):
                share_s = from_bucket_s[which, bucket] / num_gpus
            bound_s = np.fmax(bound_s, share_s)
        return bound_s

    def dual_s(self, counts: np.ndarray, *, rounding: bool = True, steps: int = _DUAL_STEPS) -> np.ndarray:
        """Return a bound near the linear relaxation of Eq. 2, without premises: seconds of shape `(plans,)`.

        By duality, weights w_i >= 0 of the groups with sum 1 bound the makespan by sum_j B_j min_i w_i c_ij / p_i.
        Weights in proportion to a group's GPUs give the bound of Theorem 1. From there subgradient steps raise the
        weight of groups that would have too much to do; every step's value is a bound, and the largest is returned.

        Args:
            counts: replicas of each candidate in each deployment, int64 of shape `(plans, candidates)`.
            rounding: whether a bucket that fits only one group is rounded up per replica as in Eq. 2, and such a group
                pays its constant, as neither can be avoided; without, sequences are divisible and constants are left
                out.
            steps: number of subgradient steps.
        """
        starts = range(0, len(counts), _DUAL_BLOCK)
        blocks = [self._dual_block(counts[start : start + _DUAL_BLOCK], steps, rounding) for start in starts]
        return np.concatenate(blocks) if blocks else np.zeros(0)

    def _dual_block(self, counts: np.ndarray, steps: int, rounding: bool) -> np.ndarray:
        """Return `dual_s` of a few deployments; arrays are `(plans, candidates[, buckets])`."""
        present = counts > 0
        shared_s, fixed_s = self._shared_and_fixed(counts, rounding)
        # In proportion to GPUs the dual value is the bound of Theorem 1, which later steps can only improve on, as the
        # best is kept.
        weights = counts * self.problem.num_gpus / (counts @ self.problem.num_gpus)[:, None]
        # What a group has to do in any case is a bound by itself.
        best_s = fixed_s.max(axis=1)
        rows = np.arange(len(counts))[:, None]
        columns = np.arange(shared_s.shape[2])[None, :]
        for step in range(steps):
            price_s = np.maximum(weights, _LEAST_WEIGHT)[:, :, None] * shared_s
            taker = price_s.argmin(axis=1)
            loads_s = fixed_s.copy()
            np.add.at(loads_s, (rows, taker), shared_s[rows, taker, columns])
            best_s = np.fmax(best_s, (weights * loads_s).sum(axis=1))
            # Multiplicative weights with a step that shrinks as 1 / sqrt(step): they stay positive and need no
            # projection onto the simplex but a division by their sum.
            excess = loads_s / np.maximum(loads_s.max(axis=1), np.finfo(float).tiny)[:, None]
            weights = np.where(present, weights * np.exp(excess / np.sqrt(step + 4)), 0.0)
            weights /= weights.sum(axis=1, keepdims=True)
        return best_s

    def _shared_and_fixed(self, counts: np.ndarray, rounding: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return seconds of all of a bucket on each group, and what each group must do whatever is decided.

        The first is for buckets that fit two groups or more, 0 for the others and inf where a bucket does not fit:
        shape `(plans, candidates, buckets)`. The second has shape `(plans, candidates)`.
        """
        problem = self.problem
        able = (counts > 0)[:, :, None] & problem.fits[None] & (problem.num_sequences > 0)
        # Only keeps the division defined: groups without replicas are masked by `able`.
        replicas = np.maximum(counts, 1)[:, :, None]
        alone = able & (able.sum(axis=1, keepdims=True) == 1) & rounding
        finite_s = np.where(problem.fits, problem.sequence_s, 0.0)[None]
        fixed_s = np.where(alone, -(-problem.num_sequences // replicas) * finite_s, 0.0).sum(axis=2)
        fixed_s += np.where(alone.any(axis=2), problem.constant_s[None, :], 0.0)
        shared_s = np.where(able, problem.num_sequences / replicas * finite_s, np.inf)
        settled = alone.any(axis=1) | (problem.num_sequences == 0)[None, :]
        return np.where(settled[:, None, :], 0.0, shared_s), fixed_s


def _patterns(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct sets of configurations that are deployed at all, and which one each plan has."""
    patterns, which = np.unique(counts > 0, axis=0, return_inverse=True)
    # NumPy 2.0 alone gives the inverse a second dimension.
    return patterns, which.reshape(-1)


def _least_over(patterns: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the least of the `values` rows that each pattern has: shape `(patterns, buckets)`."""
    least = np.full((len(patterns), values.shape[1]), np.inf)
    for index in range(len(values)):
        least = np.where(patterns[:, index, None], np.minimum(least, values[index]), least)
    return least


def _weighted(values: np.ndarray, num_sequences: np.ndarray) -> np.ndarray:
    """Return values times sequences, with 0 for empty buckets even where the value is inf."""
    return np.where(num_sequences > 0, values, 0.0) * num_sequences


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


DEFAULT_THRESHOLD = 0.15
"""How far above the least lower bound a deployment's own may be (L Appendix A)."""
DEFAULT_BUDGET_S = 60.0
"""Seconds for solving deployments one after another; the paper's planner takes 149 s for 64 GPUs (L Table 5)."""
DEFAULT_MAX_CANDIDATES = 1000
"""Rows of the table of a plan."""
DEFAULT_MAX_PLANS = 20_000_000
"""Above this many combinations planning is refused rather than left to run for minutes."""

_OUT_OF_REACH = "bound: not faster than the best"
_UNREACHED = "not tried: the time for planning was spent"
_OVER_THRESHOLD = "Theorem 1: over the threshold"


def plan_deployment(
    lengths: Sequence[int],
    global_batch: int,
    num_gpus: int,
    time_model: DeployableTimeModel,
    *,
    num_buckets: int = DEFAULT_NUM_BUCKETS,
    interval: int = DEFAULT_INTERVAL_TOKENS,
    proposal: bool = True,
    lower_bound_filter: bool = True,
    threshold: float = DEFAULT_THRESHOLD,
    workers: int = 1,
    solver: Any = None,
    time_limit_s: float = 10.0,
    budget_s: float | None = DEFAULT_BUDGET_S,
    relative_gap: float = DEFAULT_RELATIVE_GAP,
    max_candidates: int = DEFAULT_MAX_CANDIDATES,
    max_plans: int = DEFAULT_MAX_PLANS,
) -> DeploymentPlan:
    """Return the replicas that train an expected batch fastest (L Eq. 2).

    Every combination of the candidates that leaves no room for one more replica is considered, and the fastest is found
    up to `relative_gap`, where neither a time limit nor the budget is reached; of equally fast ones that of the least
    bound. Two heuristics of the paper are not exact: `proposal` leaves out configurations that are never the fastest
    for their number of GPUs, `lower_bound_filter` deployments whose bound by Theorem 1 is more than `threshold` above
    the least. The filter also switches on a cut that the paper lacks and that loses nothing: bounds that need no
    premises end the search where no deployment that is left can be faster.

    Args:
        lengths: a sample of all tasks' lengths in tokens, each task in proportion to its batch (L: of 100 batches).
        global_batch: sequences of one step of all tasks together (B in L).
        num_gpus: GPUs that may be used (N in L).
        time_model: predicts the seconds of one replica, and knows the configurations to choose from.
        num_buckets: most buckets of padded lengths (R in L).
        interval: distance of candidate boundaries of buckets, in tokens.
        proposal: whether only proposed configurations are combined.
        lower_bound_filter: whether deployments may be left out by their bounds; without, every one is solved.
        threshold: how far above the least bound of Theorem 1 a deployment's own may be, as 0.15 for 15 %.
        workers: processes that solve. With more than one, the script that calls needs `if __name__ == "__main__"`.
        solver: name of a PuLP solver such as "HiGHS", a PuLP solver itself, or None for the bundled CBC.
        time_limit_s: seconds that solving one deployment may take.
        budget_s: seconds that solving all of them may take, or None; when they are spent, the best so far is taken,
            and the statistics say by how much one that was not solved to the end could be faster at most.
        relative_gap: how far above its optimum each solution may be, relative to it.
        max_candidates: most rows of the plan's table; the statistics count all deployments.
        max_plans: most combinations of replicas that are looked at.

    Raises:
        ValueError: for an argument out of its range, lengths that no configuration on `num_gpus` supports, an unknown
            solver, or more than `max_plans` combinations.
    """
    start = time.perf_counter()
    check_at_least_one(num_gpus=num_gpus, workers=workers, max_candidates=max_candidates, max_plans=max_plans)
    options = _search_options(threshold, time_limit_s, relative_gap, solver, budget_s)
    bucketing = expected_bucketing(
        lengths, global_batch, time_model, num_gpus, num_buckets=num_buckets, interval=interval
    )
    configs = _combined_configurations(time_model, num_gpus, bucketing.boundaries[-1], proposal, max_plans)
    problem = _candidate_problem(configs, bucketing, time_model)
    filtered = filter_plans(problem, num_gpus, threshold if lower_bound_filter else None, max_candidates)
    filter_s = time.perf_counter() - start
    solved = solve_plans(
        problem, filtered.kept.counts, filtered.kept.bounds_s, options, workers=workers, prune=lower_bound_filter
    )
    groups = replica_groups(configs, filtered.kept.counts[solved.best], time_model)
    return DeploymentPlan(
        groups=groups,
        num_gpus=num_gpus,
        global_batch=global_batch,
        bucketing=bucketing,
        longest=max(lengths),
        expected=_expected_dispatch(groups, bucketing, time_model, options),
        configurations=configs,
        candidates=_candidate_table(filtered, solved, max_candidates),
        statistics=_statistics(time_model, configs, filtered, solved, filter_s),
    )


def _candidate_problem(
    configs: Sequence[ParallelConfig], bucketing: Bucketing, time_model: DeployableTimeModel
) -> DispatchProblem:
    """Return the linear form that all deployments of these configurations share."""
    # Each candidate is a group of one replica; a deployment of them differs from this in its numbers of replicas alone.
    return build_problem(replica_groups(configs, [1] * len(configs), time_model), bucketing, time_model)


def _expected_dispatch(
    groups: Sequence[ReplicaGroup], bucketing: Bucketing, time_model: TimeModel, options: SolverOptions
) -> Dispatch:
    """Return how the expected batch is spread over the deployment that was chosen."""
    # Solved anew: the search knows only how long a deployment takes, in the form of Eq. 2.
    return dispatch(
        groups,
        bucketing,
        time_model,
        solver=options.solver,
        time_limit_s=options.time_limit_s,
        relative_gap=options.relative_gap,
    )


def _statistics(
    time_model: DeployableTimeModel,
    configs: Sequence[ParallelConfig],
    filtered: FilteredPlans,
    solved: SolvedPlans,
    filter_s: float,
) -> PlanningStatistics:
    """Count what became of all deployments."""
    statuses = [answer.status for answer in solved.answers.values()]
    return PlanningStatistics(
        num_configurations=len(time_model.configurations),
        num_proposed=len(configs),
        num_enumerated=filtered.num_enumerated,
        num_too_short=filtered.num_too_short,
        num_over_threshold=filtered.num_over_threshold,
        # What was left to solve and then was not, but for want of time, could not beat the best.
        num_out_of_reach=filtered.num_out_of_reach + len(filtered.kept) - len(statuses) - len(solved.unreached),
        num_unreached=len(solved.unreached),
        gap=solved.gap,
        num_solved=len(statuses) - statuses.count("bound met"),
        num_bound_met=statuses.count("bound met"),
        num_time_limits=statuses.count("time limit"),
        num_failed=statuses.count("solver failed"),
        first_error=next((answer.error for answer in solved.answers.values() if answer.error), ""),
        filter_s=filter_s,
        solve_s=solved.solve_s,
    )


def expected_bucketing(
    lengths: Sequence[int],
    global_batch: int,
    time_model: DeployableTimeModel,
    num_gpus: int,
    *,
    num_buckets: int = DEFAULT_NUM_BUCKETS,
    interval: int = DEFAULT_INTERVAL_TOKENS,
) -> Bucketing:
    """Return the buckets of the sample, with the sequences that one batch is expected to have of each.

    Eq. 2 asks for sum_i d_ij >= B f_j with integer d_ij, which is B f_j rounded up; so there may be up to R sequences
    more than the batch has, as the paper notes. The padding is that of the sample, in proportion.

    Args:
        lengths: lengths of a sample of all tasks' sequences, in tokens.
        global_batch: sequences of one step of all tasks together (B in L).
        time_model: knows the configurations, whose limits no bucket is rounded up past.
        num_gpus: GPUs that may be used; configurations of more have no say.
        num_buckets: most buckets of padded lengths (R in L).
        interval: distance of candidate boundaries of buckets, in tokens.

    Raises:
        ValueError: for a batch below 1, or lengths that no configuration of at most `num_gpus` supports.
    """
    check_at_least_one(global_batch=global_batch)
    configs = configurations_that_fit(time_model, num_gpus, max(lengths, default=1))
    # Of all configurations, so that rounding a bucket up takes it away from none of them.
    limits = [time_model.max_tokens[config] for config in configs]
    sample = bucket_boundaries(lengths, num_buckets, interval, limits=limits)
    # B f_j rounded up; in integers, so that a whole number is not rounded up further.
    counts = tuple(-(-global_batch * count // sample.num_sequences) for count in sample.counts)
    return Bucketing(sample.boundaries, counts, round(sample.padding_tokens * sum(counts) / sample.num_sequences))


def replica_groups(
    configs: Sequence[ParallelConfig], counts: Sequence[int] | np.ndarray, time_model: DeployableTimeModel
) -> tuple[ReplicaGroup, ...]:
    """Return the groups of a deployment; configurations without a replica are left out.

    Args:
        configs: the configurations that were combined.
        counts: replicas of each configuration, in the same order.
        time_model: knows the most tokens of a micro-batch on each configuration.
    """
    return tuple(
        ReplicaGroup(config, int(count), time_model.max_tokens[config])
        for config, count in zip(configs, counts, strict=True)
        if count
    )


def _combined_configurations(
    time_model: DeployableTimeModel, num_gpus: int, longest: int, proposal: bool, max_plans: int
) -> tuple[ParallelConfig, ...]:
    """Return the configurations that are combined; raises for too many combinations."""
    configs = configurations_that_fit(time_model, num_gpus, longest)
    if proposal:
        # The last length of the benchmark may be the limit of replicas that are larger than the deployment.
        supported = max(time_model.max_tokens[config] for config in configs)
        lengths = [length for length in benchmark_lengths(time_model, longest) if length <= supported]
        configs = propose_configurations(time_model, num_gpus, lengths)
    _check_number_of_plans(count_plans(num_gpus, [config.num_gpus for config in configs]), max_plans, proposal)
    return configs


def _candidate_table(filtered: FilteredPlans, solution: SolvedPlans, limit: int) -> tuple[Candidate, ...]:
    """Return what was considered: solved ones by time, then those out of reach, then those above the threshold.

    Args:
        filtered: the deployments that were left to solve, and some of those that were not.
        solution: what became of those that were left to solve.
        limit: most rows of the table.
    """
    answers, best = solution.answers, solution.best
    # The chosen one comes first, even where others are as fast.
    solved = sorted(answers, key=lambda row: (row != best, answers[row].step_s, row))
    unsolved = [row for row in range(len(filtered.kept)) if row not in answers]
    verdicts = [_verdict(row, solution) for row in solved + unsolved]
    kept = filtered.kept.take(np.array(solved + unsolved, dtype=np.int64))
    return (
        *_candidates(kept, verdicts, [answers[row].step_s for row in solved] + [None] * len(unsolved)),
        *_candidates(filtered.out_of_reach, [_OUT_OF_REACH] * len(filtered.out_of_reach)),
        *_candidates(filtered.over_threshold, [_OVER_THRESHOLD] * len(filtered.over_threshold)),
    )[:limit]


def _verdict(row: int, solution: SolvedPlans) -> str:
    """Return what became of a deployment that was left to solve."""
    if row == solution.best:
        return "chosen"
    if row in solution.answers:
        return f"not faster ({solution.answers[row].status})"
    return _UNREACHED if row in solution.unreached else _OUT_OF_REACH


def _candidates(
    plans: BoundedPlans, verdicts: Sequence[str], step_s: Sequence[float | None] | None = None
) -> list[Candidate]:
    """Return rows of the plan's table; without `step_s`, of deployments that were not solved."""
    rows = zip(
        plans.counts.tolist(),
        plans.length_based_s.tolist(),
        plans.bounds_s.tolist(),
        step_s or [None] * len(plans),
        verdicts,
        strict=True,
    )
    return [
        Candidate(tuple(counts), length_based_s, bound_s, seconds, verdict)
        for counts, length_based_s, bound_s, seconds, verdict in rows
    ]


def _check_number_of_plans(number: int, limit: int, proposal: bool) -> None:
    if number > limit:
        fix = "Raise max_plans, or use fewer configurations." if proposal else "Set proposal=True."
        raise ValueError(f"there are {number} combinations of replicas; allowed: at most max_plans = {limit}. {fix}")


def _search_options(
    threshold: float, time_limit_s: float, relative_gap: float, solver: Any, budget_s: float | None
) -> SolverOptions:
    """Return how deployments are solved, checked."""
    # Conditions are written this way round so that NaN is refused as well.
    if not threshold >= 0:
        raise ValueError(f"threshold is {threshold}; allowed: 0 or more, such as 0.15 for 15 %.")
    if not time_limit_s > 0:
        raise ValueError(f"time_limit_s is {time_limit_s}; allowed: more than 0.")
    if budget_s is not None and not budget_s > 0:
        raise ValueError(f"budget_s is {budget_s}; allowed: more than 0, or None for as long as it takes.")
    if not relative_gap >= 0:
        raise ValueError(f"relative_gap is {relative_gap}; allowed: 0 or more, such as 0.005 for 0.5 %.")
    if isinstance(solver, str):  # a name that is wrong would otherwise only send every deployment back to the rules
        check_solver_name(solver)
    return SolverOptions(solver, time_limit_s, relative_gap, budget_s)
