"""A full or broken disk costs files and records, never the run; no task has succeeded whose adapter is not there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peft_mux.checkpoint.run_folder import RunFolder
from peft_mux.errors import CheckpointError
from peft_mux.task import Task, TaskStatus
from tests.checkpoint.crashes import crashed_tasks as tasks
from tests.invariants import mux_lab as lab
from tests.invariants.mux_lab import Recorder, Run
from tests.records import run_records as records
from tests.runs import assert_equal_weights, poison, weights_in_plain_peft

SAVING = {"save_strategy": "steps", "save_steps": 2, "logging_strategy": "steps", "logging_steps": 1}
Disk = Callable[[int | None], None]


def train(disk: Disk, root: Path, *, with_tasks: list[Task] | None = None, recorder: Recorder, **options: Any) -> Run:
    """Train, and lift the limit whatever happens: what pytest says of it goes to a file too."""
    try:
        return lab.train(with_tasks or tasks(), root, recorder=recorder, **{**SAVING, **options})
    finally:
        disk(None)


def statuses(root: Path, name: str) -> list[str]:
    return [one["status"] for one in records(root, "status") if one["task"] == name]


def test_a_disk_that_takes_nothing_for_a_while_costs_records_and_nothing_else(
    disk: Disk, whole: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    acts = {3: lambda _: disk(0), 5: lambda _: disk(None)}
    run = train(disk, tmp_path, recorder=Recorder(at_end=acts), disable_tqdm=False)
    assert run.losses == whole.losses
    assert run.recorder.digests == whole.recorder.digests
    lost = records(tmp_path, "records_lost")
    said = capsys.readouterr().out
    # Losses of two tasks after steps 3 and 4 (callbacks come before logs), the notice of the failed save of step 4, and
    # after step 5 what time is left, where this machine is slower than planned.
    count = 5 + said.count(" a step, measured; ")
    assert [one["count"] for one in lost] == [count]
    assert said.count("metrics.jsonl: could not be written") == 1
    assert f"{count} records are missing" in said
    assert set(run.trainer.task_statuses.values()) == {TaskStatus.SUCCEEDED}
    assert not list(tmp_path.rglob(".tmp-*"))


def test_a_task_whose_adapter_was_never_written_has_failed_and_the_report_names_no_stale_one(
    disk: Disk, whole: Run, tmp_path: Path
) -> None:
    run = train(disk, tmp_path, recorder=Recorder(at_end={3: lambda _: disk(0)}))
    assert run.losses == whole.losses
    for name in "ab":
        task = run.trainer.table[name]
        assert task.status is TaskStatus.FAILED
        assert "its adapter could not be written" in task.reason
        assert str(tmp_path / name / "checkpoint-2") in task.reason, "where the last good copy lies"
    table = run.trainer.report().splitlines()
    assert ["not saved" in line for line in table[1:3]] == [True, True]
    # A resumed run trains the lost steps again, and succeeds.
    again = lab.train(tasks(), tmp_path, resume=True, **SAVING)
    assert set(again.trainer.task_statuses.values()) == {TaskStatus.SUCCEEDED}
    assert again.losses == {name: whole.losses[name][2:] for name in "ab"}
    assert again.recorder.digests == {name: whole.recorder.digests[name][2:] for name in "ab"}
    assert str(tmp_path / "a") in again.trainer.report()


def test_a_task_that_was_never_saved_says_that_there_is_no_copy(disk: Disk, tmp_path: Path) -> None:
    run = train(disk, tmp_path, recorder=Recorder(at_end={3: lambda _: disk(0)}), save_steps=100)
    assert "There is no copy of it on the disk" in run.trainer.table["a"].reason


@pytest.mark.parametrize(
    "save_steps",
    [pytest.param(2, id="at the next state"), pytest.param(100, id="at the end of the run", marks=pytest.mark.slow)],
)
def test_an_adapter_that_could_not_be_written_is_written_when_there_is_room_again(
    save_steps: int, disk: Disk, tmp_path: Path
) -> None:
    seen: dict[int, Any] = {}

    def look(trainer: Any) -> None:
        seen[trainer.state.global_step] = trainer.task_statuses["a"]

    def free(trainer: Any) -> None:
        look(trainer)
        disk(None)

    acts = {3: lambda _: disk(0), 5: free, 7: look}
    options = {**SAVING, "save_steps": save_steps}
    run = train(disk, tmp_path, with_tasks=tasks(max_steps=4), recorder=Recorder(at_end=acts), **options)
    assert seen == {5: TaskStatus.FAILED, 7: TaskStatus.SUCCEEDED if save_steps == 2 else TaskStatus.FAILED}
    task = run.trainer.table["a"]
    assert (task.status, task.reason) == (TaskStatus.SUCCEEDED, "")
    assert statuses(tmp_path, "a")[-1] == "succeeded"
    assert_equal_weights(weights_in_plain_peft(tmp_path / "a"), run.weights("a"))
    assert str(tmp_path / "a") in run.trainer.report()
    resumed = lab.train(tasks(max_steps=4), tmp_path, resume=True, **options)
    assert resumed.losses == {}
    assert set(resumed.trainer.task_statuses.values()) == {TaskStatus.SUCCEEDED}


def test_an_adapter_that_reads_back_otherwise_than_it_was_written_is_no_success(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = RunFolder.save_adapter

    def write_badly(self: RunFolder, name: str, weights: Any = None) -> None:
        write(self, name, weights)
        if name == "a":
            path = self.root / name / "adapter_model.safetensors"
            path.write_bytes(path.read_bytes()[:-1] + b"?")

    monkeypatch.setattr(RunFolder, "save_adapter", write_badly)
    run = lab.train(tasks(), tmp_path, **SAVING)
    assert run.trainer.task_statuses == {"a": TaskStatus.FAILED, "b": TaskStatus.SUCCEEDED}
    assert "adapter_model.safetensors" in run.trainer.table["a"].reason
    # The state of its last step was still written, and holds the adapter.
    assert str(tmp_path / "a" / "checkpoint-7") in run.trainer.table["a"].reason
    monkeypatch.undo()
    mended = lab.train(tasks(), tmp_path, resume=True, **SAVING)
    assert mended.losses == {}
    assert mended.trainer.task_statuses["a"] is TaskStatus.SUCCEEDED
    path = tmp_path / "a" / "adapter_model.safetensors"
    assert path.read_bytes() == (tmp_path / "a" / "checkpoint-7" / path.name).read_bytes()


def test_a_failed_task_whose_last_good_adapter_could_not_be_written_says_both(disk: Disk, tmp_path: Path) -> None:
    run = train(disk, tmp_path, recorder=Recorder(at_end={3: lambda _: disk(0)}, at_begin={3: poison("a")}))
    reason = run.trainer.table["a"].reason
    assert reason.startswith("non_finite")
    assert "its adapter could not be written" in reason


def test_a_disk_that_is_full_before_the_first_step_is_refused_with_a_way_out(disk: Disk, tmp_path: Path) -> None:
    root = tmp_path / "run"
    trainer = lab.make_trainer(tasks(), root, save_strategy="steps")
    disk(0)
    try:
        with pytest.raises(CheckpointError, match=r"output_dir must be a folder .*, got .*\(.*Free space") as caught:
            trainer.train()
    finally:
        disk(None)
    assert str(root) in str(caught.value)
    assert not root.exists(), "nothing is left of it"
    trainer.train()
    assert set(trainer.task_statuses.values()) == {TaskStatus.SUCCEEDED}


def test_a_folder_that_cannot_be_made_is_refused_by_the_trainer_itself(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    root = tmp_path / "file" / "run"
    said = r"output_dir must be a folder .*, got .*[Ss]et another output_dir"
    with pytest.raises(CheckpointError, match=said) as caught:
        lab.make_trainer(tasks(), root, **SAVING)
    assert str(root) in str(caught.value)
