"""The smaller parts of a trainer, each alone: callbacks of a run, changes in the life of tasks, the folder of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback, TrainerControl, TrainerState

from peft_mux.task import TaskStatus
from peft_mux.trainer.membership import Lifecycle
from peft_mux.trainer.run import mark_main_process, output_folder
from tests.trainer.parts import Calls, FakePlacement, FakePlans, lines, make_run, start_all


class AsksForAnother(TrainerCallback):
    """Returns a control of its own, as callbacks may."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> TrainerControl:
        return TrainerControl(should_save=True)


def test_what_a_callback_asks_for_in_a_control_of_its_own_is_asked_of_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path, callbacks=[AsksForAnother()])
    before = run.control
    run.callbacks.call("on_step_end")
    assert run.control is before
    assert run.control.should_save


def test_logged_numbers_stand_in_the_history_of_the_run_and_reach_its_callbacks(tmp_path: Path) -> None:
    seen: list[Any] = []

    class Listens(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            seen.append(dict(logs))

    run = make_run(tmp_path, callbacks=[Listens()])
    run.state.global_step = 3
    run.callbacks.log({"a/loss": 0.5})
    assert run.state.log_history == [{"a/loss": 0.5, "step": 3}]
    assert seen == [{"a/loss": 0.5}]


def test_a_stop_is_asked_of_the_control_that_callbacks_see(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.request_stop()
    assert run.callbacks.control.should_training_stop


def test_the_first_process_is_the_one_that_writes(tmp_path: Path) -> None:
    run, state = make_run(tmp_path), TrainerState()
    mark_main_process(state, run.args)
    assert state.is_world_process_zero
    assert state.is_local_process_zero
    assert run.root == output_folder(run.args) == tmp_path


def test_an_ended_task_is_told_saved_and_planned_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, calls = make_run(tmp_path), Calls()
    start_all(run)
    monkeypatch.setattr(run.saver, "save_ended", lambda own: calls.note("save", own.name))
    lifecycle: Any = Lifecycle(run, FakePlacement(calls), FakePlans(run, calls))  # type: ignore[arg-type]
    lifecycle.handle_changes()
    assert calls == [], "nothing has changed"
    run.table["b"].end(TaskStatus.STOPPED_EARLY, "enough")
    lifecycle.handle_changes()
    assert calls == [("save", "b"), "replan"]
    assert lines(run) == ["b: stopped_early (enough)"]
    lifecycle.handle_changes()
    assert len(calls) == 2, "a change is told once"


def test_a_paused_task_is_told_and_nothing_else(tmp_path: Path) -> None:
    run, calls = make_run(tmp_path), Calls()
    start_all(run)
    lifecycle: Any = Lifecycle(run, FakePlacement(calls), FakePlans(run, calls))  # type: ignore[arg-type]
    run.table["a"].status = TaskStatus.PAUSED
    lifecycle.handle_changes()
    assert lines(run) == ["a: paused"]
    assert calls == []


@pytest.mark.parametrize(("policy", "stops"), [("quarantine", False), ("stop", True)])
def test_a_failed_task_stops_the_run_only_where_that_was_asked_for(tmp_path: Path, policy: str, stops: bool) -> None:
    run, calls = make_run(tmp_path, quarantine_policy=policy), Calls()
    start_all(run)
    run.table["a"].quarantine("non_finite: loss at step 1")
    lifecycle: Any = Lifecycle(run, FakePlacement(calls), FakePlans(run, calls))  # type: ignore[arg-type]
    lifecycle.handle_changes()
    assert run.control.should_training_stop is stops
