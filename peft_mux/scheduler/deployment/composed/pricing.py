"""`DeploymentPricer`: what a deployment takes when each replica follows MuxTune's plan for its rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from peft_mux.scheduler.deployment.composed.planned_loads import PlannedLoads
from peft_mux.scheduler.dispatching.dispatch import Dispatch, dispatch
from peft_mux.scheduler.planner.values import Outcome
from peft_mux.scheduler.replicas.configs import ParallelConfig, ReplicaGroup
from peft_mux.scheduler.replicas.planned_times import PlannedTerms, PlannedTimeModel

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
