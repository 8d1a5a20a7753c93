"""One trainer writes a run folder at a time; another is refused before it has changed anything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from peft_mux.errors import CheckpointError
from peft_mux.storage import FolderLock
from peft_mux.task import Task
from tests.checkpoint.crashes import SAVING
from tests.invariants import mux_lab as lab
from tests.invariants.mux_lab import Recorder
from tests.runs import files_in, stop, stops_after

pytest.importorskip("fcntl")


def tasks() -> list[Task]:
    return [lab.small_task("a", data_seed=1, max_steps=4), lab.small_task("b", data_seed=2, max_steps=6)]


def test_a_second_trainer_of_a_run_that_saves_nothing_is_refused_too(tmp_path: Path) -> None:
    def intrude(trainer: Any) -> None:
        for resume in (None, True):
            with pytest.raises(CheckpointError, match=r"must have one writer at a time, got .*process \d+ on host"):
                lab.make_trainer(tasks(), tmp_path).train(resume_from_checkpoint=resume)

    assert len(lab.train(tasks(), tmp_path, recorder=Recorder(at_end={3: intrude})).losses["b"]) == 6
    assert not (tmp_path / "run.lock").exists()


def test_a_lock_that_was_cleaned_away_is_taken_again_unless_another_trainer_was_faster(tmp_path: Path) -> None:
    def clean(trainer: Any) -> None:
        (tmp_path / "run.lock").unlink()

    def intrude(trainer: Any) -> None:
        with pytest.raises(CheckpointError, match="must have one writer at a time"):
            lab.make_trainer(tasks(), tmp_path).train()

    def lose(trainer: Any) -> None:
        clean(trainer)
        other.acquire()

    other, recorder = FolderLock(tmp_path), Recorder(at_end={1: clean, 2: intrude, 4: lose})
    with pytest.raises(CheckpointError, match=r"must have one writer at a time.*process \d+"):
        lab.train(tasks(), tmp_path, recorder=recorder)
    assert len(recorder.losses["b"]) == 4
    other.release()


def test_a_trainer_continues_in_its_own_folder_but_not_after_another_has_written_there(tmp_path: Path) -> None:
    whole = lab.train(tasks(), tmp_path / "whole", **SAVING)
    recorder = Recorder(at_end={2: stop, 3: stop})
    root = tmp_path / "run"
    trainer = lab.make_trainer(tasks(), root, recorder=recorder, **SAVING)
    trainer.train()
    trainer.train()
    assert recorder.losses == {name: whole.losses[name][:3] for name in "ab"}
    other = lab.train(tasks(), root, resume=True, recorder=stops_after(4), **SAVING)
    assert other.trainer.state.global_step == 4
    before = files_in(root)
    with pytest.raises(CheckpointError, match=r"another trainer has written.*resume_from_checkpoint=True"):
        trainer.train()
    assert files_in(root) == before


def test_between_two_trainings_a_command_writes_only_what_no_other_process_keeps(tmp_path: Path) -> None:
    trainer = lab.make_trainer(tasks(), tmp_path, recorder=stops_after(2), **SAVING)
    trainer.train()
    before = files_in(tmp_path)

    def meanwhile(other: Any) -> None:
        with pytest.raises(CheckpointError, match='the adapter of task "b" could not be written, so the task stays'):
            trainer.remove_task("b")
        after = files_in(tmp_path)
        # Only the notice of what was not saved goes there, a line of its own.
        assert [path for path in before if after[path] != before[path]] == ["metrics.jsonl"]

    lab.train(tasks(), tmp_path, resume=True, recorder=Recorder(at_begin={2: meanwhile}), **SAVING)
