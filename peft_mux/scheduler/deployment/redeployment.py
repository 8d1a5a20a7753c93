"""Whether other replicas would pay, now that tasks have come or gone (L section 5.1, "dynamic batches").

The paper restarts whenever the new plan differs. Here the saving over the steps that are left is held against what the
restart costs. The trainer carries a decision out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from peft_mux.scheduler.deployment.plan import DeploymentPlan
from peft_mux.scheduler.dispatching.dispatch import dispatch
from peft_mux.scheduler.replicas.configs import DeployableTimeModel, ParallelConfig, ReplicaGroup

DEFAULT_RESTART_S = 180.0
"""L section 5.1: "consistently less than 3 minutes in practice"; what was measured should take its place."""


@dataclass(frozen=True, slots=True)
class Redeployment:
    """A decision, and what it rests on.

    Attributes:
        old: the replicas that there are, in LobRA's notation.
        new: the replicas that would be fastest, in LobRA's notation; as `old` where nothing is faster.
        old_step_s: predicted seconds of a step of all present tasks on the old replicas; infinite where a sequence
            fits none of them.
        new_step_s: predicted seconds of a step of all present tasks on the new replicas.
        remaining_steps: the work that is left, in steps of all present tasks.
        restart_s: seconds that the restart costs.
    """

    old: str
    new: str
    old_step_s: float
    new_step_s: float
    remaining_steps: float
    restart_s: float

    @property
    def saving_s(self) -> float:
        """Seconds that the new replicas save over what is left, the restart not yet paid."""
        # No steps times an infinite difference would be NaN.
        if self.old == self.new or not self.remaining_steps:
            return 0.0
        return (self.old_step_s - self.new_step_s) * self.remaining_steps

    @property
    def is_needed(self) -> bool:
        """Whether the old replicas cannot hold a sequence of the present tasks."""
        return math.isinf(self.old_step_s)

    @property
    def pays(self) -> bool:
        """Whether to restart: where it is needed, or saves more than it costs."""
        return self.is_needed or self.saving_s > self.restart_s

    def __str__(self) -> str:
        """Return one line with both sides of the decision."""
        if self.is_needed:
            return f"redeploy {self.old} -> {self.new}: the old replicas cannot hold the longest sequence"
        if self.old == self.new:
            return f"keep {self.old}: no other replicas are faster"
        verb = "redeploy" if self.pays else "keep"
        return (
            f"{verb} {self.old} -> {self.new}: {self.old_step_s:.4f} s a step becomes {self.new_step_s:.4f} s, which "
            f"saves {self.saving_s:.1f} s over {self.remaining_steps:.0f} steps; a restart costs {self.restart_s:.1f} s"
        )


def decide_redeployment(
    old: Sequence[ParallelConfig],
    plan: DeploymentPlan,
    time_model: DeployableTimeModel,
    *,
    remaining: Sequence[tuple[int, float]],
    restart_s: float,
) -> Redeployment:
    """Hold a plan for the present tasks against the replicas that there are.

    Tasks end one by one, and a step without some of them costs less: what is left is counted in steps of all of them,
    by tokens.

    Args:
        old: the configuration of each replica that there is, in any order.
        plan: the deployment that was planned for the present tasks, on the same devices.
        time_model: predicts the seconds of one replica; it knows the old configurations too, where they hold anything.
        remaining: the steps that each task has left, and its tokens in a step.
        restart_s: seconds that the restart costs.

    Raises:
        ValueError: for a negative cost.
    """
    if not 0 <= restart_s < math.inf:
        raise ValueError(f"restart_s is {restart_s}; allowed: 0 or more. Give seconds.")
    groups = groups_of(old, time_model)
    tokens_per_step = sum(tokens for _, tokens in remaining)
    tokens_left = sum(max(0, steps) * tokens for steps, tokens in remaining)
    old_layout, new_layout = _notation(old), _notation(_replica_configs(plan))
    old_step_s = _step_s(groups, plan, time_model)
    # Both are found by heuristics: what there is may be as good as what was planned.
    stays = sorted(old) == sorted(_replica_configs(plan)) or old_step_s <= plan.expected_step_s
    return Redeployment(
        old=old_layout,
        new=old_layout if stays else new_layout,
        old_step_s=old_step_s,
        new_step_s=old_step_s if stays else plan.expected_step_s,
        remaining_steps=tokens_left / tokens_per_step if tokens_per_step else 0.0,
        restart_s=restart_s,
    )


def groups_of(configs: Sequence[ParallelConfig], time_model: DeployableTimeModel) -> tuple[ReplicaGroup, ...]:
    """Return the replicas by configuration; those that hold nothing are left out.

    Args:
        configs: the configuration of each replica, in any order.
        time_model: knows the most tokens of a micro-batch on each configuration.
    """
    return tuple(
        ReplicaGroup(config, list(configs).count(config), time_model.max_tokens[config])
        for config in sorted(set(configs), key=lambda config: (config.num_gpus, config))
        if config in time_model.max_tokens
    )


def _step_s(groups: Sequence[ReplicaGroup], plan: DeploymentPlan, time_model: DeployableTimeModel) -> float:
    """Return the seconds of the plan's expected batch on other replicas; infinite where they cannot hold it."""
    supported = max((group.max_tokens for group in groups), default=0)
    if supported < plan.longest:
        return math.inf
    # A plan that did not know the old replicas may round the longest sequences up past what these hold.
    *shorter, last = plan.bucketing.boundaries
    bucketing = replace(plan.bucketing, boundaries=(*shorter, min(last, supported)))
    return dispatch(groups, bucketing, time_model).makespan_s


def _replica_configs(plan: DeploymentPlan) -> list[ParallelConfig]:
    """Return the configuration of each planned replica."""
    return [group.config for group in plan.groups for _ in range(group.count)]


def _notation(configs: Sequence[ParallelConfig]) -> str:
    """Return replicas in the paper's notation, such as <1,1>x4, <2,1>x1."""
    return ", ".join(f"{config}x{list(configs).count(config)}" for config in dict.fromkeys(configs))
