"""`RowMix`: whose rows the sequences of a bucket are, for giving a replica its part of each task.

Deployment search knows lengths alone (L Eq. 2). What a replica's tasks cost together depends on which tasks bring the
sequences that it is dispatched, so each task is taken to have its share of every bucket.
"""

# MERGED: `PlannedLoads`: the loads that each configuration is planned for, and the linear forms that are fitted to
# MERGED: them.
# MERGED: `DeploymentPricer`: what a deployment takes when each replica follows MuxTune's plan for its rows.
# MERGED: LobRA and MuxTune composed: which replicas to deploy when each runs its own plan of MuxTune.
# MERGED: `plan_deployment` (L Eq. 2) prices a replica by one curve. Here the price of a replica is what `plan_tasks`
# MERGED: predicts for
# MERGED: the rows that it would be dispatched: fusion, numbers of micro-batches, stages and order included. The
# MERGED: planner is no
# MERGED: part of the integer programme, so that prices come in three steps, repeated until the answer stays:
# MERGED:     fit      each configuration is planned for a few loads, and a linear form fitted (`planned_loads.py`)
# MERGED:     search   deployments by that form, as ever: proposal, filter, solve
# MERGED: price    the best of them by whole plans of all their replicas (`pricing.py`); what these take goes into the
# MERGED: fit
# MERGED: What one curve chooses, and the equal replicas that are fastest by the forms, are priced in the same way and
# MERGED: are among
# MERGED: those compared: the answer is never above them by this price. The search is no exact one: of deployments
# MERGED: that the fit
# MERGED: puts far behind, whole plans are not made.

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from peft_mux.scheduler.deployment.baselines import task_fused
from peft_mux.scheduler.deployment.plan import Candidate, DeploymentPlan
from peft_mux.scheduler.deployment.search import plan_deployment, replica_groups
from peft_mux.scheduler.deployment.space import TaskLengths, count_plans, joint_rows, joint_sample
from peft_mux.scheduler.dispatching.bucketing import DEFAULT_INTERVAL_TOKENS, Bucketing
from peft_mux.scheduler.dispatching.dispatch import Dispatch, dispatch
from peft_mux.scheduler.planner.values import Outcome
from peft_mux.scheduler.replicas.configs import ParallelConfig, ReplicaGroup
from peft_mux.scheduler.replicas.replica_planner import ReplicaPlanner
from peft_mux.scheduler.replicas.time_model import (
    PlannedLoad,
    PlannedTerms,
    PlannedTimeModel,
    ReplicaTimeModel,
    fit_terms,
)


class RowMix:
    """Rows of all tasks in proportion to their batches, by length.

    Args:
        tasks: the sampled lengths of each task, and its batch.

    Example:
        >>> mix = RowMix([TaskLengths("chat", (10, 20), 2), TaskLengths("books", (90,), 1)])
        >>> mix.rows([32, 96], [1, 2])
        ((20,), (90, 90))
    """

    def __init__(self, tasks: Sequence[TaskLengths]) -> None:
        self.num_tasks = len(tasks)
        lengths, owners = (np.array(column, dtype=np.int64) for column in joint_rows(tasks))
        order = np.lexsort((owners, lengths))
        self.lengths, self.owners = lengths[order], owners[order]

    def rows(self, boundaries: Sequence[int], counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return for each task the lengths of its rows among so many sequences of each bucket.

        They are spread evenly over the sampled rows of the bucket, by task and then by length, so that the same counts
        are the same rows anywhere.

        Args:
            boundaries: padded length of each bucket in tokens, ascending.
            counts: sequences of each bucket.

        Raises:
            ValueError: for sequences of a bucket that the sample has no row of.
        """
        ends = np.searchsorted(self.lengths, np.asarray(boundaries), side="right")
        found: list[list[int]] = [[] for _ in range(self.num_tasks)]
        for start, end, boundary, count in zip([0, *ends[:-1]], ends, boundaries, counts, strict=True):
            if not count:
                continue
            if start == end:
                raise ValueError(
                    f"{count} sequences are padded to {boundary} tokens, which no sampled row is; allowed: buckets of "
                    "the sample."
                )
            by_task = np.lexsort((self.lengths[start:end], self.owners[start:end])) + start
            for place in by_task[((np.arange(count) + 0.5) * (end - start) / count).astype(np.int64)].tolist():
                found[int(self.owners[place])].append(int(self.lengths[place]))
        return tuple(map(tuple, found))


_SHARES = (0.5, 2.0)
"""Loads of all lengths alike, in shares that GPUs would have if all were equally busy."""
_WITHIN = 1.5
"""How many times slower than the best a configuration may be by the curve, at each length, and still be planned."""
_MICRO_BATCHES = 16
"""Over which the curve compares them; as in the proposal of L Appendix A."""
_PRICED_WEIGHT = 4.0
"""How much a load that a replica was dispatched counts against one that was made up."""


class PlannedLoads:
    """What plans take on each configuration, for loads that are made up and for those that were dispatched.

    Args:
        planner: plans single replicas.
        mix: whose rows the sequences of a bucket are.
        bucketing: the expected batch (L section 4.2).
        curve: the time model of one curve, which knows the configurations; what is not planned is priced by it.
        num_gpus: GPUs of the whole deployment.
        always: configurations that are planned however far behind the curve has them.

    Attributes:
        planner: as given.
        bucketing: as given.
    """

    def __init__(
        self,
        planner: ReplicaPlanner,
        mix: RowMix,
        bucketing: Bucketing,
        curve: ReplicaTimeModel,
        num_gpus: int,
        always: Collection[ParallelConfig] = (),
    ) -> None:
        self.planner, self.mix, self.bucketing, self.curve, self.num_gpus = planner, mix, bucketing, curve, num_gpus
        self.configs = self._worth_planning(always)
        self._known: dict[ParallelConfig, dict[tuple[int, ...], PlannedLoad]] = {}

    @property
    def num_unplanned(self) -> int:
        """Configurations without any plan."""
        return sum(config not in self._known for config in self.configs)

    def plan_all(self, *, deadline: float) -> None:
        """Plan each configuration for a few loads, until the time is spent.

        Args:
            deadline: time of `time.perf_counter` at which no further configuration is begun; one is planned anyway.
        """
        for config in self.configs:
            if self._known and time.perf_counter() > deadline:
                return
            for counts in self._made_up(config):
                self.step_s(config, counts, weight=1.0)

    def step_s(self, config: ParallelConfig, counts: Sequence[int], *, weight: float = _PRICED_WEIGHT) -> float:
        """Return the seconds that the plan of a replica takes for so many sequences of each bucket; kept for fits.

        Args:
            config: how the replica is spread over GPUs.
            counts: sequences of each bucket of the expected batch.
            weight: how much it counts in fits.
        """
        key = tuple(counts)
        if not any(key):
            return 0.0
        known = self._known.setdefault(config, {})
        if key not in known or known[key].weight < weight:
            seconds = self.planner.step_s(config, self.mix.rows(self.bucketing.boundaries, key))
            known[key] = PlannedLoad(key, self.bucketing.boundaries, seconds, weight)
        return known[key].seconds

    def model(self) -> PlannedTimeModel:
        """Return the linear forms fitted to all plans so far; without configurations that no plan fits into."""
        fits = {
            config: fit_terms(known.values())
            for config, known in self._known.items()
            if any(np.isfinite(load.seconds) for load in known.values())
        }
        fits |= self._of_the_curve(fits)
        return PlannedTimeModel(fits, {config: self.curve.max_tokens[config] for config in fits})

    def _of_the_curve(self, fits: dict[ParallelConfig, PlannedTerms]) -> dict[ParallelConfig, PlannedTerms]:
        """Return forms of the configurations that were not planned: the curve, scaled as plans are on the others."""
        left = [config for config in self.configs if config not in self._known]
        if not left:
            return {}
        ratios = [
            load.seconds / self._curve_s(config, load.counts)
            for config in fits
            for load in self._known[config].values()
            if np.isfinite(load.seconds)
        ]
        scale = statistics.median(ratios)
        found = {}
        for config in left:
            loads = [
                PlannedLoad(counts, self.bucketing.boundaries, scale * self._curve_s(config, counts))
                for counts in self._made_up(config)
            ]
            found[config] = fit_terms(loads)
        return found

    def _curve_s(self, config: ParallelConfig, counts: Sequence[int]) -> float:
        limit = self.curve.max_tokens[config]
        # A curve takes no length above its limit, not even for no sequences; lengths ascend.
        lengths = [length for length in self.bucketing.boundaries if length <= limit]
        return self.curve.step_s(config, counts[: len(lengths)], lengths, limit)

    def worth_combining(self, model: PlannedTimeModel, within: float) -> tuple[ParallelConfig, ...]:
        """Return the configurations of highest throughput for some number of GPUs, length and load (L Appendix A).

        L proposes by the throughput of many full micro-batches. Where loads are light, what a step costs at all decides
        as well, so that throughputs are those of the shares that replicas would have.

        Args:
            model: predicts the seconds of one replica.
            within: how many times slower than the best a configuration may be; 1 for none but the best.
        """
        chosen: set[ParallelConfig] = set()
        lengths = [length for length, count in self._expected() if count]
        for length, share in itertools.product(lengths, _SHARES):
            rates = {
                config: self._rate(model, config, length, share)
                for config in model.configurations
                if model.max_tokens[config] >= length
            }
            for size in {config.num_gpus for config in rates}:
                # On a multiple of its GPUs a configuration is replicated, at the same rate a GPU.
                rivals = [config for config in rates if size % config.num_gpus == 0]
                least = max(rates[config] for config in rivals) / within
                chosen |= {config for config in rivals if rates[config] >= least}
        return tuple(config for config in model.configurations if config in chosen)

    def _rate(self, model: PlannedTimeModel, config: ParallelConfig, length: int, share: float) -> float:
        """Return tokens a GPU and second of one length, for a share of the batch."""
        number = max(1.0, share * config.num_gpus / self.num_gpus * self.bucketing.padded_tokens / length)
        terms = model.terms[config]
        return number * length / (terms.fixed_s + number * terms.sequence_s(length)) / config.num_gpus

    def _worth_planning(self, always: Collection[ParallelConfig]) -> tuple[ParallelConfig, ...]:
        """Return the configurations that the curve has not far behind at every length, by GPUs."""
        fitting = [config for config in self.curve.configurations if config.num_gpus <= self.num_gpus]
        found = set(always)
        for length, count in self._expected():
            rates = {config: self.curve.throughput(config, length, _MICRO_BATCHES) for config in fitting if count}
            found |= {config for config, rate in rates.items() if rate and rate * _WITHIN >= max(rates.values())}
        return tuple(config for config in fitting if config in found)

    def _expected(self) -> list[tuple[int, int]]:
        """Return the padded length of each bucket and its sequences."""
        return list(zip(self.bucketing.boundaries, self.bucketing.counts, strict=True))

    def _made_up(self, config: ParallelConfig) -> list[tuple[int, ...]]:
        """Return the loads that a configuration is planned for: sequences of each bucket.

        All lengths that it holds, as they come in the batch, in several amounts; the shorter and the longer half of its
        tokens alone; and one sequence of the longest, which shows what a step costs at all.
        """
        limit = self.curve.max_tokens[config]
        fitting = np.array([count if length <= limit else 0 for length, count in self._expected()], dtype=float)
        if not fitting.any():
            return []
        lengths = np.array(self.bucketing.boundaries, dtype=float)
        # As many tokens as fall to its GPUs where all are equally busy; the lengths that it holds make them up.
        wanted = config.num_gpus / self.num_gpus * float(self.bucketing.padded_tokens)
        middle = np.searchsorted(np.cumsum(fitting * lengths), (fitting * lengths).sum() / 2)
        places = np.arange(len(lengths))
        found = [_scaled(fitting, lengths, share * wanted) for share in _SHARES]
        found += [_scaled(fitting * half, lengths, wanted) for half in (places <= middle, places >= middle)]
        longest = int(np.flatnonzero(fitting)[-1])
        found.append(tuple(int(place == longest) for place in places))
        return list(dict.fromkeys(found))


def _scaled(counts: np.ndarray, lengths: np.ndarray, tokens: float) -> tuple[int, ...]:
    """Return sequences in these proportions with about so many tokens; of each bucket that has any at least one."""
    scaled = counts * tokens / float((counts * lengths).sum())
    return tuple(int(max(1, round(count))) if count else 0 for count in scaled.tolist())


_MOST_DISPATCHES = 3
_CLOSE = 0.02
"""Relative difference of planned and fitted seconds up to which a dispatch is not tried again."""
_DISPATCH_LIMIT_S = 1.0


@dataclass(frozen=True, slots=True)
class PlannedReplica:
    """One or more replicas that are dispatched alike.

    Attributes:
        config: how each is spread over GPUs.
        num_replicas: replicas with these counts.
        counts: sequences of each bucket on one of them.
        step_s: seconds of a step under its plan, in which idle tasks are updated as well; inf where no plan fits.
        outcome: what it runs; `None` without sequences, and where no plan fits.
    """

    config: ParallelConfig
    num_replicas: int
    counts: tuple[int, ...]
    step_s: float
    outcome: Outcome | None


@dataclass(frozen=True, slots=True)
class PricedDeployment:
    """A deployment, and what its replicas run.

    Attributes:
        groups: the replicas, by configuration.
        replicas: what they run under the fastest dispatch that was tried.
    """

    groups: tuple[ReplicaGroup, ...]
    replicas: tuple[PlannedReplica, ...]

    @property
    def step_s(self) -> float:
        """Seconds of the slowest replica, and so of the step."""
        return max(replica.step_s for replica in self.replicas)

    @property
    def layout(self) -> str:
        """Return the replicas in the paper's notation."""
        return ", ".join(map(str, self.groups))


class DeploymentPricer:
    """Prices deployments by whole plans.

    Args:
        loads: plans replicas, and keeps what their plans take.
    """

    def __init__(self, loads: PlannedLoads) -> None:
        self.loads = loads

    def price(self, groups: Sequence[ReplicaGroup], known: Dispatch | None = None) -> PricedDeployment:
        """Return what a deployment takes under the best of a few dispatches.

        The first is by the fitted forms. Each further one is by forms that are scaled to what the plans of the one
        before have taken, so that work leaves the replicas that were dearer than fitted.

        Args:
            groups: the replicas, by configuration.
            known: a dispatch of the expected batch that is tried as well.
        """
        model = self.loads.model()
        tried = [self._planned(groups, known)] if known is not None else []
        for _ in range(_MOST_DISPATCHES):
            priced = self._planned(groups, self.dispatched(groups, model))
            tried.append(priced)
            ratios = self._ratios(priced, model)
            if all(abs(ratio - 1) <= _CLOSE for ratio in ratios.values()):
                break
            model = _rescaled(model, ratios)
        return min(tried, key=lambda one: one.step_s)

    def dispatched(self, groups: Sequence[ReplicaGroup], model: PlannedTimeModel) -> Dispatch:
        """Return the dispatch of the expected batch by a time model.

        Args:
            groups: the replicas, by configuration.
            model: predicts the seconds of one replica.
        """
        return dispatch(groups, self.loads.bucketing, model, time_limit_s=_DISPATCH_LIMIT_S)

    def _planned(self, groups: Sequence[ReplicaGroup], spread: Dispatch) -> PricedDeployment:
        replicas = []
        for group, rows in zip(groups, spread.replica_counts, strict=True):
            for counts in dict.fromkeys(rows):
                replicas.append(self._replica(group.config, rows.count(counts), counts))
        return PricedDeployment(tuple(groups), tuple(replicas))

    def _replica(self, config: ParallelConfig, number: int, counts: tuple[int, ...]) -> PlannedReplica:
        outcome = None
        if any(counts):
            rows = self.loads.mix.rows(self.loads.bucketing.boundaries, counts)
            outcome = self.loads.planner.plan(config, rows)
        return PlannedReplica(config, number, counts, self.loads.step_s(config, counts), outcome)

    def _ratios(self, priced: PricedDeployment, model: PlannedTimeModel) -> dict[ParallelConfig, float]:
        """Return planned over fitted seconds of the slowest replica of each configuration that has a plan."""
        slowest: dict[ParallelConfig, PlannedReplica] = {}
        for replica in priced.replicas:
            if replica.outcome is not None and (
                replica.config not in slowest or replica.step_s > slowest[replica.config].step_s
            ):
                slowest[replica.config] = replica
        boundaries = self.loads.bucketing.boundaries
        return {
            config: replica.step_s / model.step_s(config, replica.counts, boundaries, model.max_tokens[config])
            for config, replica in slowest.items()
        }


def _rescaled(model: PlannedTimeModel, ratios: dict[ParallelConfig, float]) -> PlannedTimeModel:
    """Return a model in which each configuration takes so many times as long."""

    def scaled(terms: PlannedTerms, ratio: float) -> PlannedTerms:
        return replace(
            terms,
            fixed_s=ratio * terms.fixed_s,
            each_s=ratio * terms.each_s,
            token_s=ratio * terms.token_s,
            square_s=ratio * terms.square_s,
        )

    terms = {config: scaled(own, ratios.get(config, 1.0)) for config, own in model.terms.items()}
    return replace(model, terms=terms)


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
