"""The adapter that a task leaves behind is as it was written, or reading it fails; resuming repairs it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from peft_mux import storage
from peft_mux.errors import CheckpointError
from peft_mux.modeling.adapters.files import ADAPTER_NAMES
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.task import Task
from tests.checkpoint.crashes import SAVING, flip, truncate
from tests.invariants import mux_lab as lab
from tests.invariants.mux_lab import Run
from tests.runs import assert_equal_weights, small_tasks, weights_in_plain_peft

CONFIG, WEIGHTS, CHECKSUMS = "adapter_config.json", "adapter_model.safetensors", "adapter_checksums.json"


def tasks() -> list[Task]:
    return small_tasks("a", "b", max_steps=3)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("finished")
    lab.train(tasks(), root, **SAVING)
    return root


@pytest.fixture
def root(finished: Path, tmp_path: Path) -> Path:
    """Return a copy of the finished run, to be spoilt."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def resume(root: Path, capsys: pytest.CaptureFixture[str]) -> tuple[Run, str]:
    run = lab.train(tasks(), root, resume=True, disable_tqdm=False, **SAVING)
    return run, capsys.readouterr().out


def files(root: Path, name: str) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (root / name).iterdir() if path.is_file()}


def load(root: Path) -> MultiTaskPeftModel:
    return MultiTaskPeftModel.from_pretrained(lab.tiny_llama(), root)


def refusal(root: Path) -> str:
    """Return what loading says that is refused for task "a"."""
    with pytest.raises(CheckpointError, match='task "a": ') as caught:
        load(root)
    return str(caught.value)


def other_alpha(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "lora_alpha": 99}))


def put_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


SPOILS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "weights flipped": (WEIGHTS, flip),
    "weights a pipe": (WEIGHTS, put_pipe),
    "config changed": (CONFIG, other_alpha),
    "config gone": (CONFIG, Path.unlink),
    "checksums flipped": (CHECKSUMS, flip),
}


def test_an_adapter_has_checksums_of_its_two_files_and_nothing_else_is_needed(root: Path) -> None:
    assert sorted(set(files(root, "a")) - {"loss.png"}) == ["README.md", CHECKSUMS, CONFIG, WEIGHTS]
    storage.verify_checksums(root / "a", ADAPTER_NAMES)
    ours = load(root)
    assert_equal_weights(weights_in_plain_peft(root / "a"), ours.task_parameters("a"))


@pytest.mark.parametrize("spoil", SPOILS)
def test_resuming_repairs_the_adapter_of_an_ended_task_and_says_so(
    spoil: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {name: files(root, name) for name in "ab"}
    file, act = SPOILS[spoil]
    act(root / "a" / file)
    run, said = resume(root, capsys)
    assert run.losses == {}
    assert {name: files(root, name) for name in "ab"} == before
    assert said.count("It is taken from") == 1
    assert 'task "a": ' in said
    assert str(root / "a" / "checkpoint-3") in said


def test_an_adapter_whose_checksums_are_gone_loads_and_is_repaired_from_its_checkpoint(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(root, "a")
    (root / "a" / CHECKSUMS).unlink()
    assert load(root).tasks == ("a", "b")
    flip(root / "a" / WEIGHTS)
    _, said = resume(root, capsys)
    assert f"It is taken from {root / 'a' / 'checkpoint-3'}" in said
    assert files(root, "a") == before


# --------------------------------------------------------------- from_pretrained


@pytest.mark.parametrize("spoil", SPOILS)
def test_loading_a_spoilt_adapter_is_refused_by_task_and_file(spoil: str, root: Path) -> None:
    file, act = SPOILS[spoil]
    act(root / "a" / file)
    if spoil == "config gone":  # then it is no folder of an adapter, and passed over as any other
        assert load(root).tasks == ("b",)
        return
    said = refusal(root)
    assert str(root / "a") in said
    assert file in said


@pytest.mark.parametrize(("file", "act"), [(WEIGHTS, truncate), (WEIGHTS, put_pipe), (CONFIG, truncate)])
def test_loading_a_torn_adapter_without_checksums_is_refused_by_task_and_file(
    file: str, act: Callable[[Path], Any], root: Path
) -> None:
    (root / "a" / CHECKSUMS).unlink()
    act(root / "a" / file)
    assert file in refusal(root)


def test_a_saved_model_has_checksums_and_saving_over_it_renews_them(root: Path, tmp_path: Path) -> None:
    model = load(root)
    for number in range(2):
        with torch.no_grad():
            next(iter(model.task_parameters("a").values())).fill_(float(number))
        model.save_pretrained(tmp_path / "saved")
        assert float(next(iter(load(tmp_path / "saved").task_parameters("a").values())).max()) == number
