"""Plans for pipelines that are not drained after every step: compared by steps that overlap, never slower by them."""

from __future__ import annotations

import random

import pytest

from peft_mux.scheduler.pipeline.simulator import window_step_s
from peft_mux.scheduler.planner.planner import Budget, plan_tasks
from peft_mux.scheduler.planner.values import Outcome
from tests.scheduler.planner.cases import load, models


def plans(seed: int) -> tuple[Outcome, Outcome, float]:
    """Return the plans with a flush after every step and without, and the seconds outside the passes of a step."""
    draw = random.Random(seed)
    cost, memory = models(draw.choice((2, 4)))
    loads = [load(f"t{i}", draw.choice((32, 64, 200)), draw.choice((2, 4))) for i in range(draw.choice((2, 4)))]
    drained, flowing = (plan_tasks(loads, cost, memory, Budget(4096, drains=drains)) for drains in (True, False))
    return drained, flowing, cost.outside_s(loads)


def steady_s(outcome: Outcome) -> float:
    assert outcome.template is not None
    return window_step_s(outcome.template, outcome.bucket_loads)


@pytest.mark.parametrize("seed", range(6))
def test_what_is_planned_without_draining_is_predicted_by_steps_that_overlap_and_no_slower(seed: int) -> None:
    drained, flowing, outside_s = plans(seed)
    assert flowing.step_s == pytest.approx(steady_s(flowing) + outside_s)
    assert steady_s(flowing) <= steady_s(drained) * (1 + 1e-9)
    assert flowing.step_s <= drained.step_s * (1 + 1e-9)


def test_few_rows_that_were_cut_into_many_passes_to_fill_a_pipeline_make_fewer_where_it_stays_full() -> None:
    cost, memory = models(4)
    loads = [load(f"t{index}", 128 + 8 * index, 4) for index in range(6)]
    drained, flowing = (plan_tasks(loads, cost, memory, Budget(4096, drains=drains)) for drains in (True, False))
    assert len(flowing.passes) < len(drained.passes)
    assert len(flowing.buckets) > len(drained.buckets)
    assert steady_s(flowing) < 0.95 * steady_s(drained)


def test_a_limit_of_memory_holds_without_draining_too() -> None:
    cost, memory = models(2)
    loads = [load(f"t{index}", 128, 4) for index in range(4)]
    free = plan_tasks(loads, cost, memory, Budget(4096, drains=False))
    limit = int(0.97 * max(free.peak_bytes))
    held = plan_tasks(loads, cost, memory, Budget(4096, limit, drains=False))
    assert max(held.peak_bytes) <= limit
