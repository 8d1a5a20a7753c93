"""`Relocation` alone: when a run moves to other replicas, in which order, and what it refuses."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peft_mux import CheckpointError, ConfigError
from peft_mux.engine.layout import ParallelLayout, Place
from peft_mux.engine.work import PassClock
from peft_mux.planning.learning import TimeCorrection
from peft_mux.scheduler.deployment.plan import Redeployment
from peft_mux.task import TaskStatus
from peft_mux.trainer import relocation as relocation_module
from peft_mux.trainer.relocation import Relocation
from peft_mux.trainer.run import Run
from tests.trainer.parts import make_run, start_all


class Calls(list[Any]):
    """What parts were asked to do, in order."""

    def note(self, *what: Any) -> None:
        self.append(what[0] if len(what) == 1 else what)


class FakePlacement:
    """Loads a model, releases it and takes another, by layout alone."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self.source = SimpleNamespace(model="a/folder")
        self.is_loaded, self.lock = True, threading.RLock()
        self.part = SimpleNamespace(num_stages=1, tp_size=1, place=Place(0, 0, 0))
        self.outline: Any = "outline"
        self.executor = SimpleNamespace(
            clock=PassClock(torch.device("cpu")), follow=lambda plan: self.calls.note("follow")
        )

    def load(self, plan_stages: Any) -> None:
        del plan_stages
        self.calls.note("load")

    def part_for_layout(self, layout: ParallelLayout) -> Any:
        self.calls.note("part", str(layout))
        return SimpleNamespace(layout=layout)

    def release_model(self) -> None:
        self.calls.note("let go")

    def describe_part(self, part: Any) -> None:
        self.calls.note("describe", str(part.layout))

    def make_optimizer(self, run: Any) -> None:
        self.calls.note("equip", run.name)


def relocation_of(run: Run, calls: Calls, *, model: Any = "a/folder", is_placed: bool = True) -> Relocation:
    placement: Any = FakePlacement(calls)
    placement.source.model, placement.is_loaded = model, is_placed
    planner = SimpleNamespace(correction=TimeCorrection(), profile=None)
    plans: Any = SimpleNamespace(planner=planner, plan_stages=lambda: pytest.fail("there are no stages here"))
    return Relocation(run, placement, plans)


def lines(run: Run) -> list[str]:
    screen: Any = run.log.progress
    return screen.lines


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run that can be saved, and whose tasks train."""
    run = make_run(tmp_path, save_strategy="steps")
    start_all(run)
    folder = SimpleNamespace(restore=lambda own, step, warn: None)
    monkeypatch.setattr(run.saver, "folder", folder)
    monkeypatch.setattr(run.saver, "save_run", lambda: True)
    return run


def test_a_run_moves_by_saving_letting_go_and_restoring(run: Run) -> None:
    calls = Calls()
    relocation_of(run, calls).redeploy("<1,1>")
    assert calls == [
        ("part", "<1,1>x1"),
        "let go",
        ("describe", "<1,1>x1"),
        "load",
        ("equip", "a"),
        ("equip", "b"),
    ]
    assert lines(run)[-1].startswith("replicas <1,1>x1 instead of <1,1>x1, after ")


def test_a_model_that_is_not_loaded_yet_is_only_described_again(run: Run) -> None:
    calls = Calls()
    relocation_of(run, calls, is_placed=False).redeploy("<1,1>")
    assert calls == [("part", "<1,1>x1"), ("describe", "<1,1>x1")]
    assert str(run.layout) == "<1,1>x1"


def test_while_a_run_trains_it_moves_at_the_step_boundary_once(run: Run) -> None:
    calls, run.is_in_train = Calls(), True
    relocation = relocation_of(run, calls)
    relocation.redeploy("<1,1>")
    assert relocation.target == "<1,1>x1"
    assert "let go" not in calls
    assert relocation.move_if_asked()
    assert "let go" in calls
    assert relocation.target == ""
    assert not relocation.move_if_asked()


def test_a_run_that_cannot_be_saved_stays_where_it_is(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls()
    monkeypatch.setattr(run.saver, "save_run", lambda: False)
    with pytest.raises(
        CheckpointError, match="redeploy: the tasks could not be saved at step 0, so they stay on their processes"
    ):
        relocation_of(run, calls).redeploy("<1,1>")
    assert "let go" not in calls


def test_a_model_that_is_an_object_cannot_be_read_again(run: Run) -> None:
    with pytest.raises(
        ConfigError,
        match="redeploy needs a model that is a hub id or folder, from which every process reads its new",
    ):
        relocation_of(run, Calls(), model=object()).redeploy("<1,1>")


def test_a_run_that_saves_nothing_cannot_move(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='save_strategy="no"'):
        relocation_of(make_run(tmp_path), Calls()).redeploy("<1,1>")


def test_replicas_of_another_number_of_processes_are_refused(run: Run) -> None:
    with pytest.raises(
        ConfigError, match=r"args\.replicas must have as many processes as the run \(1\), got <1,2>x1, which needs 2"
    ):
        relocation_of(run, Calls()).redeploy("<1,2>")


def decide(monkeypatch: pytest.MonkeyPatch, calls: Calls, new: str, *, pays: bool) -> None:
    def redeploy(planner: Any, runs: Any, old: Any, *, restart_s: float) -> Redeployment:
        calls.note("decide", *(own.name for own in runs))
        return Redeployment(str(old), new, 2.0, 1.0 if pays else 2.0, 1000.0, restart_s)

    monkeypatch.setattr(relocation_module, "decide_on_move", redeploy)


@pytest.mark.parametrize("pays", [True, False])
def test_a_run_decides_again_whenever_tasks_have_come_or_gone(
    run: Run, monkeypatch: pytest.MonkeyPatch, pays: bool
) -> None:
    calls, run.args.redeploy = Calls(), True
    decide(monkeypatch, calls, "<1,1>", pays=pays)
    relocation = relocation_of(run, calls)
    assert not relocation.move_if_asked(), "the tasks are those that the run began with"
    assert not relocation.move_if_asked()
    assert not [call for call in calls if call[0] == "decide"]
    run.table["b"].status = TaskStatus.PAUSED
    assert relocation.move_if_asked() is pays
    assert [call for call in calls if call[0] == "decide"] == [("decide", "a")]


def test_a_deployment_that_cannot_be_had_leaves_the_run_where_it_is(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*values: Any, **options: Any) -> Redeployment:
        raise ConfigError("no replica holds these tasks")

    run.args.redeploy = True
    relocation = relocation_of(run, Calls())
    relocation.move_if_asked()
    monkeypatch.setattr(relocation_module, "decide_on_move", refuse)
    run.table["b"].status = TaskStatus.PAUSED
    assert not relocation.move_if_asked()
    assert lines(run) == ["the run stays on <1,1>x1: no replica holds these tasks"]


def test_a_run_that_trains_and_cannot_be_saved_is_reported_and_resumes_where_it_is(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, run.is_in_train = Calls(), True
    monkeypatch.setattr(run.saver, "save_run", lambda: False)
    relocation = relocation_of(run, calls)
    relocation.redeploy("<1,1>")
    assert not relocation.move_if_asked()
    assert "let go" not in calls
    assert relocation.target == "", "it was tried once"
    assert "redeploy: the tasks could not be saved at step 0, so they stay on their processes" in lines(run)[-1]
