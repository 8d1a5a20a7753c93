"""LobRA and MuxTune composed: which replicas to deploy when each runs its own plan of MuxTune.

`plan_deployment` (L Eq. 2) prices a replica by one curve. Here the price of a replica is what `plan_tasks` predicts for
the rows that it would be dispatched: fusion, numbers of micro-batches, stages and order included. The planner is no
part of the integer programme, so that prices come in three steps, repeated until the answer stays:

    fit      each configuration is planned for a few loads, and a linear form fitted (`planned_loads.py`)
    search   deployments by that form, as ever: proposal, filter, solve
    price    the best of them by whole plans of all their replicas (`pricing.py`); what these take goes into the fit

What one curve chooses, and the equal replicas that are fastest by the forms, are priced in the same way and are among
those compared: the answer is never above them by this price. The search is no exact one: of deployments that the fit
puts far behind, whole plans are not made.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from peft_mux.scheduler.deployment.baselines import task_fused
from peft_mux.scheduler.deployment.composed.planned_loads import PlannedLoads
from peft_mux.scheduler.deployment.composed.pricing import DeploymentPricer, PricedDeployment
from peft_mux.scheduler.deployment.composed.row_mix import RowMix
from peft_mux.scheduler.deployment.plan import Candidate, DeploymentPlan
from peft_mux.scheduler.deployment.search import plan_deployment, replica_groups
from peft_mux.scheduler.deployment.space import count_plans
from peft_mux.scheduler.deployment.task_lengths import TaskLengths, joint_sample
from peft_mux.scheduler.dispatching.bucketing import DEFAULT_INTERVAL_TOKENS
from peft_mux.scheduler.replicas.configs import ReplicaGroup
from peft_mux.scheduler.replicas.planned_times import PlannedTimeModel
from peft_mux.scheduler.replicas.replica_planner import ReplicaPlanner
from peft_mux.scheduler.replicas.time_model import ReplicaTimeModel

DEFAULT_COMPOSED_BUDGET_S = 20.0
"""Seconds for plans, searches and prices together."""
_PLANNED_SHARE = 0.4
"""Part of them for planning configurations before the first search."""
_MOST_ROUNDS = 4
_PRICED_A_ROUND = 6
"""Deployments of each search that are priced by whole plans."""
_NEAR = 1.15
"""How far above the fastest deployment, by the fit or by a bound of it, another is priced too."""
_MOST_DEPLOYMENTS = 20_000
"""Of these all are gone through in a second or two; beyond, only the best configurations are combined."""
_SOLVING_SHARE = 0.3
"""Part of the seconds that are left that one search may solve for."""


@dataclass(frozen=True, slots=True)
class ComposedDeployment:
    """The replicas to deploy, priced by what runs on them.

    Attributes:
        plan: the deployment; its times are those of `model`.
        chosen: what MuxTune's plans of all its replicas take.
        single: the same of the deployment that one curve chooses.
        equal: the same of the fastest equal replicas; `None` where no configuration holds all sequences.
        model: what the plans of each configuration were fitted by.
        num_priced: deployments that were priced by whole plans.
        num_plans: plans of single replicas that were made.
        num_unplanned: configurations that there was no time to plan, which are priced by their curve.
        num_rounds: searches that were made.
        planning_s: seconds that all of it took.
    """

    plan: DeploymentPlan
    chosen: PricedDeployment
    single: PricedDeployment
    equal: PricedDeployment | None
    model: PlannedTimeModel
    num_priced: int
    num_plans: int
    num_unplanned: int
    num_rounds: int
    planning_s: float

    @property
    def fit_error(self) -> float:
        """Mean relative error of the fitted forms over the plans that they were fitted to."""
        return float(np.mean([terms.mean_relative_error for terms in self.model.terms.values()]))


def compose_deployment(
    tasks: Sequence[TaskLengths],
    single: DeploymentPlan,
    curve: ReplicaTimeModel,
    planner: ReplicaPlanner,
    *,
    also: Sequence[tuple[ReplicaGroup, ...]] = (),
    budget_s: float = DEFAULT_COMPOSED_BUDGET_S,
    **search: Any,
) -> ComposedDeployment:
    """Return the replicas that train an expected batch fastest when each follows MuxTune's plan for its rows.

    Args:
        tasks: the sampled lengths of each task and its batch, in the order of the planner's loads.
        single: what one curve chooses for the same tasks (`plan_deployment`).
        curve: the time model that it was chosen by; its configurations are what can be deployed.
        planner: plans single replicas.
        also: further deployments that are priced in any case, such as the replicas that there are.
        budget_s: seconds for all of it; where they are spent, configurations that are left are priced by the curve,
            and the best deployment so far is the answer.
        search: further options of `plan_deployment`, such as `interval` and `workers`.

    Raises:
        ValueError: where the tasks are not those of the planner, or not even the chosen deployment has a plan that
            fits; for a budget of 0.
    """
    start = time.perf_counter()
    if [task.name for task in tasks] != [load.name for load in planner.facts.loads]:
        raise ValueError(
            f"tasks are {', '.join(task.name for task in tasks)}; allowed: those of the planner, in their order: "
            f"{', '.join(load.name for load in planner.facts.loads)}."
        )
    if not budget_s > 0:
        raise ValueError(f"budget_s is {budget_s}; allowed: more than 0.")
    always = {group.config for groups in (single.groups, *also) for group in groups}
    loads = PlannedLoads(planner, RowMix(tasks), single.bucketing, curve, single.num_gpus, always)
    loads.plan_all(deadline=start + _PLANNED_SHARE * budget_s)
    run = _Composition(single, loads, tasks, start + budget_s, search)
    for groups in also:
        run.price(groups)
    run.search_until_stable()
    equal = run.fastest_equal()
    best = run.best
    return ComposedDeployment(
        plan=run.plan_of(best),
        chosen=best,
        single=run.single_price,
        equal=equal,
        model=loads.model(),
        num_priced=len(run.priced),
        num_plans=planner.num_plans,
        num_unplanned=loads.num_unplanned,
        num_rounds=run.num_rounds,
        planning_s=time.perf_counter() - start,
    )


class _Composition:
    """The state of `compose_deployment`: the deployments that were priced, and the searches that proposed them."""

    def __init__(
        self,
        single: DeploymentPlan,
        loads: PlannedLoads,
        tasks: Sequence[TaskLengths],
        deadline: float,
        search: dict[str, Any],
    ) -> None:
        self.single, self.loads, self.tasks, self.deadline, self.search = single, loads, tasks, deadline, search
        self.pricer = DeploymentPricer(loads)
        self.found: DeploymentPlan = single
        self.num_rounds = 0
        # With its own dispatch first, as it would run: what is compared with it may not be compared with less.
        self.single_price = self.pricer.price(single.groups, single.expected)
        if not np.isfinite(self.single_price.step_s):
            raise ValueError(
                f"{single.layout} has no plan that fits into memory; allowed: replicas that hold the rows that they "
                "are dispatched. Raise memory_limit_gib, or cut rows with max_length."
            )
        self.priced: dict[tuple[ReplicaGroup, ...], PricedDeployment] = {single.groups: self.single_price}

    @property
    def best(self) -> PricedDeployment:
        """The fastest of those that were priced; of equally fast ones the first, and so that of one curve."""
        return min(self.priced.values(), key=lambda one: one.step_s)

    def search_until_stable(self) -> None:
        """Search and price in turns, until a search names nothing new or the time is spent."""
        while self.num_rounds < _MOST_ROUNDS and time.perf_counter() < self.deadline:
            self.num_rounds += 1
            self.found = self._searched()
            new = [groups for groups in self._candidates() if groups not in self.priced]
            if not new:
                return
            for groups in new:
                if time.perf_counter() > self.deadline:
                    return
                self.price(groups)

    def price(self, groups: tuple[ReplicaGroup, ...]) -> None:
        """Price a deployment by whole plans, unless it was before, or does not hold the batch.

        Args:
            groups: the replicas, by configuration.
        """
        planned, longest = self.loads.model().terms, self.single.bucketing.boundaries[-1]
        is_able = all(group.config in planned for group in groups) and max(g.max_tokens for g in groups) >= longest
        if is_able and groups not in self.priced:
            self.priced[groups] = self.pricer.price(groups)

    def fastest_equal(self) -> PricedDeployment | None:
        """Return the fastest equal replicas: those fastest by the forms are priced, until whole plans leave them so."""
        interval = self.search.get("interval", DEFAULT_INTERVAL_TOKENS)
        while True:
            try:
                fused = task_fused(self.tasks, self.single.num_gpus, self.loads.model(), interval=interval)
            except ValueError:  # no configuration holds all sequences
                return None
            groups = fused.deployments[0]
            if groups in self.priced:
                return min((one for one in self.priced.values() if len(one.groups) == 1), key=lambda one: one.step_s)
            self.priced[groups] = self.pricer.price(groups)

    def plan_of(self, best: PricedDeployment) -> DeploymentPlan:
        """Return the plan of the deployment that was chosen, with times of the fitted model.

        Args:
            best: one of those that were priced.
        """
        expected = self.pricer.dispatched(best.groups, self.loads.model())
        rows = [self._counts(best.groups, plan) for plan in (self.found, self.single)]
        # The table of the last search, or else that of the curve, which then knows the deployment.
        plan, counts = next(
            ((plan, row) for plan, row in zip((self.found, self.single), rows, strict=True) if row is not None),
            (self.single, None),
        )
        return replace(
            plan,
            groups=best.groups,
            bucketing=self.single.bucketing,
            expected=expected,
            candidates=_with_chosen(plan.candidates, counts),
        )

    def _searched(self) -> DeploymentPlan:
        lengths, global_batch = joint_sample(self.tasks)
        model, num_gpus = self.loads.model(), self.single.num_gpus
        own = {group.config for group in self.best.groups}
        for within in (_NEAR, 1.0):
            wanted = own | set(self.loads.worth_combining(model, within))
            configs = [config for config in model.configurations if config in wanted]
            if count_plans(num_gpus, [config.num_gpus for config in configs]) <= _MOST_DEPLOYMENTS:
                break
        few = replace(
            model,
            terms={config: model.terms[config] for config in configs},
            max_tokens={config: model.max_tokens[config] for config in configs},
        )
        left_s = max(self.deadline - time.perf_counter(), 1.0)
        # What is worth combining was chosen above, by lighter loads than those of L's proposal.
        return plan_deployment(
            lengths, global_batch, num_gpus, few, proposal=False, budget_s=_SOLVING_SHARE * left_s, **self.search
        )

    def _candidates(self) -> list[tuple[ReplicaGroup, ...]]:
        """Return the fastest deployments of the last search, by the fit; where one was not solved, by its bound."""
        model = self.loads.model()

        def least_s(candidate: Candidate) -> float:
            return candidate.bound_s if candidate.step_s is None else candidate.step_s

        # Within the error of the fit, whole plans may turn the order round.
        limit_s = _NEAR * min(map(least_s, self.found.candidates))
        near = sorted((one for one in self.found.candidates if least_s(one) <= limit_s), key=least_s)
        found = [replica_groups(self.found.configurations, one.counts, model) for one in near[:_PRICED_A_ROUND]]
        return list(dict.fromkeys([self.found.groups, *found]))

    @staticmethod
    def _counts(groups: Sequence[ReplicaGroup], plan: DeploymentPlan) -> tuple[int, ...] | None:
        """Return the replicas of each configuration of a plan; `None` where it does not know one of them."""
        counts = {group.config: group.count for group in groups}
        if not counts.keys() <= set(plan.configurations):
            return None
        return tuple(counts.get(config, 0) for config in plan.configurations)


def _with_chosen(candidates: Sequence[Candidate], counts: tuple[int, ...] | None) -> tuple[Candidate, ...]:
    """Return the table with the deployment of these counts first, as the chosen one."""
    others = [
        replace(one, verdict="slower by whole plans") if one.verdict == "chosen" else one
        for one in candidates
        if one.counts != counts
    ]
    chosen = [replace(one, verdict="chosen") for one in candidates if one.counts == counts]
    return (*chosen, *others)
