"""Which replicas to deploy for a joint run: the first stage of LobRA (L section 4.2, Eq. 2, Appendix A).

    space.py    candidate configurations (first heuristic) and their combinations
    bounds.py   lower bounds of each combination
    search.py   `filter_plans` drops combinations by Theorem 1 (second heuristic), and by an exact cut
    solve.py    an integer programme for each combination left

Each step's sequences are then spread by `dispatch`. The plan that comes out is in `deployment_plan.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from peft_mux.scheduler.deployment.bounds import cheapest_bound_s, dual_bound_s, length_based_bound_s
from peft_mux.scheduler.deployment.deployment_plan import Candidate, DeploymentPlan, PlanningStatistics
from peft_mux.scheduler.deployment.solve import BestFirstSearch, SolverOptions, times_by_rules
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
)
from peft_mux.scheduler.dispatching.dispatch import DEFAULT_RELATIVE_GAP, dispatch
from peft_mux.scheduler.dispatching.problem import DispatchProblem, build_problem
from peft_mux.scheduler.replicas.exchange import GradientExchange
from peft_mux.scheduler.replicas.time_model import ReplicaTimeModel
from peft_mux.scheduler.units import RELATIVE_ROUNDING

DEFAULT_THRESHOLD = 0.15
"""How far above the least lower bound a deployment's own may be (L Appendix A)."""
DEFAULT_BUDGET_S = 60.0
"""Seconds for solving deployments one after another; the paper's planner takes 149 s for 64 GPUs (L Table 5)."""
DEFAULT_MAX_CANDIDATES = 1000
"""Rows of the table of a plan."""
DEFAULT_MAX_PLANS = 20_000_000
"""Above this many combinations planning is refused rather than left to run for minutes."""
_TRIED_PER_BLOCK = 4
"""Deployments of each block on which the rules are tried, for an early time to cut by."""

_OUT_OF_REACH = "bound: not faster than the best"


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

    def candidates(self, verdict: str) -> list[Candidate]:
        """Return the deployments as rows of a plan's table, none of them solved."""
        columns = zip(self.counts.tolist(), self.length_based_s.tolist(), self.bounds_s.tolist(), strict=True)
        return [Candidate(tuple(counts), length_s, bound_s, None, verdict) for counts, length_s, bound_s in columns]


def plan_deployment(
    lengths: Sequence[int],
    global_batch: int,
    num_gpus: int,
    time_model: ReplicaTimeModel,
    *,
    num_buckets: int = DEFAULT_NUM_BUCKETS,
    interval: int = DEFAULT_INTERVAL_TOKENS,
    proposal: bool = True,
    lower_bound_filter: bool = True,
    threshold: float = DEFAULT_THRESHOLD,
    solver: Any = None,
    time_limit_s: float = 10.0,
    budget_s: float | None = DEFAULT_BUDGET_S,
    relative_gap: float = DEFAULT_RELATIVE_GAP,
    max_candidates: int = DEFAULT_MAX_CANDIDATES,
    max_plans: int = DEFAULT_MAX_PLANS,
    exchange: GradientExchange | None = None,
) -> DeploymentPlan:
    """Return the replicas that train an expected batch fastest (L Eq. 2).

    Every combination of the candidates that leaves no room for one more replica is considered, and the fastest is found
    up to `relative_gap`, if neither a time limit nor the budget is reached; of equally fast ones that of the least
    bound. Two heuristics of the paper are not exact: `proposal` leaves out configurations that are never the fastest
    for their number of GPUs, `lower_bound_filter` deployments whose bound by Theorem 1 is more than `threshold` above
    the least. The filter also switches on a cut that the paper lacks and that loses nothing: bounds that need no
    premises end the search as soon as no deployment that is left can be faster.

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
        solver: name of a PuLP solver, a PuLP solver itself, or None for HiGHS if it is installed, else bundled CBC.
        time_limit_s: seconds that solving one deployment may take.
        budget_s: seconds that solving all of them may take, or None; when they are spent, the best so far is taken,
            and the statistics say by how much one that was not solved to the end could be faster at most.
        relative_gap: how far above its optimum each solution may be, relative to it.
        max_candidates: most rows of the plan's table; the statistics count all deployments.
        max_plans: most combinations of replicas that are looked at.
        exchange: predicts the exchange of gradients between replicas, which every deployment pays in addition; `None`
            for the paper's assumption that it is free.

    Raises:
        ValueError: for lengths that no configuration on `num_gpus` supports, or more than `max_plans` combinations.
    """
    start = time.perf_counter()
    bucketing = expected_bucketing(
        lengths, global_batch, time_model, num_gpus, num_buckets=num_buckets, interval=interval
    )
    longest_bucket = bucketing.boundaries[-1]
    configs = configurations_that_fit(time_model, num_gpus, longest_bucket)
    if proposal:
        # The last length of the benchmark may be the limit of replicas that are larger than the deployment.
        supported = max(time_model.max_tokens[config] for config in configs)
        compared = [length for length in benchmark_lengths(time_model, longest_bucket) if length <= supported]
        configs = propose_configurations(time_model, num_gpus, compared)
    num_plans = count_plans(num_gpus, [config.num_gpus for config in configs])
    if num_plans > max_plans:
        fix = "Raise max_plans, or use fewer configurations." if proposal else "Set proposal=True."
        raise ValueError(
            f"there must be at most max_plans = {max_plans} combinations of replicas, got {num_plans}. {fix}"
        )
    # Each candidate is a group of one replica; deployments of them differ in their numbers of replicas alone.
    problem = build_problem(time_model.groups(dict.fromkeys(configs, 1)), bucketing, time_model)

    def exchange_s(counts: np.ndarray) -> np.ndarray:
        return np.zeros(len(counts)) if exchange is None else exchange.seconds(configs, counts)

    kept, dropped, numbers = filter_plans(
        problem, num_gpus, threshold if lower_bound_filter else None, max_candidates, exchange_s
    )
    filter_s = time.perf_counter() - start
    options = SolverOptions(solver, time_limit_s, relative_gap, budget_s)
    search = BestFirstSearch(
        problem, kept.counts, kept.bounds_s, options, prune=lower_bound_filter, exchange_s=exchange_s(kept.counts)
    )
    statuses = [answer.status for answer in search.answers.values()]
    # A deployment that was not solved, other than for lack of time, could not beat the best.
    numbers["num_out_of_reach"] += len(kept) - len(statuses) - len(search.unreached)
    groups = time_model.groups(dict(zip(configs, kept.counts[search.best_row], strict=True)))
    return DeploymentPlan(
        groups=groups,
        num_gpus=num_gpus,
        global_batch=global_batch,
        bucketing=bucketing,
        longest=max(lengths),
        # Solved again: the search knows only how long a deployment takes, in the form of Eq. 2.
        expected=dispatch(
            groups, bucketing, time_model, solver=solver, time_limit_s=time_limit_s, relative_gap=relative_gap
        ),
        configurations=configs,
        exchange_s=0.0 if exchange is None else exchange.seconds_of(groups),
        candidates=(*_solved_first(kept, search), *dropped)[:max_candidates],
        statistics=PlanningStatistics(
            num_configurations=len(time_model.configurations),
            num_proposed=len(configs),
            **numbers,
            num_unreached=len(search.unreached),
            gap=search.gap,
            num_solved=len(statuses) - statuses.count("bound met"),
            num_bound_met=statuses.count("bound met"),
            num_time_limits=statuses.count("time limit"),
            num_failed=statuses.count("solver failed"),
            first_error=next((answer.error for answer in search.answers.values() if answer.error), ""),
            filter_s=filter_s,
            solve_s=search.solve_s,
        ),
    )


def expected_bucketing(
    lengths: Sequence[int],
    global_batch: int,
    time_model: ReplicaTimeModel,
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
        num_gpus: GPUs that may be used; configurations of more do not count.
        num_buckets: most buckets of padded lengths (R in L).
        interval: distance of candidate boundaries of buckets, in tokens.

    Raises:
        ValueError: for lengths that no configuration of at most `num_gpus` supports.
    """
    configs = configurations_that_fit(time_model, num_gpus, max(lengths, default=1))
    # Of all configurations, so that rounding a bucket up takes it away from none of them.
    limits = [time_model.max_tokens[config] for config in configs]
    sample = bucket_boundaries(lengths, num_buckets, interval, limits=limits)
    # B f_j rounded up; in integers, so that a whole number is not rounded up further.
    counts = tuple(-(-global_batch * count // sample.num_sequences) for count in sample.counts)
    return Bucketing(sample.boundaries, counts, round(sample.padding_tokens * sum(counts) / sample.num_sequences))


def filter_plans(
    full: DispatchProblem,
    num_gpus: int,
    threshold: float | None,
    max_dropped: int,
    exchange_s: Callable[[np.ndarray], np.ndarray],
) -> tuple[BoundedPlans, list[Candidate], dict[str, int]]:
    """Return the deployments of `num_gpus` that are left by their bounds, and those that are not.

    All deployments are enumerated lazily, twice: once for the least bound of Theorem 1, and once to keep what is near
    it. The paper drops what is above "the current minimum" by more than the threshold; the minimum here is that of all
    deployments, so that the order of enumeration does not matter.

    Args:
        full: the linear form with one group of one replica for each candidate configuration.
        num_gpus: GPUs of the whole deployment (N in L).
        threshold: how far above the least bound of Theorem 1 a deployment's own may be, relative to it; None keeps
            every deployment that supports the longest bucket.
        max_dropped: how many of those dropped for either reason are returned.
        exchange_s: returns the seconds that deployments take in addition, given their counts.

    Returns:
        The deployments that are left to solve, by increasing bound except for rounding; some of those that were dropped
        because another one is faster than their bound, then by Theorem 1, each by increasing bound; and the number of
        each, as in `PlanningStatistics`.
    """
    sizes = full.num_gpus.tolist()
    holds_longest = full.max_tokens >= full.lengths[-1]
    num_enumerated = num_feasible = num_within = 0
    least_s = least_sum_s = known_s = np.inf
    for block in enumerate_plans(num_gpus, sizes):
        counts = block[np.any(block[:, holds_longest] > 0, axis=1)]
        num_enumerated += len(block)
        num_feasible += len(counts)
        length_based_s = length_based_bound_s(full, counts)
        least_s = min(least_s, float(length_based_s.min(initial=np.inf)))
        least_sum_s = min(least_sum_s, float((length_based_s + exchange_s(counts)).min(initial=np.inf)))
    limit_s, limit_sum_s = np.inf, np.inf
    if threshold is not None:
        limit_s, limit_sum_s = least_s * (1 + threshold), least_sum_s * (1 + threshold)
    nothing = BoundedPlans(np.zeros((0, len(sizes)), dtype=np.int64), np.zeros(0), np.zeros(0))
    kept, over_threshold, out_of_reach = [nothing], nothing, nothing
    for block in enumerate_plans(num_gpus, sizes):
        counts = block[np.any(block[:, holds_longest] > 0, axis=1)]
        added_s = exchange_s(counts)
        length_based_s = length_based_bound_s(full, counts)
        plans = BoundedPlans(counts, length_based_s + added_s, cheapest_bound_s(full, counts) + added_s)
        # The bound of Theorem 1 can be far below the real seconds of computing, and those of the exchange are not: a
        # sum of the two alone would prefer deployments that exchange little.
        within = (length_based_s <= limit_s) | (plans.length_based_s <= limit_sum_s)
        # Cut to `max_dropped` block by block, so that memory stays small however many are dropped.
        over_threshold = _of_least_bound([over_threshold, plans.take(~within)], max_dropped)
        plans = plans.take(within)
        num_within += len(plans)
        if threshold is not None:
            # What the rules reach on the best of a block: no bound that is kept later may exceed it.
            tried = np.argsort(plans.bounds_s, kind="stable")[:_TRIED_PER_BLOCK]
            reached_s = times_by_rules(full, plans.counts[tried]) + exchange_s(plans.counts[tried])
            known_s = min([known_s, *reached_s])
        reachable = plans.bounds_s <= known_s * (1 + RELATIVE_ROUNDING)
        out_of_reach = _of_least_bound([out_of_reach, plans.take(~reachable)], max_dropped)
        kept.append(plans.take(reachable))
    plans = _joined(kept)
    # The dual bound costs far more than the others, and so comes last, on what they have left. Both are bounds, and so
    # is the greater one.
    added_s = exchange_s(plans.counts)
    bounds_s = np.fmax(plans.bounds_s, dual_bound_s(full, plans.counts) + added_s)
    # With many replicas and few long sequences, Eq. 2 charges a replica one sequence of each bucket, and so finds very
    # many deployments equally fast. Of these, the time with divisible sequences prefers the one with GPUs where the
    # work is. Bounds count in steps of the rounding, so that those that are equal on paper leave the choice to it.
    steps = np.round(bounds_s / bounds_s.min(initial=np.inf) / RELATIVE_ROUNDING)
    order = np.lexsort((dual_bound_s(full, plans.counts, rounding=False) + added_s, steps))
    plans = BoundedPlans(plans.counts, plans.length_based_s, bounds_s).take(order)
    reachable = plans.bounds_s <= known_s * (1 + RELATIVE_ROUNDING)
    out_of_reach = _of_least_bound([out_of_reach, plans.take(~reachable)], max_dropped)
    dropped = out_of_reach.candidates(_OUT_OF_REACH) + over_threshold.candidates("Theorem 1: over the threshold")
    numbers = {
        "num_enumerated": num_enumerated,
        "num_too_short": num_enumerated - num_feasible,
        "num_over_threshold": num_feasible - num_within,
        "num_out_of_reach": num_within - int(reachable.sum()),
    }
    return plans.take(reachable), dropped, numbers


def _joined(parts: Sequence[BoundedPlans]) -> BoundedPlans:
    return BoundedPlans(
        np.concatenate([part.counts for part in parts]),
        np.concatenate([part.length_based_s for part in parts]),
        np.concatenate([part.bounds_s for part in parts]),
    )


def _of_least_bound(parts: Sequence[BoundedPlans], limit: int) -> BoundedPlans:
    """Return the deployments of least bound out of all parts, in order; Theorem 1 decides, then the other bound."""
    every = _joined(parts)
    return every.take(np.lexsort((every.bounds_s, every.length_based_s))[:limit])


def _solved_first(kept: BoundedPlans, search: BestFirstSearch) -> list[Candidate]:
    """Return what was left to solve as rows of a plan's table: solved ones by time, then the others."""
    table = kept.candidates(_OUT_OF_REACH)
    for row in search.unreached:
        table[row] = replace(table[row], verdict="not tried: the time for planning was spent")
    for row, answer in search.answers.items():
        verdict = "chosen" if row == search.best_row else f"not faster ({answer.status})"
        table[row] = replace(table[row], step_s=answer.step_s, verdict=verdict)
    # The chosen one comes first, even if others are as fast.
    table.sort(key=lambda row: (row.verdict != "chosen", np.inf if row.step_s is None else row.step_s))
    return table
