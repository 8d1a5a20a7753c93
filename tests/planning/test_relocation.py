"""A run moves to other replicas between two steps without a change of its results, or stays and says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from peft_mux import CheckpointError, ConfigError, Task
from peft_mux.checkpoint.saver import Saver
from peft_mux.planning import relocation
from peft_mux.scheduler.deployment.deployment_plan import Redeployment
from tests.invariants.mux_lab import Recorder, assert_bit_identical, make_trainer, small_task, tiny_llama, train
from tests.records import run_records
from tests.runs import SAVING


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("model")
    tiny_llama().save_pretrained(folder)
    return str(folder)


def tasks() -> list[Task]:
    return [small_task("a", data_seed=1, lora_dropout=0.2, max_steps=6), small_task("b", data_seed=2, max_steps=3)]


@pytest.mark.slow
def test_a_run_that_moves_has_the_bits_of_one_that_stays(model: str, tmp_path: Path) -> None:
    moves = Recorder(at_begin={2: lambda trainer: trainer.redeploy("<1,1>")})
    moved = train(tasks(), tmp_path / "moved", recorder=moves, model=model, **SAVING)
    moved.trainer.redeploy("<1,1>")
    described = make_trainer(tasks(), tmp_path / "described", model=model, **SAVING)
    described.redeploy("<1,1>")
    assert all(parameter.is_meta for parameter in described.model.parameters()), "nothing is loaded to be moved"
    stayed = train(tasks(), tmp_path / "stayed", model=model, **SAVING)
    for name in ("a", "b"):
        assert_bit_identical(moved, stayed, name)
    assert [event["replicas"] for event in run_records(tmp_path / "moved", "redeployed")] == ["<1,1>x1"] * 2


def test_a_run_that_cannot_be_saved_stays_where_it_is(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Saver, "save_run", lambda self: False)
    moves = Recorder(at_begin={2: lambda trainer: trainer.redeploy("<1,1>")})
    trainer = train(tasks(), tmp_path, recorder=moves, model=model, **SAVING).trainer
    assert run_records(tmp_path, "redeployed") == []
    said = "redeploy: the tasks could not be saved at step 3, so they stay on their processes"
    shown = capsys.readouterr()
    assert " ".join((shown.out + shown.err).split()).count(said) == 1, "it was tried once"
    with pytest.raises(CheckpointError, match="redeploy: the tasks could not be saved at step 6"):
        trainer.redeploy("<1,1>")


def test_a_run_that_cannot_move_refuses_to(model: str, tmp_path: Path) -> None:
    for given, strategy, replicas, said in (
        (tiny_llama(), "steps", "<1,1>", "redeploy needs a model that is a hub id or folder, from which every process"),
        (model, "no", "<1,1>", 'save_strategy="no"'),
        (model, "steps", "<1,2>", r"args\.replicas must have as many processes as the run \(1\), got <1,2>x1, which"),
    ):
        trainer = make_trainer(tasks(), tmp_path, model=given, save_strategy=strategy)
        with pytest.raises(ConfigError, match=said):
            trainer.redeploy(replicas)


@pytest.mark.parametrize(
    "answer", ["pays", *(pytest.param(one, marks=pytest.mark.slow) for one in ("does not pay", "cannot be had"))]
)
def test_a_run_decides_again_whenever_tasks_have_come_or_gone(
    answer: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[list[str]] = []

    def decide(planner: Any, runs: Any, old: Any, *, restart_s: float) -> Redeployment:
        asked.append([run.name for run in runs])
        if answer == "cannot be had":
            raise ConfigError("no replica holds these tasks")
        return Redeployment(str(old), "<1,1>", 2.0, 1.0 if answer == "pays" else 2.0, 1000.0, restart_s)

    monkeypatch.setattr(relocation, "decide_on_move", decide)
    run = train(tasks(), tmp_path, recorder=Recorder(), model=model, redeploy=True, **SAVING)
    assert set(run.trainer.task_statuses.values()) == {"succeeded"}
    assert asked == [["a"]], "not for the tasks that the run began with"
    assert len(run_records(tmp_path, "redeployed")) == (answer == "pays")
    refusal = "the run stays on <1,1>x1: no replica holds these tasks"
    shown = capsys.readouterr()
    assert (refusal in " ".join((shown.out + shown.err).split())) == (answer == "cannot be had")
