"""A task that was removed stays removed when the run is resumed, and one that comes under its name is a new one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from peft_mux.errors import CheckpointError
from peft_mux.task import Task, TaskStatus
from tests.checkpoint.crashes import SAVING
from tests.invariants import mux_lab as lab
from tests.invariants.mux_lab import Recorder, Run
from tests.runs import crash, train_until_crash


def remove_b(trainer: Any) -> None:
    trainer.remove_task("b")


def first() -> Task:
    return lab.small_task("a", data_seed=1, max_steps=8)


def second() -> Task:
    return lab.small_task("b", data_seed=2, length=9, rank=2, max_steps=8)


def interrupted(root: Path, acts: dict[int, Any], **options: Any) -> None:
    train_until_crash([first(), second()], root, Recorder(at_end=acts), **{**SAVING, **options})


def resume(root: Path, *tasks: Task, **options: Any) -> Run:
    return lab.train(list(tasks), root, resume=True, **{**SAVING, **options})


def adapter(root: Path) -> dict[str, bytes]:
    names = "adapter_config.json", "adapter_model.safetensors", "adapter_checksums.json"
    return {name: (root / "b" / name).read_bytes() for name in names}


def assert_stays_removed(run: Run, root: Path, before: dict[str, bytes], *, step: int) -> None:
    task = run.trainer.table["b"]
    assert (task.status, task.step) == (TaskStatus.REMOVED, step)
    assert "b" not in run.losses
    assert adapter(root) == before
    assert run.trainer.task_statuses["a"] is TaskStatus.SUCCEEDED


@pytest.mark.parametrize(
    ("acts", "options"),
    [
        pytest.param({3: remove_b, 5: crash}, {}, id="saved since"),
        # The task leaves after step 3, and the run dies in step 4, before anything else is saved.
        pytest.param({3: remove_b, 4: crash}, {}, id="killed before the next save", marks=pytest.mark.slow),
        pytest.param({1: remove_b, 2: crash}, {"save_steps": 1000}, id="nothing saved before", marks=pytest.mark.slow),
    ],
)
def test_a_removed_task_that_is_given_again_stays_removed_and_its_adapter_as_it_is(
    acts: dict[int, Any], options: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupted(tmp_path, acts, **options)
    before, step = adapter(tmp_path), min(acts)
    run = resume(tmp_path, first(), second(), disable_tqdm=False, **options)
    assert_stays_removed(run, tmp_path, before, step=step)
    assert 'task "b" was removed from the run; it stays removed' in capsys.readouterr().out
    # And again, from the state that the resumed run has written.
    assert_stays_removed(resume(tmp_path, first(), second(), **options), tmp_path, before, step=step)


@pytest.mark.slow
def test_the_others_resume_where_they_were_saved_when_a_removal_was_the_last_thing_written(tmp_path: Path) -> None:
    whole = lab.train([first(), second()], tmp_path / "whole", recorder=Recorder(at_end={3: remove_b}), **SAVING)
    interrupted(tmp_path / "run", {3: remove_b, 4: crash})
    run = resume(tmp_path / "run", first(), second())
    assert len(run.losses["a"]) == 6
    assert run.losses["a"][2:] == whole.losses["a"][4:]


@pytest.mark.slow
def test_a_run_of_another_folder_hands_on_what_was_removed(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    interrupted(old, {3: remove_b, 5: crash})
    for folder, resumed_from in ((new, old), (new, new)):
        trainer = lab.make_trainer([first(), second()], folder, **SAVING)
        trainer.train(resume_from_checkpoint=str(resumed_from))
        assert trainer.task_statuses["b"] is TaskStatus.REMOVED
        assert not list(new.glob("b/*"))


@pytest.mark.parametrize(
    ("crash_at", "steps_left"),
    [pytest.param(6, 8, id="before it was saved"), pytest.param(9, 5, id="after", marks=pytest.mark.slow)],
)
def test_a_task_that_came_under_the_name_of_a_removed_one_is_that_new_task_after_resuming(
    crash_at: int, steps_left: int, tmp_path: Path
) -> None:
    def another() -> Task:
        return lab.small_task("b", data_seed=7, length=9, rank=2, max_steps=8, learning_rate=1e-3)

    acts = {3: remove_b, 5: lambda trainer: trainer.register_tasks([another()]), crash_at: crash}
    # The new one takes its first step after step 5; the run is saved after steps 4 and 8.
    long, options = lab.small_task("a", data_seed=1, max_steps=20), {**SAVING, "save_steps": 4}
    train_until_crash([long, second()], tmp_path, Recorder(at_end=acts), **options)
    run = resume(tmp_path, long, another(), save_steps=4)
    assert run.trainer.task_statuses["b"] is TaskStatus.SUCCEEDED
    assert len(run.losses["b"]) == steps_left
    alone = lab.train([another()], tmp_path / "alone")
    lab.assert_close(run.losses["b"], alone.losses["b"][-steps_left:], 1e-4, "b")


def test_checkpoints_of_a_removed_task_are_never_taken_for_those_of_its_namesake(tmp_path: Path) -> None:
    # Of the same settings, so that nothing else would tell them apart.
    acts = {3: remove_b, 4: lambda trainer: trainer.register_tasks([second()]), 7: crash}
    interrupted(tmp_path, acts)
    steps = sorted(path.name for path in (tmp_path / "b").glob("checkpoint-*"))
    assert steps == ["checkpoint-0", "checkpoint-2"], "those of the new one have taken the place of the old one's"
    other = tmp_path / "other"
    interrupted(other, {4: remove_b, 5: crash})
    for step in steps:
        shutil.rmtree(tmp_path / "b" / step)
    shutil.copytree(other / "b" / "checkpoint-2", tmp_path / "b" / "checkpoint-2")
    with pytest.raises(CheckpointError, match=r'b" has no valid checkpoint up to step 2 in .*'):
        resume(tmp_path, first(), second())


@pytest.mark.slow
def test_a_resumed_run_takes_a_new_task_under_the_name_of_one_that_it_left_removed(tmp_path: Path) -> None:
    interrupted(tmp_path, {3: remove_b, 5: crash})
    acts = {6: lambda trainer: trainer.register_tasks([second()])}
    run = lab.train([first(), second()], tmp_path, resume=True, recorder=Recorder(at_end=acts), **SAVING)
    assert run.trainer.task_statuses == {"a": TaskStatus.SUCCEEDED, "b": TaskStatus.SUCCEEDED}
    assert len(run.losses["b"]) == 8
    again = resume(tmp_path, first(), second())
    assert again.losses == {}
    assert again.trainer.task_statuses["b"] is TaskStatus.SUCCEEDED


def test_a_folder_in_which_another_trains_is_resumed_from_and_left_alone(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    scratch = old / "a" / f".tmp-{'0' * 32}"

    def fork_off(trainer: Any) -> None:
        scratch.mkdir()  # what the one that trains is writing now
        other = lab.make_trainer([first(), second()], new, **SAVING)
        other.train(resume_from_checkpoint=str(old))
        assert set(other.task_statuses.values()) == {TaskStatus.SUCCEEDED}
        assert scratch.is_dir()

    run = lab.train([first(), second()], old, recorder=Recorder(at_end={5: fork_off}), **SAVING)
    assert set(run.trainer.task_statuses.values()) == {TaskStatus.SUCCEEDED}
