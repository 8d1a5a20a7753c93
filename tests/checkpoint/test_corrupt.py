"""A run folder that is torn, changed or foreign: an older state is taken aloud, or the fault is named."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    "optimizer, truncated": ("optimizer.safetensors", truncate),
    "manifest, missing": ("manifest.json", Path.unlink),
    "gone": ("", shutil.rmtree),
    "of another step": ("", put_step_2_there),
}


@pytest.mark.parametrize(
    "spoils",
    [
        ("weights, flipped bit", "optimizer, truncated"),
        pytest.param(("manifest, missing", "gone"), marks=pytest.mark.slow),
        pytest.param(("of another step",), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_spoilt_checkpoint_is_passed_over_for_the_one_before_it_and_named(
    spoils: tuple[str, ...], root: Path, whole: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    spoilt = {name: SPOILS[spoil] for name, spoil in zip("ab", spoils, strict=False)}
    for name, (file, act) in spoilt.items():
        act(root / name / "checkpoint-4" / file)
    run, said = said_while_resuming(root, capsys)
    for name in "ab":
        # A spoilt one goes back to step 2 and takes its later steps again, another one continues at step 4.
        assert len(run.losses[name]) == (5 if name in spoilt else 3)
        last = [Run(one.trainer, Recorder(losses={name: one.losses[name][-3:]})) for one in (run, whole)]
        lab.assert_same(*last, name, 1e-5)
    for name, (file, act) in spoilt.items():
        named = "" if act is Path.unlink else file
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


def test_torn_records_and_those_under_other_names_are_passed_over_and_named(
    root: Path, whole: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    torn = newest_record(root)
    for name in ("run-x.json", "run-99.json"):
        shutil.copy(torn, root / "state" / name)
    flip(torn)
    run, said = said_while_resuming(root, capsys)
    assert run.losses == {name: whole.losses[name][2:] for name in "ab"}
    assert run.recorder.digests == {name: whole.recorder.digests[name][2:] for name in "ab"}
    assert all(name in said for name in (torn.name, "run-x.json", "run-99.json"))


@pytest.mark.parametrize("is_torn", [False, True], ids=["intact", "torn"])
def test_a_folder_that_holds_a_run_is_refused_without_resuming(is_torn: bool, root: Path) -> None:
    for path in (root / "state").iterdir() if is_torn else ():
        flip(path)
    before = files_in(root)
    said = r"output_dir must be a new folder, got .*which holds a run.*resume_from_checkpoint=True"
    with pytest.raises(CheckpointError, match=said):
        lab.train(tasks(), root, **SAVING)
    assert files_in(root) == before


@pytest.mark.parametrize("difference", [-1, 1])
def test_the_state_of_another_format_version_is_refused(difference: int, root: Path) -> None:
    with changed_record(newest_record(root)) as record:
        record["format_version"] += difference
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
    with torch.no_grad():
        other.lm_head.weight[-1, -1] += 0.5
    with pytest.raises(CheckpointError, match=r"the same backbone.*, got .*trained on other weights"):
        resume(root, model=other)


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


def test_a_checkpoint_that_a_kept_state_names_stays_although_its_task_has_saved_newer_ones(tmp_path: Path) -> None:
    train_until_crash(tasks(save_steps=1), tmp_path, Recorder(at_end={5: crash}), **SAVING, save_total_limit=2)
    assert sorted(path.name for path in (tmp_path / "state").iterdir()) == ["run-00000002.json", "run-00000004.json"]
    assert storage.numbered_folders(tmp_path / "a") == [2, 3, 4]


def test_everything_that_a_run_writes_is_safetensors_json_or_text_to_read(whole: Run) -> None:
    kinds = {Path(name).suffix for name in files_in(folder_of(whole))}
    assert kinds == {".safetensors", ".json", ".jsonl", ".md", ".html"}


def test_the_adapter_of_the_last_save_loads_in_plain_peft_after_a_crash(crashed: Path, whole: Run) -> None:
    # Weights before the fifth step are those after the fourth.
    assert_equal_weights(weights_in_plain_peft(crashed / "a"), whole.recorder.before["a"][4])
