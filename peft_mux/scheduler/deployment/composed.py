"""LobRA and MuxTune composed: which replicas to deploy when each runs MuxTune's plan for its rows.

`plan_deployment` (L Eq. 2) prices a replica by one curve. Here the price of a replica is what `plan_tasks` predicts for
the rows that it would be dispatched: fusion, numbers of micro-batches, stages and order included. A whole plan takes
too long for every dispatch that a solver looks at, so that plans correct the curve instead::

    price    what the curve chooses, and the fastest equal replicas, by whole plans of their replicas;
             a plan's seconds over those of the curve are the `slowness` of its configuration
    search   deployments by the curve with these factors
    price    the best of them; repeat the search until it names nothing new or the time is spent

The answer is never above the deployments of the first line by this price. The search is not exact: whole plans are not
made of deployments that the corrected curve puts far behind.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from peft_mux.scheduler.deployment.baselines import task_fused
from peft_mux.scheduler.deployment.deployment_plan import Candidate, DeploymentPlan
from peft_mux.scheduler.deployment.search import plan_deployment
from peft_mux.scheduler.deployment.space import MOST_DEPLOYMENTS, TaskLengths, count_plans, joint_rows, joint_sample
from peft_mux.scheduler.dispatching.bucketing import DEFAULT_INTERVAL_TOKENS, Bucketing
from peft_mux.scheduler.dispatching.dispatch import Dispatch, dispatch
from peft_mux.scheduler.parallel_layout import ParallelConfig
from peft_mux.scheduler.replicas.exchange import GradientExchange
from peft_mux.scheduler.replicas.replica_planner import ReplicaPlanner
from peft_mux.scheduler.replicas.time_model import ReplicaGroup, ReplicaTimeModel, in_rank_order

DEFAULT_COMPOSED_BUDGET_S = 20.0
"""Seconds for plans, searches and prices together."""
_MOST_DISPATCHES = 3
_CLOSE = 0.02
"""Relative difference of planned and predicted seconds up to which a deployment is not dispatched again."""
_DISPATCH_LIMIT_S = 1.0
_PRICED_A_SEARCH = 4
"""Deployments of each search that are priced by whole plans."""
_NEAR = 1.15
"""How far above the fastest deployment, by the curve or by a bound of it, another is priced too."""
_SOLVING_SHARE = 0.3
"""Part of the seconds that are left that one search may solve for."""


@dataclass(frozen=True, slots=True)
class PlannedReplica:
    """One or more replicas that are dispatched the same numbers of sequences.

    Attributes:
        config: how each is spread over GPUs.
        num_replicas: replicas with these counts.
        counts: sequences of each bucket on one of them.
        num_sequences: their sum.
        htasks: the tasks of each hTask; none without sequences, and if no plan fits.
        micro_batches: passes of each hTask in a step.
        num_buckets: buckets into which hTasks are grouped.
        step_s: seconds of a step under its plan, in which idle tasks are updated as well; inf if no plan fits.
    """

    config: ParallelConfig
    num_replicas: int
    counts: tuple[int, ...]
    num_sequences: int
    htasks: tuple[tuple[str, ...], ...] = ()
    micro_batches: tuple[int, ...] = ()
    num_buckets: int = 0
    step_s: float = 0.0


@dataclass(frozen=True, slots=True)
class PricedDeployment:
    """A deployment and the plans of its replicas.

    Attributes:
        groups: the replicas, by configuration.
        replicas: what they run under the fastest dispatch that was tried.
        exchange_s: seconds in which they add gradients after the last pass; 0 if the exchange is taken as free.
    """

    groups: tuple[ReplicaGroup, ...]
    replicas: tuple[PlannedReplica, ...]
    exchange_s: float = 0.0

    @property
    def step_s(self) -> float:
        """Seconds of the step: of the slowest replica, and of the exchange after it."""
        return max(replica.step_s for replica in self.replicas) + self.exchange_s


@dataclass(frozen=True, slots=True)
class ComposedDeployment:
    """The replicas to deploy, priced by what runs on them.

    Attributes:
        plan: the deployment; its times are those of `model`.
        chosen: what MuxTune's plans of all its replicas take.
        single: the same for the deployment that one curve chooses.
        equal: the same for the fastest equal replicas.
        model: the curve, corrected by what plans take.
        fit_error: mean relative error of the model over the plans that were made.
        num_priced: deployments that were priced by whole plans.
        num_plans: plans of single replicas that were made.
        num_unplanned: configurations without a plan, which are corrected as the others are in the median.
        planning_s: seconds that all of it took.
    """

    plan: DeploymentPlan
    chosen: PricedDeployment
    single: PricedDeployment
    equal: PricedDeployment
    model: ReplicaTimeModel
    fit_error: float
    num_priced: int
    num_plans: int
    num_unplanned: int
    planning_s: float


class RowMix:
    """Rows of all tasks in proportion to their batches, by length.

    Deployment search knows lengths alone (L Eq. 2). What a replica's tasks cost together depends on which tasks bring
    the sequences that it is dispatched, so each task is taken to have its share of every bucket.

    Example:
        >>> mix = RowMix([TaskLengths("chat", (10, 20), 2), TaskLengths("books", (90,), 1)])
        >>> mix.rows([32, 96], [1, 2])
        ((20,), (90, 90))
    """

    def __init__(self, tasks: Sequence[TaskLengths]) -> None:
        self._num_tasks = len(tasks)
        lengths, task_numbers = (np.array(column, dtype=np.int64) for column in joint_rows(tasks))
        order = np.lexsort((task_numbers, lengths))
        self._lengths, self._task_numbers = lengths[order], task_numbers[order]

    def rows(self, boundaries: Sequence[int], counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return for each task the lengths of its rows among so many sequences of each bucket.

        They are spread evenly over the sampled rows of the bucket, by task and then by length, so that the same counts
        are the same rows anywhere.

        Raises:
            ValueError: for sequences of a bucket that the sample has no row of.
        """
        ends = np.searchsorted(self._lengths, np.asarray(boundaries), side="right")
        rows_of_task: list[list[int]] = [[] for _ in range(self._num_tasks)]
        for start, end, boundary, count in zip([0, *ends[:-1]], ends, boundaries, counts, strict=True):
            if not count:
                continue
            if start == end:
                raise ValueError(
                    f"buckets must be those of the sample, got {count} sequences padded to {boundary} tokens, to "
                    "which no sampled row is padded."
                )
            by_task = np.lexsort((self._lengths[start:end], self._task_numbers[start:end])) + start
            for place in by_task[((np.arange(count) + 0.5) * (end - start) / count).astype(np.int64)].tolist():
                rows_of_task[int(self._task_numbers[place])].append(int(self._lengths[place]))
        return tuple(map(tuple, rows_of_task))


class DeploymentPricer:
    """Prices deployments by whole plans, and corrects the curve by their times.

    Args:
        planner: plans single replicas.
        tasks: the sampled lengths of each task and its batch, in the order of the planner's loads.
        bucketing: the expected batch (L section 4.2).
        curve: the time model of one curve, which knows the configurations.
        exchange: predicts the exchange of gradients; `None` if it is free.

    Attributes:
        planner: as given.
        bucketing: as given.
        slowness: seconds of a plan over those of the curve, by configuration, of those that were planned.
    """

    def __init__(
        self,
        planner: ReplicaPlanner,
        tasks: Sequence[TaskLengths],
        bucketing: Bucketing,
        curve: ReplicaTimeModel,
        exchange: GradientExchange | None = None,
    ) -> None:
        self.planner, self.bucketing, self._exchange = planner, bucketing, exchange
        self._mix = RowMix(tasks)
        # Replicas pack their rows; by the curve alone, passes hold sequences of all lengths.
        self._curve = replace(curve, packs=True, slowness={})
        self.slowness: dict[ParallelConfig, float] = {}
        self._planned_s: dict[tuple[ParallelConfig, tuple[int, ...]], float] = {}

    @property
    def model(self) -> ReplicaTimeModel:
        """The curve, each configuration as much slower or faster as its last plans were."""
        typical = statistics.median(self.slowness.values()) if self.slowness else 1.0
        return replace(
            self._curve,
            slowness={config: self.slowness.get(config, typical) for config in self._curve.configurations},
        )

    @property
    def fit_error(self) -> float:
        """Mean relative error of the model over all plans that fit."""
        model = self.model
        known = [(place, seconds) for place, seconds in self._planned_s.items() if math.isfinite(seconds)]
        return statistics.fmean(abs(self._predicted_s(model, *place) / seconds - 1) for place, seconds in known)

    def price(
        self, groups: tuple[ReplicaGroup, ...], known: Dispatch | None = None, *, deadline: float = math.inf
    ) -> PricedDeployment:
        """Return the step time of a deployment under the best of a few dispatches.

        The first is by the model so far. Each further one is by the model that the plans of the one before have
        corrected, so that work leaves the replicas that were slower than predicted.

        Args:
            groups: the replicas, by configuration.
            known: a dispatch of the expected batch that is tried first.
            deadline: time of `time.perf_counter` after which no further dispatch is tried.
        """
        tried = []
        if known is not None:
            tried.append(self._priced(groups, known))
            self.learn(tried[-1])
        for _ in range(_MOST_DISPATCHES):
            if tried and time.perf_counter() > deadline:
                break
            spread = dispatch(groups, self.bucketing, self.model, time_limit_s=_DISPATCH_LIMIT_S)
            tried.append(self._priced(groups, spread))
            if self.learn(tried[-1]) <= _CLOSE:
                break
        return min(tried, key=lambda priced: priced.step_s)

    def learn(self, priced: PricedDeployment) -> float:
        """Correct the curve by the slowest replica of each configuration; return the largest relative change."""
        before, changes = self.model.slowness, [0.0]
        for config in dict.fromkeys(group.config for group in priced.groups):
            replicas = [replica for replica in priced.replicas if replica.config == config and replica.htasks]
            if replicas:
                slowest = max(replicas, key=lambda replica: replica.step_s)
                slowness = slowest.step_s / self._predicted_s(self._curve, config, slowest.counts)
                changes.append(abs(slowness / before[config] - 1))
                self.slowness[config] = slowness
        return max(changes)

    def _priced(self, groups: tuple[ReplicaGroup, ...], spread: Dispatch) -> PricedDeployment:
        """Return the times of a deployment's replicas under a dispatch; equal replicas are planned once."""
        replicas = []
        ready_s = dict.fromkeys((load.name for load in self.planner.facts.loads), 0.0)
        links, first = {}, 0
        for group in in_rank_order(groups):
            links[group.config] = self.planner.facts.stage_links(group.config, group.count, first)
            first += group.num_gpus
        for group, rows in zip(groups, spread.replica_counts, strict=True):
            for counts in dict.fromkeys(rows):
                replica = group.config, self._mix.rows(self.bucketing.boundaries, counts), links[group.config]
                step_s = self.planner.step_s(*replica)
                outcome = None
                if any(counts):
                    self._planned_s[group.config, counts] = step_s
                    outcome = self.planner.plan(*replica)
                    if self._exchange is not None:
                        ready_here_s = self.planner.ready_s(*replica)
                        ready_s = {name: max(seconds, ready_here_s[name]) for name, seconds in ready_s.items()}
                htasks, buckets = ((), ()) if outcome is None else (outcome.htasks, outcome.buckets)
                replicas.append(
                    PlannedReplica(
                        group.config,
                        num_replicas=rows.count(counts),
                        counts=counts,
                        num_sequences=sum(counts),
                        htasks=tuple(htask.tasks for htask in htasks),
                        micro_batches=tuple(htask.micro_batches for htask in htasks),
                        num_buckets=len(buckets),
                        step_s=step_s,
                    )
                )
        exchange_s = 0.0 if self._exchange is None else self._exchange.exposed_s(groups, ready_s)
        return PricedDeployment(groups, tuple(replicas), exchange_s)

    def _predicted_s(self, model: ReplicaTimeModel, config: ParallelConfig, counts: Sequence[int]) -> float:
        limit = model.max_tokens[config]
        # A curve takes no length above its limit, not even for no sequences; lengths ascend.
        lengths = [length for length in self.bucketing.boundaries if length <= limit]
        return model.step_s(config, counts[: len(lengths)], lengths, limit)


def compose_deployment(
    tasks: Sequence[TaskLengths],
    single: DeploymentPlan,
    curve: ReplicaTimeModel,
    planner: ReplicaPlanner,
    *,
    also: Sequence[tuple[ReplicaGroup, ...]] = (),
    budget_s: float = DEFAULT_COMPOSED_BUDGET_S,
    exchange: GradientExchange | None = None,
    **search: Any,
) -> ComposedDeployment:
    """Return the replicas that train an expected batch fastest when each follows MuxTune's plan for its rows.

    Args:
        tasks: the sampled lengths of each task and its batch, in the order of the planner's loads.
        single: what one curve chooses for the same tasks (`plan_deployment`).
        curve: the time model that it was chosen by; its configurations are what can be deployed.
        planner: plans single replicas.
        also: further deployments that are priced in any case, such as the present replicas; those that do not hold the
            batch are left out.
        budget_s: seconds for all of it; when they are spent, the best deployment so far is the answer. What one curve
            chooses, `also` and the fastest equal replicas are priced whatever it is.
        exchange: predicts the exchange of gradients, as `single` was chosen with.
        search: further options of `plan_deployment`, such as `interval`.

    Raises:
        ValueError: if not even the chosen deployment has a plan that fits.
    """
    start = time.perf_counter()
    assert [task.name for task in tasks] == [load.name for load in planner.facts.loads], "one load for each task"
    deadline, num_gpus, longest = start + budget_s, single.num_gpus, single.bucketing.boundaries[-1]
    pricer = DeploymentPricer(planner, tasks, single.bucketing, curve, exchange)
    # With its own dispatch first, as it would run: what is compared with it may not be compared with less.
    single_price = pricer.price(single.groups, single.expected, deadline=deadline)
    if not math.isfinite(single_price.step_s):
        raise ValueError(
            f"{single.layout} has no plan that fits into memory. Raise memory_limit_gib, or cut rows with max_length."
        )
    priced = {single.groups: single_price}
    for groups in also:
        if groups not in priced and max(group.max_tokens for group in groups) >= longest:
            priced[groups] = pricer.price(groups, deadline=deadline)

    def fastest_equal() -> PricedDeployment:
        """Price the equal replicas that are fastest by the model, until whole plans leave them so."""
        interval = search.get("interval", DEFAULT_INTERVAL_TOKENS)
        while True:
            (groups,) = task_fused(tasks, num_gpus, pricer.model, interval=interval, exchange=exchange).deployments
            if groups in priced:
                return min((done for done in priced.values() if len(done.groups) == 1), key=lambda done: done.step_s)
            priced[groups] = pricer.price(groups, deadline=deadline)

    fastest_equal()
    lengths, global_batch = joint_sample(tasks)
    sizes = [config.num_gpus for config in curve.configurations if config.num_gpus <= num_gpus]
    # L proposes configurations by the throughput of many full micro-batches, which light loads do not have.
    proposal = count_plans(num_gpus, sizes) > MOST_DEPLOYMENTS
    proposed = single
    while (left_s := deadline - time.perf_counter()) > 0:
        proposed = plan_deployment(
            lengths,
            global_batch,
            num_gpus,
            pricer.model,
            proposal=proposal,
            budget_s=_SOLVING_SHARE * left_s,
            exchange=exchange,
            **search,
        )
        new = [groups for groups in _near_best(proposed, curve) if groups not in priced]
        for groups in new:
            if time.perf_counter() > deadline:
                break
            priced[groups] = pricer.price(groups, deadline=deadline)
        if not new:
            break
    equal = fastest_equal()
    # Of equally fast ones the first, and so the choice of one curve.
    best = min(priced.values(), key=lambda done: done.step_s)
    pricer.learn(best)
    model = pricer.model
    return ComposedDeployment(
        plan=replace(
            _with_chosen(best.groups, proposed, single),
            groups=best.groups,
            bucketing=single.bucketing,
            expected=dispatch(best.groups, single.bucketing, model, time_limit_s=_DISPATCH_LIMIT_S),
            exchange_s=best.exchange_s,
        ),
        chosen=best,
        single=single_price,
        equal=equal,
        model=model,
        fit_error=pricer.fit_error,
        num_priced=len(priced),
        num_plans=planner.num_plans,
        num_unplanned=len(curve.configurations) - len(pricer.slowness),
        planning_s=time.perf_counter() - start,
    )


def _near_best(plan: DeploymentPlan, curve: ReplicaTimeModel) -> list[tuple[ReplicaGroup, ...]]:
    """Return the fastest deployments of a search; one that was not solved counts by its bound."""

    def least_s(candidate: Candidate) -> float:
        return candidate.bound_s if candidate.step_s is None else candidate.step_s

    # Within the error of the model, whole plans may turn the order round.
    limit_s = _NEAR * min(map(least_s, plan.candidates))
    near = sorted((candidate for candidate in plan.candidates if least_s(candidate) <= limit_s), key=least_s)
    groups = [
        curve.groups(dict(zip(plan.configurations, candidate.counts, strict=True)))
        for candidate in near[:_PRICED_A_SEARCH]
    ]
    return list(dict.fromkeys([plan.groups, *groups]))


def _with_chosen(groups: Sequence[ReplicaGroup], *plans: DeploymentPlan) -> DeploymentPlan:
    """Return the first plan whose configurations include those of a deployment, with that first in its table."""
    counts = {group.config: group.count for group in groups}
    plan = next((plan for plan in plans if counts.keys() <= set(plan.configurations)), plans[-1])
    chosen_counts = tuple(counts.get(config, 0) for config in plan.configurations)
    others = [
        replace(candidate, verdict="slower by whole plans") if candidate.verdict == "chosen" else candidate
        for candidate in plan.candidates
        if candidate.counts != chosen_counts
    ]
    chosen = [
        replace(candidate, verdict="chosen") for candidate in plan.candidates if candidate.counts == chosen_counts
    ]
    return replace(plan, candidates=(*chosen, *others))
