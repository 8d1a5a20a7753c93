"""`PlanFollower` alone: who is started by a plan, who waits, and from which times the planner learns."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.engine.work import StepResult
from peft_mux.planning.learning import TimeCorrection
from peft_mux.task import TaskStatus
from peft_mux.trainer.plan_follower import PlanFollower
from peft_mux.trainer.run import Run
from tests.trainer.parts import Calls, FakePlacement, make_run


class FakeCorrection(TimeCorrection):
    """Notes what it is shown."""

    def __init__(self, calls: Calls) -> None:
        super().__init__()
        self.calls = calls

    def observe(self, plan: Any, num_tokens: int, seconds: float) -> None:
        del plan
        self.calls.note("observe", num_tokens, seconds)


class FakePlanner:
    """Admits the tasks that it is given."""

    def __init__(self, calls: Calls, admitted: tuple[str, ...]) -> None:
        self.calls, self.admitted = calls, admitted
        self.correction = FakeCorrection(calls)
        self.cuts: dict[int, tuple[int, ...]] = {}
        self.model: Any = None
        self.num_replicas = 0

    def plan(self, runs: Any, **options: Any) -> Any:
        self.calls.note("plan", options.get("devices"), *(run.name for run in runs))
        return SimpleNamespace(
            htasks=(SimpleNamespace(tasks=self.admitted, tokens_per_micro_batch=0, micro_batches=1),),
            waiting=(SimpleNamespace(name="b", reason="memory is full"),),
            max_tokens_per_micro_batch=48,
            passes=(),
            passes_in_turns=1,
        )

    def prices(self, stage: int, width: int) -> None:
        assert (stage, width) == (0, 1)


def follower(
    run: Run, calls: Calls, *, admitted: tuple[str, ...] = ("a",), is_placed: bool = True, is_alone: bool = True
) -> tuple[PlanFollower, FakePlanner]:
    placement: Any = FakePlacement(calls)
    placement.is_loaded = is_placed
    if not is_alone:
        run.processes = SimpleNamespace(is_alone=False, waited_s=0.0)  # type: ignore[assignment]
    planner: Any = FakePlanner(calls, admitted)
    return PlanFollower(run, placement, planner, ChunkPackingCollator()), planner


def step_of(*names: str) -> StepResult:
    return StepResult({name: torch.tensor(1.0) for name in names}, dict.fromkeys(names, 10), 25)


def test_a_new_plan_starts_the_tasks_that_it_admits_and_gives_the_others_a_reason(tmp_path: Path) -> None:
    run, calls = make_run(tmp_path), Calls()
    plans, _ = follower(run, calls)
    plan = plans.replan()
    assert ("start", "a") in calls
    assert run.table["a"].status is TaskStatus.RUNNING
    assert run.table["b"].status is TaskStatus.WAITING
    assert run.table["b"].reason == "memory is full"
    assert plans.current is plan
    assert calls[-1] == "follow", "the executor follows the plan from the next step on"


def test_a_plan_starts_no_task_before_the_weights_are_loaded(tmp_path: Path) -> None:
    run, calls = make_run(tmp_path), Calls()
    plans, _ = follower(run, calls, is_placed=False)
    plans.replan()
    assert run.table["a"].status is TaskStatus.WAITING
    assert "follow" not in calls


def test_a_plan_that_is_only_asked_for_changes_nothing(tmp_path: Path) -> None:
    run, calls = make_run(tmp_path), Calls()
    plans, _ = follower(run, calls)
    plans.plan()
    plans.plan("4xA100-80GB")
    assert calls == [
        ("plan", None, "a", "b"),
        ("plan", "4xA100-80GB", "a", "b"),
    ]
    assert plans.current is None


def test_tasks_that_ended_or_paused_are_not_planned_for(tmp_path: Path) -> None:
    run, calls = make_run(tmp_path), Calls()
    plans, _ = follower(run, calls)
    run.table["b"].status = TaskStatus.PAUSED
    plans.plan()
    assert calls[-1] == ("plan", None, "a")


def test_passes_hold_the_asked_tokens_until_a_plan_says_what_fits(tmp_path: Path) -> None:
    run = make_run(tmp_path, max_tokens_per_micro_batch=512)
    plans, _ = follower(run, Calls())
    assert plans.max_tokens == 512
    plans.replan()
    assert plans.max_tokens == 48


def test_stages_are_cut_by_a_plan_that_has_no_earlier_cut(tmp_path: Path) -> None:
    run, calls = make_run(tmp_path), Calls()
    plans, planner = follower(run, calls)
    planner.cuts[2] = (3, 1)
    plans.plan_stages()
    assert calls[-1] == ("plan", None, "a", "b")
    assert planner.cuts == {}


def test_a_process_that_is_alone_learns_from_each_step_at_once_and_once(tmp_path: Path) -> None:
    run, calls = make_run(tmp_path), Calls()
    plans, _ = follower(run, calls)
    plans.replan()
    plans.record_step_time(step_of("a", "b"), 0.5)
    assert calls[-1] == ("observe", 20, 0.5)
    assert plans.last_step_s == 0.0
    plans.observe_step_time(9.0)
    assert calls.count(("observe", 20, 9.0)) == 0


def test_one_of_several_processes_learns_what_the_slowest_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, calls = make_run(tmp_path), Calls()
    plans, _ = follower(run, calls, is_alone=False)
    monkeypatch.setattr(plans, "_new_steps", lambda plan: None)
    plans.replan()
    plans.record_step_time(step_of("a"), 0.5)
    assert plans.last_step_s == 0.5
    assert ("observe", 10, 0.5) not in calls
    plans.observe_step_time(0.75)
    assert calls[-1] == ("observe", 10, 0.75)
