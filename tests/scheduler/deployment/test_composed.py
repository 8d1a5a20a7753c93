"""The composed search: deployments priced by MuxTune's plans of their replicas, against one curve and brute force."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peft_mux.scheduler.costs.hardware import parse_devices
from peft_mux.scheduler.costs.loads import ModelShape
from peft_mux.scheduler.costs.memory import MemoryModel
from peft_mux.scheduler.costs.profile import analytic_profile
from peft_mux.scheduler.deployment.baselines import task_fused
from peft_mux.scheduler.deployment.composed import ComposedDeployment, DeploymentPricer, RowMix, compose_deployment
from peft_mux.scheduler.deployment.deployment_plan import DeploymentPlan
from peft_mux.scheduler.deployment.search import plan_deployment
from peft_mux.scheduler.deployment.space import TaskLengths, enumerate_plans, joint_sample
from peft_mux.scheduler.parallel_layout import ParallelConfig
from peft_mux.scheduler.replicas.facts import ReplicaFacts, replica_time_model
from peft_mux.scheduler.replicas.replica_planner import ReplicaPlanner
from peft_mux.scheduler.replicas.time_model import ReplicaGroup, ReplicaTimeModel, layout_text
from tests.scheduler.replicas.cases import load

SHAPE = ModelShape(16, 2048, 5632, 2048, 2048, 32000, backbone_bytes=1_500_000_000, activation_bytes=2)
DEVICES = parse_devices("4xA100-40GB")
CONFIGS = tuple(ParallelConfig(tp, pp) for tp, pp in ((1, 1), (1, 2), (2, 1), (1, 4), (2, 2), (4, 1)))
INTERVAL = 256

TWO_ROWS = ((881, 717),)
PIPELINE_LOSES = ((1894,), (2003,), (32, 51, 57, 16))
MIXED = ((300, 200, 100) * 4, (2000, 1500))


class Case(NamedTuple):
    """What is planned for, and what one curve chooses."""

    tasks: list[TaskLengths]
    facts: ReplicaFacts
    curve: ReplicaTimeModel
    single: DeploymentPlan

    def planner(self) -> ReplicaPlanner:
        return ReplicaPlanner(self.facts, max_tokens=self.facts.pass_tokens)

    def composed(self, **options: object) -> ComposedDeployment:
        options = {"interval": INTERVAL, "budget_s": 600.0, **options}
        return compose_deployment(self.tasks, self.single, self.curve, self.planner(), **options)  # type: ignore[arg-type]


def make_case(
    batches: Sequence[Sequence[int]], *, num_gpus: int = 4, limit_bytes: int = 6 * 10**9, pass_tokens: int = 1024
) -> Case:
    """Return the case of tasks whose typical batches have rows of these lengths."""
    loads = tuple(load(f"task-{number}", tuple(lengths)) for number, lengths in enumerate(batches))
    profile, memory = analytic_profile(DEVICES.device, SHAPE), MemoryModel(SHAPE)
    facts = ReplicaFacts(SHAPE, profile, loads, memory, limit_bytes, pass_tokens=pass_tokens, links=DEVICES)
    tasks = [TaskLengths(one.name, one.lengths, len(one.lengths)) for one in loads]
    curve = replica_time_model(facts, [config for config in CONFIGS if config.num_gpus <= num_gpus])
    single = plan_deployment(*joint_sample(tasks), num_gpus, curve, interval=INTERVAL, proposal=False)
    return Case(tasks, facts, curve, single)


def test_two_long_rows_on_four_devices_go_to_two_replicas_of_two_and_not_to_three_unequal_ones() -> None:
    """By the curve a third replica costs nothing; by the plans the rows that are alone on one device set the pace."""
    case = make_case(TWO_ROWS, limit_bytes=8 * 10**9, pass_tokens=2048)
    found = case.composed()
    assert case.single.layout == layout_text(found.single.groups) != found.plan.layout
    assert found.plan.layout == "<2,1>x2"
    assert found.chosen.step_s < 0.9 * found.single.step_s


batches = st.lists(
    st.lists(st.sampled_from([20, 60, 200, 700, 1500, 2300]), min_size=1, max_size=4), min_size=1, max_size=3
)


@settings(max_examples=2)
@given(batches, st.sampled_from([2, 4]), st.sampled_from([6, 20]))
def test_by_whole_plans_it_is_never_slower_than_what_one_curve_chooses(
    drawn: list[list[int]], num_gpus: int, limit_gb: int
) -> None:
    case = make_case(drawn, num_gpus=num_gpus, limit_bytes=limit_gb * 10**9, pass_tokens=2048)
    found = case.composed()
    assert found.single.groups == case.single.groups
    assert found.chosen.step_s <= found.single.step_s
    # A planner without memories finds the same seconds, and the replicas hold the whole batch.
    fresh, mix = case.planner(), RowMix(case.tasks)
    for replica in found.chosen.replicas:
        rows = mix.rows(case.single.bucketing.boundaries, replica.counts)
        assert replica.step_s == fresh.step_s(replica.config, rows)
    dispatched = zip(*(tuple(r.num_replicas * n for n in r.counts) for r in found.chosen.replicas), strict=True)
    assert tuple(map(sum, dispatched)) == case.single.bucketing.counts


@pytest.mark.parametrize("drawn", [TWO_ROWS, PIPELINE_LOSES, pytest.param(MIXED, marks=pytest.mark.nightly)])
def test_it_is_near_the_best_of_all_deployments_priced_one_by_one(drawn: tuple[tuple[int, ...], ...]) -> None:
    case = make_case(drawn)
    found = case.composed()
    pricer = DeploymentPricer(case.planner(), case.tasks, case.single.bucketing, case.curve)
    configs = case.curve.configurations
    best_s = math.inf
    for block in enumerate_plans(case.single.num_gpus, [config.num_gpus for config in configs]):
        for counts in block.tolist():
            groups = case.curve.groups(dict(zip(configs, counts, strict=True)))
            if max(group.max_tokens for group in groups) >= case.single.bucketing.boundaries[-1]:
                best_s = min(best_s, pricer.price(groups).step_s)
    assert found.chosen.step_s <= 1.03 * best_s
    assert [one.verdict for one in found.plan.candidates].count("chosen") == 1
    if drawn is PIPELINE_LOSES:
        assert found.chosen.step_s < 0.95 * found.single.step_s, "the curve chose a pipeline"
    hurried = case.composed(budget_s=1e-6)
    assert hurried.num_unplanned > 0
    for one in (found, hurried):
        fused = task_fused(case.tasks, case.single.num_gpus, one.model, interval=INTERVAL)
        assert one.equal is not None
        assert one.chosen.step_s <= one.equal.step_s <= 1.1 * fused.step_s[0]
    assert hurried.chosen == min(hurried.single, hurried.equal, key=lambda one: one.step_s)


def test_present_replicas_are_priced_too_unless_they_hold_less_than_the_batch() -> None:
    case = make_case(PIPELINE_LOSES)
    able = case.curve.groups({ParallelConfig(2, 1): 1, ParallelConfig(1, 2): 1})
    short = (ReplicaGroup(ParallelConfig(1, 1), 4, 2000),)
    assert short[0].max_tokens < case.single.bucketing.boundaries[-1] <= max(group.max_tokens for group in able)
    found = case.composed(also=[able, short], budget_s=1e-6)
    pricer = DeploymentPricer(case.planner(), case.tasks, case.single.bucketing, case.curve)
    assert found.chosen.step_s <= pricer.price(able).step_s
    assert found.num_priced == case.composed(also=[able], budget_s=1e-6).num_priced


MIX = RowMix(
    [TaskLengths("chat", (10, 20, 30, 40), 4), TaskLengths("qa", (32,), 2), TaskLengths("books", (90, 100), 2)]
)


def test_dispatched_counts_stand_for_rows_of_each_task_in_proportion() -> None:
    assert MIX.rows([64, 128], [6, 2]) == ((10, 20, 30, 40), (32, 32), (90, 100)), "the whole batch is every row"
    chat, qa, books = MIX.rows([64, 128], [3, 0])
    assert (len(chat), len(qa), books) == (2, 1, ())
    assert MIX.rows([64, 128], [0, 1]) == ((), (), (100,))
    repeated = MIX.rows([64, 128], [12, 0])[:2]
    assert repeated == ((10, 10, 20, 20, 30, 30, 40, 40), (32, 32, 32, 32)), "more than the sample has"
    with pytest.raises(
        ValueError, match="buckets must be those of the sample, got 2 sequences padded to 80 tokens, to which no"
    ):
        MIX.rows([64, 80, 128], [0, 2, 0])
