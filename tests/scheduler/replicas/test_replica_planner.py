"""Plans of single replicas."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from peft_mux.scheduler.costs.hardware import Link
from peft_mux.scheduler.costs.latency import CostModel
from peft_mux.scheduler.planner.planner import plan_tasks
from peft_mux.scheduler.planner.values import Budget
from peft_mux.scheduler.replicas.configs import ParallelConfig
from peft_mux.scheduler.replicas.replica_planner import ReplicaPlanner
from tests.scheduler.replicas.cases import EIGHT, FACTS, LOADS, ONE, TWO

ROWS = tuple(load.lengths for load in LOADS)
PLANNER = ReplicaPlanner(FACTS, max_tokens=4096)


def test_a_replica_of_all_rows_takes_what_the_planner_of_a_run_says() -> None:
    cost = CostModel(FACTS.profile, FACTS.shape, devices_per_stage=8, tensor_link=FACTS.links.intra_node)  # type: ignore[union-attr]
    memory = replace(FACTS.memory, devices_per_stage=8)
    plan = plan_tasks(LOADS, cost, memory, Budget(4096, FACTS.limit_bytes))
    assert PLANNER.step_s(EIGHT, ROWS) == pytest.approx(plan.step_s)
    assert PLANNER.plan(EIGHT, ROWS).htasks == plan.htasks  # type: ignore[union-attr]


def test_a_pipeline_is_planned_with_its_stages_and_its_links() -> None:
    deep, chat = ParallelConfig(2, 4), (LOADS[0].lengths, ())
    outcome = PLANNER.plan(deep, chat)
    assert outcome is not None
    assert outcome.template is not None
    assert len(outcome.peak_bytes) == 4
    slow_links = replace(FACTS.links, devices_per_node=4, inter_node=Link(1e-4, 1e9))  # type: ignore[type-var]
    slow = ReplicaPlanner(replace(FACTS, links=slow_links), max_tokens=4096)
    assert slow.step_s(deep, chat) > PLANNER.step_s(deep, chat)


def test_a_task_without_rows_is_still_updated_and_a_replica_without_any_does_nothing() -> None:
    chat = (LOADS[0].lengths[:8], ())
    outcome = PLANNER.plan(EIGHT, chat)
    assert outcome is not None
    assert [htask.tasks for htask in outcome.htasks] == [("chat",)]
    assert PLANNER.step_s(EIGHT, chat) > outcome.step_s
    assert PLANNER.step_s(EIGHT, ((), ())) == 0.0


def test_rows_that_a_replica_does_not_hold_have_no_plan() -> None:
    limit = FACTS.token_limits([ONE])[ONE]
    assert math.isfinite(PLANNER.step_s(ONE, ((limit,), ())))
    assert PLANNER.step_s(ONE, ((limit + 1,), ())) == math.inf


def test_a_plan_is_made_once() -> None:
    planner = ReplicaPlanner(FACTS, max_tokens=4096)
    first = planner.plan(TWO, ((100, 200), ()))
    assert planner.plan(TWO, [[100, 200], []]) is first
    assert planner.num_plans == 1


def test_other_policies_plan_replicas_too() -> None:
    assert ReplicaPlanner(FACTS, max_tokens=4096, policy="together").step_s(EIGHT, ROWS) > 0


@pytest.mark.parametrize("config", [ONE, ParallelConfig(1, 2)], ids=str)
def test_gradients_are_ready_when_the_last_backward_of_their_htask_ends(config: ParallelConfig) -> None:
    planner = ReplicaPlanner(replace(FACTS, limit_bytes=None), max_tokens=4096, policy="interleaved")
    outcome = planner.plan(config, ROWS)
    assert outcome is not None
    assert sorted(htask.tasks for htask in outcome.htasks) == [("books",), ("chat",)]
    ready_s = planner.ready_s(config, ROWS)
    computing_s = outcome.step_s - planner._models_of(config)[0].outside_s(LOADS)
    assert max(ready_s.values()) == pytest.approx(computing_s)
    # One stage runs one hTask after the other, longest first.
    if config == ONE:
        books, _ = outcome.htasks
        assert ready_s["books"] == pytest.approx(books.micro_batches * books.pass_s, rel=0.01)
    assert ready_s["books"] != ready_s["chat"]
    assert planner.ready_s(config, [ROWS[0], ()]).keys() == ready_s.keys()
    assert planner.ready_s(config, [ROWS[0], ()])["books"] == 0
