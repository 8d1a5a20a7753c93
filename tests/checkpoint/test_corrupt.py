"""A run folder that is torn, changed, foreign or hostile: an older state is taken aloud, or the fault is named."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest
import torch

from peft_mux import storage
from peft_mux.errors import CheckpointError
from peft_mux.task import Task
from tests.checkpoint.crashes import SAVING, flip, truncate
from tests.checkpoint.crashes import crashed_tasks as tasks
from tests.invariants import mux_lab as lab
from tests.invariants.mux_lab import Recorder, Run
from tests.records import run_records
from tests.runs import (
    assert_equal_weights,
    crash,
    files_in,
    folder_of,
    train_until_crash,
    weights_in_plain_peft,
)


def resume(root: Path, with_tasks: list[Task] | None = None, **options: Any) -> Run:
    return lab.train(with_tasks or tasks(), root, resume=True, **{**SAVING, **options})


def said_while_resuming(root: Path, capsys: pytest.CaptureFixture[str], **options: Any) -> tuple[Run, str]:
    """Resume with the plain progress of files and pipes, and return what it printed."""
    run = resume(root, disable_tqdm=False, **options)
    captured = capsys.readouterr()
    return run, captured.out + captured.err


# ------------------------------------------------------------ torn and changed


def put_step_2_there(path: Path) -> None:
    shutil.rmtree(path)
    shutil.copytree(path.parent / "checkpoint-2", path)


SPOILS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "weights, flipped bit": ("adapter_model.safetensors", flip),
    "optimizer, flipped bit": ("optimizer.safetensors", flip),
    "last good weights, flipped bit": ("last_good.safetensors", flip),
    "state, flipped bit": ("state.json", flip),
    "manifest, flipped bit": ("manifest.json", flip),
    "optimizer, truncated": ("optimizer.safetensors", truncate),
    "state, missing": ("state.json", Path.unlink),
    "manifest, missing": ("manifest.json", Path.unlink),
    "an unknown file": ("extra.bin", Path.touch),
    "gone": ("", shutil.rmtree),
    "of another step": ("", put_step_2_there),
}


PAIRS = [tuple(pair) for pair in zip_longest(list(SPOILS)[::2], list(SPOILS)[1::2])]
"""What is done to "a", and to "b" in the same run."""


@pytest.mark.parametrize("spoils", PAIRS, ids=str)
def test_a_spoilt_checkpoint_is_passed_over_for_the_one_before_it_and_named(
    spoils: tuple[str | None, ...], root: Path, whole: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    spoilt = {name: SPOILS[spoil] for name, spoil in zip("ab", spoils, strict=True) if spoil is not None}
    for name, (file, act) in spoilt.items():
        act(root / name / "checkpoint-4" / file)
    run, said = said_while_resuming(root, capsys)
    for name in "ab":
        # A spoilt one goes back to step 2 and takes its later steps again, another one continues at step 4.
        assert len(run.losses[name]) == (5 if name in spoilt else 3)
        last = [Run(one.trainer, Recorder(losses={name: one.losses[name][-3:]})) for one in (run, whole)]
        lab.assert_same(*last, name, 1e-5)
    for name, (file, act) in spoilt.items():
        named = "" if file == "manifest.json" and act is Path.unlink else file
        assert f'task "{name}"' in said
        assert str(Path(name) / "checkpoint-4" / named) in said
    assert said.count("Trying the checkpoint before it") == len(spoilt)


def flip_all(task: Path) -> None:
    for step in (2, 4):
        flip(task / f"checkpoint-{step}" / "adapter_model.safetensors")


def swap(task: Path) -> None:
    task.rename(task.with_name("other"))
    task.with_name("b").rename(task)
    task.with_name("other").rename(task.with_name("b"))


@pytest.mark.parametrize("spoil", [flip_all, swap], ids=["none is intact", "those of another task"])
def test_without_a_checkpoint_of_the_task_its_folder_and_the_way_out_are_named(
    spoil: Callable[[Path], None], root: Path
) -> None:
    spoil(root / "a")
    with pytest.raises(CheckpointError, match=r'task "a" has no valid checkpoint up to step 4 in .*Restore') as caught:
        resume(root)
    assert str(root / "a") in str(caught.value)


def test_a_checkpoint_of_another_run_is_refused_unless_its_own_folder_is_named(
    crashed: Path, root: Path, whole: Run, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    train_until_crash(tasks(), other, Recorder(at_end={5: crash}), **SAVING)
    ids = {folder: storage.unsealed_json(newest_record(folder))["run"] for folder in (root, other)}
    shutil.rmtree(root / "a" / "checkpoint-4")
    shutil.copytree(other / "a" / "checkpoint-4", root / "a" / "checkpoint-4")
    said = r'task "a": .*checkpoint-4 must be of run .*resume_from_checkpoint='
    with pytest.raises(CheckpointError, match=said) as no:
        resume(root)
    assert all(run_id in str(no.value) for run_id in ids.values())
    own = lab.make_trainer(tasks(), tmp_path / "own", recorder=(recorder := Recorder()), **SAVING)
    own.train(resume_from_checkpoint=str(other))
    assert recorder.losses["a"] == whole.losses["a"][-3:]
    assert storage.unsealed_json(newest_record(tmp_path / "own"))["run"] not in ids.values()


def test_a_trainer_does_not_continue_with_another_run_put_in_the_place_of_its_own(
    crashed: Path, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    trainer = train_until_crash(tasks(), root, Recorder(at_end={5: crash}), **SAVING)
    shutil.rmtree(root)
    shutil.copytree(crashed, root)
    with pytest.raises(CheckpointError, match=r"must be of run .*, which this trainer trains, got one of run "):
        trainer.train(resume_from_checkpoint=True)


def newest_record(root: Path) -> Path:
    return max((root / "state").glob("run-*.json"))


@contextmanager
def changed_record(path: Path) -> Iterator[dict[str, Any]]:
    """Give the content of a record to be changed, and seal it again."""
    record = storage.unsealed_json(path)
    yield record
    path.write_bytes(storage.sealed_json(record))


@pytest.mark.parametrize("act", [flip, truncate, Path.unlink])
def test_with_a_torn_record_the_run_resumes_from_the_one_before_it(
    act: Callable[[Path], None], root: Path, whole: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    torn = newest_record(root)
    act(torn)
    run, said = said_while_resuming(root, capsys)
    assert run.losses == {name: whole.losses[name][2:] for name in "ab"}
    assert run.recorder.digests == {name: whole.recorder.digests[name][2:] for name in "ab"}
    assert (torn.name in said) is (act is not Path.unlink)


def test_a_folder_whose_records_are_all_torn_is_not_trained_over(root: Path) -> None:
    for path in (root / "state").iterdir():
        flip(path)
    with pytest.raises(CheckpointError, match="output_dir"):
        lab.train(tasks(), root, **SAVING)


def test_the_state_of_another_format_version_is_refused(root: Path) -> None:
    with changed_record(newest_record(root)) as record:
        record["format_version"] += 1
    with pytest.raises(CheckpointError, match="version"):
        resume(root)


# ---------------------------------------------------------- changed settings


CHANGES = {
    "optim": {"optim": "sgd"},
    "shuffle": {"shuffle": False},
    "rows": {"data_seed": 77},
    "lora_dropout": {"lora_dropout": 0.5},
}


@pytest.mark.parametrize("field", CHANGES)
def test_a_changed_setting_is_refused_by_task_and_field(field: str, root: Path) -> None:
    first = lab.small_task("a", **{"data_seed": 1, "lora_dropout": 0.1, "max_steps": 7, **CHANGES[field]})
    said = rf'task "a" must have the settings of its checkpoint.*\b{field}\b.* -> .*Undo the change'
    with pytest.raises(CheckpointError, match=said):
        resume(root, [first, tasks()[1]])


def test_how_often_is_saved_and_evaluated_may_change(root: Path, whole: Run) -> None:
    run = resume(root, [*tasks(save_steps=3, eval_steps=3, eval_dataset=lab.rows(5, 2, 9, 9))])
    assert run.losses == {name: whole.losses[name][4:] for name in "ab"}


def test_a_backbone_of_other_weights_is_refused(root: Path) -> None:
    other = lab.tiny_llama()
    lab.fill(other, 1)
    with pytest.raises(CheckpointError, match=r"the same backbone.*, got .*trained on other weights"):
        resume(root, model=other)


def test_a_folder_that_holds_a_run_is_refused_without_resuming(root: Path) -> None:
    before = files_in(root)
    said = r"output_dir must be a new folder, got .*which holds a run.*resume_from_checkpoint=True"
    with pytest.raises(CheckpointError, match=said):
        lab.train(tasks(), root, **SAVING)
    assert files_in(root) == before


def test_a_record_under_a_name_that_is_not_ours_is_passed_over(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("run-x.json", "run-99.json"):
        shutil.copy(newest_record(root), root / "state" / name)
    run, said = said_while_resuming(root, capsys)
    assert len(run.losses["a"]) == 3
    assert "run-x.json" in said
    assert "run-99.json" in said


def test_resuming_with_what_decides_the_bits_changed_is_reported_and_recorded_once(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with changed_record(newest_record(root)) as record:
        record["numerics"]["torch version"] = "1.0"
    _, said = said_while_resuming(root, capsys, max_tokens_per_micro_batch=64)
    assert said.count("resumed with another ") == 2
    assert "resumed with another max_tokens_per_micro_batch: " in said
    assert "resumed with another torch version: '1.0' before" in said
    events = {event["name"]: (event["now"], event["run_step"]) for event in run_records(root, "numerics_changed")}
    assert events["max_tokens_per_micro_batch"] == (64, 4)
    _, said = said_while_resuming(root, capsys, max_tokens_per_micro_batch=64)
    assert "resumed with another" not in said


# ------------------------------------------------------------------ retention


def test_save_total_limit_keeps_the_newest_states(tmp_path: Path) -> None:
    options = {**SAVING, "save_steps": 1, "save_total_limit": 2}
    train_until_crash(tasks(), tmp_path, Recorder(at_end={6: crash}), **options)
    assert sorted(path.name for path in (tmp_path / "state").iterdir()) == ["run-00000004.json", "run-00000005.json"]
    for name in "ab":
        assert storage.numbered_folders(tmp_path / name) == [4, 5]
        assert (tmp_path / name / "adapter_model.safetensors").is_file()


# --------------------------------------------------- links, paths and pickles


@pytest.mark.parametrize(
    "place",
    ["a", "a/adapter_model.safetensors", "plan.json", "state", "metrics.jsonl", "run.lock", "run.lock.json"],
)
def test_a_link_in_the_run_folder_is_never_written_through(place: str, tmp_path: Path) -> None:
    root, outside = tmp_path / "run", tmp_path / "outside"
    (root / place).parent.mkdir(parents=True)
    is_file = "." in place
    if is_file:
        outside.write_bytes(b"precious")
    else:
        outside.mkdir()
        (outside / "precious").write_bytes(b"precious")
    (root / place).symlink_to(outside, target_is_directory=not is_file)
    with suppress(CheckpointError):  # to refuse the link is as good as to replace it
        lab.train([lab.small_task("a", data_seed=1, max_steps=2)], root, **SAVING)
    if is_file:
        assert outside.read_bytes() == b"precious"
    else:
        assert [path.name for path in outside.iterdir()] == ["precious"]


def test_a_name_in_a_record_deletes_nothing_outside(root: Path) -> None:
    victim = root.parent / "victim"
    shutil.copytree(root / "a", victim)
    shutil.copytree(victim / "checkpoint-2", victim / "checkpoint-1")
    with changed_record(newest_record(root)) as record:
        record["tasks"]["../victim"] = {"status": "running", "reason": "", "step": 4}
    resume(root, save_total_limit=2)
    assert storage.numbered_folders(victim) == [1, 2, 4]


class Exploit:
    """Makes a file where its pickle is opened."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.marker),)


def test_no_pickle_is_ever_opened(root: Path, whole: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    marker = root.parent / "exploited"
    bomb = pickle.dumps(Exploit(marker))
    names = "optimizer.pt scheduler.pt rng_state.pth training_args.bin adapter_model.bin pytorch_model.bin state.pkl"
    for folder in (root, root / "state", root / "a", root / "b"):
        for name in names.split():
            (folder / name).write_bytes(bomb)
    pickle.loads(bomb)
    assert marker.is_dir(), "the bomb is a dud"
    marker.rmdir()

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a pickle was opened")

    monkeypatch.setattr(torch, "load", refuse)
    run = resume(root)
    assert run.losses == {name: whole.losses[name][4:] for name in "ab"}
    assert not marker.exists()


def test_everything_that_a_run_writes_is_safetensors_json_or_text_to_read(whole: Run) -> None:
    kinds = {Path(name).suffix for name in files_in(folder_of(whole))}
    assert kinds == {".safetensors", ".json", ".jsonl", ".md", ".html"}


def test_the_adapter_of_the_last_save_loads_in_plain_peft_after_a_crash(crashed: Path, whole: Run) -> None:
    # Weights before the fifth step are those after the fourth.
    assert_equal_weights(weights_in_plain_peft(crashed / "a"), whole.recorder.before["a"][4])


def test_a_record_of_the_format_before_continues(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (root / "state").iterdir():
        with changed_record(path) as record:
            for name in ("removed", "numerics", "run"):
                del record[name]
            record["format_version"] = 2
    run, said = said_while_resuming(root, capsys)
    assert {name: len(losses) for name, losses in run.losses.items()} == {"a": 3, "b": 3}
    assert "resumed with another" not in said
