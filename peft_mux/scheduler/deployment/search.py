"""Which replicas to deploy for a joint run: the first stage of LobRA (L section 4.2, Eq. 2, Appendix A).

`plan_deployment` puts the parts together: candidate configurations and their combinations (`space.py`), lower bounds
(`bounds.py`, `filter.py`), an integer programme for each combination left (`solve.py`). Each step's sequences are then
spread by `dispatch`. The value that comes out is in `plan.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from peft_mux.scheduler.deployment.filter import BoundedPlans, FilteredPlans, filter_plans
from peft_mux.scheduler.deployment.plan import Candidate, DeploymentPlan, PlanningStatistics
from peft_mux.scheduler.deployment.solve import SolvedPlans, SolverOptions, solve_plans
from peft_mux.scheduler.deployment.space import (
    benchmark_lengths,
    configurations_that_fit,
    count_plans,
    propose_configurations,
)
from peft_mux.scheduler.dispatching.bucketing import (
    DEFAULT_INTERVAL_TOKENS,
    DEFAULT_NUM_BUCKETS,
    Bucketing,
    bucket_boundaries,
)
from peft_mux.scheduler.dispatching.checks import check_at_least_one
from peft_mux.scheduler.dispatching.dispatch import DEFAULT_RELATIVE_GAP, Dispatch, dispatch
from peft_mux.scheduler.dispatching.ilp import check_solver_name
from peft_mux.scheduler.dispatching.problem import DispatchProblem, build_problem
from peft_mux.scheduler.replicas.configs import DeployableTimeModel, ParallelConfig, ReplicaGroup, TimeModel

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
