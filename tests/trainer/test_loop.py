"""`StepLoop` alone: what a step is, what comes before and after it, and how a run ends."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from peft_mux.engine.processes import Processes
from peft_mux.engine.tasks.task_run import TaskTable
from peft_mux.task import TaskStatus
from peft_mux.trainer.loop import StepLoop
from peft_mux.trainer.membership import CommandQueue
from peft_mux.trainer.run import Run
from tests.trainer.parts import Calls, FakePlacement, FakePlans, make_run, start_all


class FakeWorld:
    """One process, that takes a given number of steps."""

    def __init__(self, num_steps: int) -> None:
        self.processes, self.left, self.slowest_s, self.passes_s = Processes(), num_steps, 0.25, (0.2,)

    def agree_on_tasks(
        self,
        step: int,
        *,
        wants_stop: bool,
        replicas: str,
        last_step_s: float,
        last_passes_s: float,
        num_commands: int,
    ) -> bool:
        del step, replicas, last_step_s, last_passes_s, num_commands
        self.left -= 1
        return self.left < 0 or wants_stop

    def compare_new_tasks(self, model: Any) -> None:
        del model


def loop_of(run: Run, calls: Calls, num_steps: int, monkeypatch: pytest.MonkeyPatch) -> StepLoop:
    """Return a loop whose parts write down what they are asked to do."""
    monkeypatch.setattr(TaskTable, "apply", lambda self, result: calls.note("apply", *result.losses))
    monkeypatch.setattr(run.saver, "save_due_tasks", lambda names: calls.note("save due", *names))

    def write_down(part: str) -> Any:
        return lambda *values: calls.note(part)

    def finish(seconds: float, waited_s: float, num_tokens: int, num_steps: int) -> tuple[int, int]:
        assert seconds >= waited_s == 0.0
        return num_tokens, num_steps

    def open_run(resume: Any) -> None:
        calls.note("open", resume)
        run.is_in_train = True

    parts: dict[str, Any] = {
        "world": FakeWorld(num_steps),
        "placement": FakePlacement(calls),
        "plans": FakePlans(run, calls),
        "collator": SimpleNamespace(micro_batches=lambda batches, max_tokens: ()),
        "lifecycle": SimpleNamespace(handle_changes=write_down("tell"), settle=lambda processes: None),
        "membership": SimpleNamespace(
            apply_commands=write_down("commands"),
            apply_shared_commands=lambda: None,
            finish_commands=lambda failed: calls.append(("finish", failed)),
            queue=CommandQueue(),
        ),
        "relocation": SimpleNamespace(target="", move_if_asked=lambda: False),
        "reporter": SimpleNamespace(
            log_if_due=write_down("log"),
            evaluate_if_due=write_down("evaluate"),
            evaluate_new=lambda: None,
            finish=finish,
        ),
        "control": SimpleNamespace(listening=lambda is_alone: nullcontext()),
        "opening": SimpleNamespace(
            connect=lambda resume: resume,
            check_resumed=lambda resume: None,
            check_folder=lambda resume: None,
            open=open_run,
            begin=write_down("begin"),
        ),
    }
    return StepLoop(run, **parts)


def test_a_step_is_work_passes_updates_and_what_they_took(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, calls = make_run(tmp_path), Calls()
    start_all(run)
    loop_of(run, calls, 1, monkeypatch).step()
    assert calls == ["next_work", ("run", "a", "b"), ("apply", "a", "b"), ("took", 20)]
    assert run.state.global_step == 1


def test_a_run_agrees_steps_and_follows_up_until_there_is_no_other_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, calls = make_run(tmp_path), Calls()
    start_all(run)
    num_tokens, num_steps = loop_of(run, calls, 2, monkeypatch).train(None)
    step = ["next_work", ("run", "a", "b"), ("apply", "a", "b"), ("took", 20)]
    after = ["log", "evaluate", "tell", ("save due", "a", "b"), "commands"]
    agreed = [("learn", 0.25), "tell"]
    steps = [*agreed, *step, *after, *agreed, *step, *after, *agreed]
    assert calls == [("open", None), "begin", "commands", *steps, ("finish", False)]
    assert (num_tokens, num_steps) == (50, 2)
    assert not run.is_in_train


def test_a_step_that_raises_leaves_no_run_that_seems_to_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, calls = make_run(tmp_path), Calls()
    start_all(run)
    loop = loop_of(run, calls, 5, monkeypatch)

    def broken(self: Any, result: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(TaskTable, "apply", broken)
    with pytest.raises(RuntimeError, match="out of memory"):
        loop.train(None)
    screen: Any = run.log.progress
    assert screen.is_stopped
    assert not run.is_in_train
    assert calls[-1] == ("finish", True), "what was asked for meanwhile is not lost"
    assert run.is_updating, "some tasks may have taken the step and others not"


def test_a_task_whose_last_update_broke_it_fails_instead_of_succeeding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, calls = make_run(tmp_path), Calls()
    start_all(run)
    loop = loop_of(run, calls, 1, monkeypatch)
    executor: Any = loop._placement.placed.executor
    executor.non_finite = ["a"]
    run.table["a"].step = run.table["a"].num_steps
    loop.train(None)
    assert run.table["a"].status is TaskStatus.FAILED
    assert run.table["a"].reason == "non_finite: loss after the last step, 7"
    assert run.table["b"].status is TaskStatus.RUNNING


def test_a_stop_that_is_asked_for_ends_the_run_before_the_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, calls = make_run(tmp_path), Calls()
    start_all(run)
    loop = loop_of(run, calls, 5, monkeypatch)
    run.request_stop()
    loop.train(None)
    assert "next_work" not in calls
