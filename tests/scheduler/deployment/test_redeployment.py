"""Whether other replicas pay: the saving over what is left against the restart."""

from __future__ import annotations

import math

import pytest

from peft_mux.scheduler.deployment.deployment_plan import DeploymentPlan, Redeployment, decide_redeployment
from peft_mux.scheduler.deployment.search import plan_deployment
from peft_mux.scheduler.parallel_layout import ParallelConfig
from peft_mux.scheduler.replicas.time_model import LayerFit, ReplicaTimeModel

ONE, TWO, FOUR = ParallelConfig(1, 1), ParallelConfig(2, 1), ParallelConfig(4, 1)
MODEL = ReplicaTimeModel(
    {tp: LayerFit((0, 0, 1e-4 / tp**0.6, 0, 0, 0)) for tp in (1, 2, 4)},
    num_layers=1,
    max_tokens={ONE: 512, TWO: 1024, FOUR: 4096},
)
SHORT, LONG = (100,) * 64, (100,) * 60 + (4000,)


def plan_of(lengths: tuple[int, ...]) -> DeploymentPlan:
    return plan_deployment(lengths, len(lengths), 4, MODEL)


def decide(
    old: tuple[ParallelConfig, ...], lengths: tuple[int, ...] = SHORT, steps: int = 100, restart_s: float = 1.0
) -> Redeployment:
    return decide_redeployment(old, plan_of(lengths), MODEL, remaining=[(steps, 6400.0)], restart_s=restart_s)


def test_short_sequences_leave_large_replicas_if_enough_steps_are_left_to_pay_the_restart() -> None:
    decision = decide((FOUR,))
    assert (decision.old, decision.new) == ("<4,1>x1", "<1,1>x4")
    assert decision.saving_s == pytest.approx(100 * (decision.old_step_s - decision.new_step_s))
    assert decision.pays
    assert str(decision).startswith("redeploy <4,1>x1 -> <1,1>x4")
    assert f"saves {decision.saving_s:.1f} s over 100 steps; a restart costs 1.0 s" in str(decision)
    assert not decide((FOUR,), restart_s=decision.saving_s * 1.01).pays
    assert decide((FOUR,), restart_s=decision.saving_s * 0.99).pays
    assert not decide((FOUR,), steps=1).pays
    assert str(decide((FOUR,), steps=0)).startswith("keep <4,1>x1 -> <1,1>x4")


def test_equal_replicas_in_another_order_are_kept_and_what_is_left_is_counted_in_steps_of_all_tasks_by_tokens() -> None:
    plan = plan_of((100,) * 60 + (1000,))
    configs = [group.config for group in plan.groups for _ in range(group.count)]
    assert len(plan.groups) > 1, "the case has but one kind of replica"
    remaining = [(100, 300.0), (20, 100.0), (-5, 0.0)]
    decision = decide_redeployment(configs[::-1], plan, MODEL, remaining=remaining, restart_s=0.0)
    assert decision.old == decision.new
    assert (decision.pays, decision.saving_s) == (False, 0)
    assert decision.remaining_steps == pytest.approx((100 * 300 + 20 * 100) / 400)


def test_replicas_that_cannot_hold_a_new_task_are_left_at_any_price() -> None:
    decision = decide((ONE,) * 4, LONG, steps=0, restart_s=10**6)
    assert decision.is_needed
    assert decision.pays
    assert decision.new == "<4,1>x1"
    assert math.isinf(decision.old_step_s)
    assert "cannot hold the longest sequence" in str(decision)


def test_replicas_that_hold_the_longest_sequence_but_not_its_rounded_length_are_no_reason_to_restart() -> None:
    odd = ReplicaTimeModel(MODEL.fits, 1, {**MODEL.max_tokens, ONE: 1000})
    lengths = (100,) * 60 + (900,)
    unaware = plan_deployment(lengths, len(lengths), 4, ReplicaTimeModel(MODEL.fits, 1, {TWO: 1024, FOUR: 4096}))
    aware = plan_deployment(lengths, len(lengths), 4, odd)
    assert (unaware.bucketing.boundaries[-1], aware.bucketing.boundaries[-1]) == (1024, 1000)
    for plan in (unaware, aware):
        decision = decide_redeployment((ONE,) * 4, plan, odd, remaining=[(1, 10.0)], restart_s=10.0)
        assert not decision.is_needed
        assert not decision.pays
        assert decision.old == "<1,1>x4"
        assert math.isfinite(decision.old_step_s)
