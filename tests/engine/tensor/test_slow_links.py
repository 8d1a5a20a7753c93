"""Links that are slower than a profile says are learnt as such, and the plan ends as that of the right profile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from peft_mux.engine.tasks.task_run import TaskRun
from peft_mux.planning.planner import Planner
from peft_mux.scheduler.costs.profile import AS_PROFILED
from peft_mux.scheduler.plan import Plan
from tests.engine.processes.cases import launch, values
from tests.engine.replicas.layout_cases import backbone
from tests.engine.tensor import slow_link_cases as cases
from tests.invariants.mux_lab import make_trainer, train

FAST, SLOW, FACTOR = 2e8, 2.5e7, 8.0


def shape_of(plan: Plan) -> tuple[int, list[list[tuple[tuple[str, ...], int]]]]:
    buckets = [[(plan.htasks[i].tasks, plan.htasks[i].micro_batches) for i in bucket] for bucket in plan.buckets]
    return plan.passes_in_turns, sorted(map(sorted, buckets))


@pytest.mark.slow
@pytest.mark.distributed
def test_two_ranks_on_slow_links_end_in_the_turns_of_the_right_profile(tmp_path: Path) -> None:
    given, machine = (cases.stored_profile(tmp_path / f"{rate}.json", rate) for rate in (FAST, SLOW))
    trainer = make_trainer(
        cases.tasks(), tmp_path / "right", model=backbone("llama"), cost_profile=machine, **cases.OPTIONS
    )
    expected = shape_of(trainer._plans.planner.plan(list(trainer.table), devices_per_stage=2))
    found = values(launch(2, cases.train, tmp_path / "run", given, machine, limit_s=120))
    first, last = (shape_of(found[0].plans[step]) for step in (0, -1))
    assert (first[0], expected[0] > 1) == (1, True), "the case is too easy"
    assert last == expected
    for part in found:
        assert part.plans == found[0].plans
        assert part.factors.communication == pytest.approx(FACTOR, rel=0.25)
        assert part.factors.tokens == pytest.approx(1.0, rel=0.1)
        # Waiting for sums is separated for a pass by itself, not for passes in turns.
        assert part.waited == {(1, True), (expected[0], False)}
    # Another plan in the midst of a run, and no other result.
    alone = train(cases.tasks(), tmp_path / "alone", model=backbone("llama"), **cases.OPTIONS)
    for name, losses in alone.losses.items():
        assert found[0].losses[name] == pytest.approx(losses, rel=1e-5), name


@pytest.mark.parametrize(("num_stages", "factor"), [(1, FACTOR), pytest.param(2, 32.0, marks=pytest.mark.slow)])
def test_a_replan_with_the_right_factor_gains_by_the_turns_of_the_right_profile(
    num_stages: int, factor: float, tmp_path: Path
) -> None:
    given, machine = (cases.stored_profile(tmp_path / f"{rate}.json", rate) for rate in (FAST, FAST / factor))
    size: dict[str, Any] = {"num_stages": num_stages, "devices_per_stage": 2}

    def planner_of(profile: str) -> tuple[Planner, list[TaskRun]]:
        folder = tmp_path / Path(profile).stem
        trainer = make_trainer(cases.tasks(), folder, model=backbone("llama"), cost_profile=profile, **cases.OPTIONS)
        return trainer._plans.planner, list(trainer.table)

    planner, runs = planner_of(given)
    right, right_runs = planner_of(machine)
    first, expected = planner.plan(runs, **size), right.plan(right_runs, **size)
    assert (first.passes_in_turns, expected.passes_in_turns > 1) == (1, True), "the case is too easy"
    factors = AS_PROFILED._replace(communication=factor)
    assert planner.gain_of(first, factors, runs, **size) > planner.args.replan_gain
    assert planner.gain_of(first, AS_PROFILED, runs, **size) == pytest.approx(0.0, abs=1e-6)
    planner.correction.restore(factors)
    assert shape_of(planner.plan(runs, **size)) == shape_of(expected)
