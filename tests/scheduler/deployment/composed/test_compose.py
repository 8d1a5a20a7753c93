"""The composed search: deployments priced by MuxTune's plans of their replicas, against one curve and brute force."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peft_mux.scheduler.deployment.baselines import task_fused
from peft_mux.scheduler.deployment.composed import DeploymentPricer, PlannedLoads, PricedDeployment, RowMix
from peft_mux.scheduler.deployment.search import replica_groups
from peft_mux.scheduler.deployment.space import enumerate_plans
from peft_mux.scheduler.pipeline.simulator import simulate
from peft_mux.scheduler.replicas.configs import ParallelConfig, ReplicaGroup
from tests.scheduler.deployment.composed.cases import INTERVAL, Case, make_case

TWO_ROWS = ((881, 717),)
PIPELINE_LOSES = ((1894,), (2003,), (32, 51, 57, 16))


def pricer_of(case: Case) -> DeploymentPricer:
    """Return a pricer that has planned nothing yet but the loads that all configurations are planned for."""
    loads = PlannedLoads(
        case.planner(),
        RowMix(case.tasks),
        case.single.bucketing,
        case.curve,
        case.single.num_gpus,
        case.curve.configurations,
    )
    loads.plan_all(deadline=math.inf)
    return DeploymentPricer(loads)


def simulated_s(priced: PricedDeployment) -> float:
    """Return the makespan of the slowest replica's template, simulated anew; updates of tasks left out."""
    outcomes = [replica.outcome for replica in priced.replicas if replica.outcome is not None]
    return max(simulate(one.template, one.bucket_loads).makespan_s for one in outcomes if one.template is not None)


def test_two_long_rows_on_four_devices_go_to_two_replicas_of_two_and_not_to_three_unequal_ones() -> None:
    """By the curve a third replica costs nothing; by the plans the rows that are alone on one device set the pace."""
    case = make_case(TWO_ROWS)
    found = case.composed()
    assert case.single.layout == found.single.layout != found.plan.layout
    assert found.plan.layout == "<2,1>x2"
    assert found.chosen.step_s < 0.9 * found.single.step_s
    assert simulated_s(found.chosen) < 0.9 * simulated_s(found.single)


def test_the_answer_is_faster_by_the_simulator_where_the_curve_chose_a_pipeline() -> None:
    case = make_case(PIPELINE_LOSES, limit_bytes=6 * 10**9, pass_tokens=1024)
    found = case.composed()
    assert found.plan.layout != case.single.layout
    assert found.chosen.step_s < 0.95 * found.single.step_s
    assert simulated_s(found.chosen) < 0.95 * simulated_s(found.single)


batches = st.lists(
    st.lists(st.sampled_from([20, 60, 200, 700, 1500, 2300]), min_size=1, max_size=4), min_size=1, max_size=3
)


@settings(max_examples=8, deadline=None)
@given(batches, st.sampled_from([2, 4]), st.sampled_from([6, 20]))
def test_by_the_composed_price_it_is_never_slower_than_what_one_curve_chooses(
    drawn: list[list[int]], num_gpus: int, limit_gb: int
) -> None:
    case = make_case(drawn, num_gpus=num_gpus, limit_bytes=limit_gb * 10**9)
    found = case.composed()
    assert found.single.groups == case.single.groups
    assert found.chosen.step_s <= found.single.step_s
    # Planned anew, by nobody's memory, each replica takes what was said, and all of them hold the whole batch.
    fresh, mix = case.planner(), RowMix(case.tasks)
    for replica in found.chosen.replicas:
        rows = mix.rows(case.single.bucketing.boundaries, replica.counts)
        assert replica.step_s == fresh.step_s(replica.config, rows)
    dispatched = zip(*(tuple(r.num_replicas * n for n in r.counts) for r in found.chosen.replicas), strict=True)
    assert tuple(map(sum, dispatched)) == case.single.bucketing.counts


@pytest.mark.parametrize("drawn", [TWO_ROWS, PIPELINE_LOSES, ((300, 200, 100) * 4, (2000, 1500))])
def test_it_is_near_the_best_of_all_deployments_priced_one_by_one(drawn: tuple[tuple[int, ...], ...]) -> None:
    case = make_case(drawn, limit_bytes=6 * 10**9, pass_tokens=1024)
    pricer = pricer_of(case)
    model = pricer.loads.model()
    configs = model.configurations
    best_s = math.inf
    for block in enumerate_plans(case.single.num_gpus, [config.num_gpus for config in configs]):
        for counts in block.tolist():
            groups = replica_groups(configs, counts, model)
            if max(group.max_tokens for group in groups) >= case.single.bucketing.boundaries[-1]:
                best_s = min(best_s, pricer.price(groups).step_s)
    assert best_s <= case.composed().chosen.step_s <= 1.03 * best_s


def test_forms_fitted_to_plans_are_near_them_and_its_plan_has_their_seconds() -> None:
    case = make_case(((300, 200, 100) * 4, (2000, 1500)), limit_bytes=6 * 10**9)
    found = case.composed()
    assert found.fit_error < 0.1
    assert found.plan.expected_step_s == pytest.approx(found.chosen.step_s, rel=0.15)
    assert found.plan.candidates[0].verdict == "chosen"
    assert [one.verdict for one in found.plan.candidates].count("chosen") == 1
    assert found.num_unplanned == 0


def test_without_time_the_curve_stands_in_and_what_it_chose_or_equal_replicas_are_the_answer() -> None:
    case = make_case(PIPELINE_LOSES, limit_bytes=6 * 10**9, pass_tokens=1024)
    found = case.composed(budget_s=1e-6)
    assert found.num_unplanned > 0
    assert found.num_rounds == 0
    assert found.equal is not None
    assert found.chosen == min(found.single, found.equal, key=lambda one: one.step_s)
    assert set(found.model.terms) <= set(case.curve.configurations)


def test_replicas_that_there_are_are_priced_too_unless_they_hold_less_than_the_batch() -> None:
    case = make_case(PIPELINE_LOSES, limit_bytes=6 * 10**9, pass_tokens=1024)
    able = replica_groups([ParallelConfig(4, 1)], [1], case.curve)
    short = (ReplicaGroup(ParallelConfig(1, 1), 4, 2000),)
    assert short[0].max_tokens < case.single.bucketing.boundaries[-1] <= able[0].max_tokens
    plain = case.composed(budget_s=1e-6)
    assert case.composed(also=[able, short], budget_s=1e-6).num_priced == plain.num_priced + 1


@pytest.mark.parametrize("budget_s", [1e-6, 600.0])
@pytest.mark.parametrize("drawn", [TWO_ROWS, PIPELINE_LOSES, ((300, 200, 100) * 4, (2000, 1500))])
def test_no_equal_replicas_are_faster_than_the_answer_however_little_time_there_was(
    drawn: tuple[tuple[int, ...], ...], budget_s: float
) -> None:
    case = make_case(drawn, limit_bytes=6 * 10**9, pass_tokens=1024)
    found = case.composed(budget_s=budget_s)
    fused = task_fused(case.tasks, case.single.num_gpus, found.model, interval=INTERVAL)
    assert found.equal is not None
    assert found.equal.layout == ", ".join(map(str, fused.deployments[0]))
    assert found.chosen.step_s <= found.equal.step_s


def test_other_tasks_and_no_time_at_all_are_refused() -> None:
    case = make_case(TWO_ROWS)
    with pytest.raises(ValueError, match="tasks are other; allowed: those of the planner, in their order: task-0"):
        case._replace(tasks=[case.tasks[0].__class__("other", (100,), 1)]).composed()
    with pytest.raises(ValueError, match=r"budget_s is 0\.0; allowed: more than 0"):
        case.composed(budget_s=0.0)
