"""`Membership` alone: commands of any thread wait for the step boundary, and what is refused changes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from peft_mux import ConfigError
from peft_mux.task import TaskStatus
from peft_mux.trainer.membership import Membership
from peft_mux.trainer.run import Run
from tests.invariants.mux_lab import small_task
from tests.trainer.parts import Calls, FakePlacement, FakePlans, lines, make_run, start_all


class Told:
    def __init__(self, calls: Calls) -> None:
        self.calls = calls

    def handle_changes(self) -> None:
        self.calls.note("tell")


def membership_of(run: Run, calls: Calls, refuses: Exception | None = None) -> Membership:
    placement: Any = FakePlacement(calls, refuses)
    plans: Any = FakePlans(run, calls)
    lifecycle: Any = Told(calls)
    return Membership(run, placement, plans, lifecycle)


def names(run: Run) -> list[str]:
    return [own.name for own in run.table]


def test_before_training_tasks_come_and_go_at_once(tmp_path: Path) -> None:
    run, calls = make_run(tmp_path), Calls()
    membership = membership_of(run, calls)
    membership.register([small_task("c", data_seed=3)])
    membership.remove("a", save=False)
    assert names(run) == ["b", "c"]
    assert calls == [("check", "c"), ("register", "c"), ("forget", "a"), ("remove", "a")]


def test_while_a_run_trains_commands_wait_for_the_step_boundary_and_plan_anew_once(tmp_path: Path) -> None:
    run, calls = make_run(tmp_path), Calls()
    start_all(run)
    run.is_in_train = True
    membership = membership_of(run, calls)
    membership.register([small_task("c", data_seed=3)])
    membership.pause("a")
    assert names(run) == ["a", "b"]
    assert run.table["a"].status is TaskStatus.RUNNING
    membership.apply_commands()
    assert names(run) == ["a", "b", "c"]
    assert run.table["a"].status is TaskStatus.PAUSED
    assert calls == [("check", "c"), ("register", "c"), "replan", "tell"]
    membership.apply_commands()
    assert calls[-2:] == ["replan", "tell"], "nothing was asked for since"
    assert len(calls) == 4


def test_a_task_is_paused_only_while_it_runs_and_resumed_only_while_it_is_paused(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    membership = membership_of(run, Calls())
    membership.pause("a")
    assert run.table["a"].status is TaskStatus.WAITING
    start_all(run)
    membership.pause("a")
    assert run.table["a"].status is TaskStatus.PAUSED
    membership.resume("a")
    assert run.table["a"].status is TaskStatus.RUNNING


def test_an_arrival_that_peft_refuses_late_is_told_and_the_others_go_on(tmp_path: Path) -> None:
    run, calls = make_run(tmp_path), Calls()
    start_all(run)
    run.is_in_train = True
    membership = membership_of(run, calls, refuses=ConfigError("tasks.c.peft_config: PEFT refuses it"))
    membership.register([small_task("c", data_seed=3)])
    membership.apply_commands()
    assert names(run) == ["a", "b"]
    assert lines(run) == ["not registered: tasks.c.peft_config: PEFT refuses it"]
    membership.register([small_task("c", data_seed=3)])  # the name is free again


def test_before_training_the_same_refusal_is_an_error(tmp_path: Path) -> None:
    membership = membership_of(make_run(tmp_path), Calls(), refuses=ConfigError("PEFT refuses it"))
    with pytest.raises(ConfigError, match="PEFT refuses it"):
        membership.register([small_task("c", data_seed=3)])


def test_a_name_that_is_on_its_way_is_taken(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.is_in_train = True
    membership = membership_of(run, Calls())
    membership.register([small_task("c", data_seed=3)])
    with pytest.raises(ConfigError, match='"c"'):
        membership.register([small_task("c", data_seed=4)])


@pytest.mark.parametrize("ask", ["remove", "pause", "resume"])
def test_unknown_names_are_refused_with_the_closest_one(tmp_path: Path, ask: str) -> None:
    membership = membership_of(make_run(tmp_path, names=("sentiment",)), Calls())
    options = {"save": True} if ask == "remove" else {}
    with pytest.raises(ConfigError, match=r'got task "sentimnet"; allowed: sentiment'):
        getattr(membership, ask)("sentimnet", **options)


def test_a_task_that_is_removed_twice_departs_once(tmp_path: Path) -> None:
    run, calls = make_run(tmp_path), Calls()
    start_all(run)
    run.is_in_train = True
    membership = membership_of(run, calls)
    membership.remove("a", save=False)
    membership.remove("a", save=False)
    membership.apply_commands()
    assert calls.count(("remove", "a")) == 1
    assert names(run) == ["b"]
