"""A run that continues with more steps, other rates, and tasks added and dropped; all of it is reported."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from peft_mux import CheckpointError
from peft_mux.task import Task
from tests import runs
from tests.invariants import mux_lab as lab
from tests.invariants.mux_lab import Recorder, Run
from tests.records import run_records
from tests.runs import assert_equal_weights, stops_after

SAVING = {**runs.SAVING, "logging_strategy": "steps", "logging_steps": 1}


def own(**settings: Any) -> Task:
    return lab.small_task("a", **{"data_seed": 1, "lora_dropout": 0.1, "lr_scheduler_type": "constant", **settings})


def stopped(folder: Path, *tasks: Task, after: int = 4) -> Run:
    return lab.train(list(tasks), folder, recorder=stops_after(after), **SAVING)


def resumed(folder: Path, *tasks: Task, recorder: Recorder | None = None) -> Run:
    return lab.train(list(tasks), folder, recorder=recorder, resume=True, **SAVING)


def rates(folder: Path) -> dict[int, float]:
    records = run_records(folder, "train")
    return {record["step"]: record["learning_rate"] for record in records if "learning_rate" in record}


def test_more_steps_give_the_bits_of_a_run_that_had_them_from_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = lab.train([own(max_steps=12)], tmp_path / "whole", **SAVING)
    stopped(tmp_path / "run", own(max_steps=8))
    capsys.readouterr()
    run = resumed(tmp_path / "run", own(max_steps=12))
    assert run.losses["a"] == whole.losses["a"][4:]
    assert_equal_weights(run.weights("a"), whole.weights("a"))
    said = capsys.readouterr().out
    assert 'task "a": resumes from step 4 with other settings: max_steps 8 -> 12, num_steps 8 -> 12' in said
    assert run.trainer.task_statuses["a"] == "succeeded"


@pytest.mark.slow
def test_changed_rates_hold_from_here_on_and_follow_their_schedule(tmp_path: Path) -> None:
    stopped(tmp_path / "run", own(learning_rate=4e-3, lr_scheduler_type="linear"))
    run = resumed(tmp_path / "run", own(learning_rate=1e-3, lr_scheduler_type="linear", max_steps=16, weight_decay=0.1))
    after = lab.train([own(learning_rate=1e-3, lr_scheduler_type="linear", max_steps=16)], tmp_path / "other", **SAVING)
    found, wanted = rates(tmp_path / "run"), rates(tmp_path / "other")
    assert {step: found[step] for step in range(5, 16)} == {step: wanted[step] for step in range(5, 16)}
    assert found[3] == pytest.approx(4e-3 * 6 / 8), "those of the steps before stay as they were"
    assert run.trainer.table["a"].step == after.trainer.table["a"].step == 16


@pytest.mark.slow
def test_a_task_that_had_ended_resumes_from_its_adapter_and_says_that_its_optimizer_starts_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = lab.train([own(max_steps=4), lab.small_task("b", data_seed=2, max_steps=4)], tmp_path, **SAVING)
    ended = {name: first.weights(name) for name in "ab"}
    capsys.readouterr()
    run = resumed(tmp_path, own(max_steps=6), lab.small_task("b", data_seed=2, max_steps=4, learning_rate=0.5))
    said = capsys.readouterr().out
    assert "its optimizer starts again" in said
    assert 'task "b": has ended, so other settings have no effect: learning_rate 0.003 -> 0.5' in said
    assert len(run.losses["a"]) == 2
    assert "b" not in run.losses
    assert_equal_weights(run.weights("b"), ended["b"])
    assert_equal_weights(run.recorder.before["a"][0], ended["a"], "it begins where it ended")
    assert run.trainer.task_statuses == {"a": "succeeded", "b": "succeeded"}


def test_a_task_with_fewer_steps_than_it_has_taken_ends_at_once(tmp_path: Path) -> None:
    stopped(tmp_path, own(max_steps=8))
    run = resumed(tmp_path, own(max_steps=3))
    assert run.trainer.task_statuses["a"] == "succeeded"
    assert run.trainer.table["a"].step == 4


def test_tasks_come_and_go_between_two_runs_and_the_others_keep_their_bits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = lab.train([own()], tmp_path / "whole", **SAVING)
    stopped(tmp_path / "run", own(), lab.small_task("old", data_seed=2))
    capsys.readouterr()
    run = resumed(tmp_path / "run", own(), lab.small_task("new", data_seed=3))
    lab.assert_close(run.losses["a"], whole.losses["a"][4:], 1e-5, "a")
    assert len(run.losses["new"]) == 8
    said = capsys.readouterr().out
    assert 'task "old" of the resumed run is not among the tasks given now; it is left out, its files stay' in said
    assert 'task "new" is not part of the resumed run; it begins with its first step' in said
    assert (tmp_path / "run" / "old" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_a_second_resumption_with_the_new_settings_is_exact(tmp_path: Path) -> None:
    stopped(tmp_path / "run", own(max_steps=8))
    shutil.copytree(tmp_path / "run", tmp_path / "twice")
    changed = own(max_steps=12, learning_rate=1e-3)
    once = resumed(tmp_path / "run", changed)
    resumed(tmp_path / "twice", changed, recorder=stops_after(7))
    again = resumed(tmp_path / "twice", changed)
    assert again.losses["a"] == once.losses["a"][-len(again.losses["a"]) :]
    assert_equal_weights(again.weights("a"), once.weights("a"))


PAIRS = [{"prompt_ids": [1, 2, 3], "chosen_ids": [4, 5], "rejected_ids": [6, 7, 8]}] * 8


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"objective_args": {"beta": 0.5}}, "'beta': 0.5"),
        ({"objective": "orpo"}, "'objective': 'orpo'"),
    ],
)
def test_a_task_does_not_continue_towards_another_loss(settings: dict[str, Any], named: str, tmp_path: Path) -> None:
    def answers(**more: Any) -> Task:
        return replace(own(), train_dataset=PAIRS, **{"objective": "dpo", **more})

    stopped(tmp_path, answers(), after=2)
    with pytest.raises(CheckpointError, match=rf'task "a" must have the settings of its checkpoint.*{named}'):
        resumed(tmp_path, answers(**settings))
    assert resumed(tmp_path, answers()).trainer.task_statuses["a"] == "succeeded"
