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
from peft import PeftModel

from peft_mux import storage
from peft_mux.errors import CheckpointError
from peft_mux.modeling.adapters.files import ADAPTER_NAMES
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.task import Task
from tests.invariants import mux_lab as lab
from tests.invariants.mux_lab import Run

SAVING = {"save_strategy": "steps", "save_steps": 2}
CONFIG, WEIGHTS, CHECKSUMS = "adapter_config.json", "adapter_model.safetensors", "adapter_checksums.json"


def tasks() -> list[Task]:
    return [lab.small_task("a", data_seed=1, max_steps=3), lab.small_task("b", data_seed=2, rank=2, max_steps=3)]


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


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


def other_alpha(path: Path) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), "lora_alpha": 99}))


def put_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


SPOILS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "weights flipped": (WEIGHTS, flip),
    "weights gone": (WEIGHTS, Path.unlink),
    "weights a pipe": (WEIGHTS, put_pipe),
    "checksums flipped": (CHECKSUMS, flip),
    "config changed": (CONFIG, other_alpha),
    "config cut": (CONFIG, cut),
    "config gone": (CONFIG, Path.unlink),
    "checksums gone": (CHECKSUMS, Path.unlink),
}
PAIRS = list(zip(list(SPOILS)[:4], list(SPOILS)[4:], strict=True))
"""What is done to "a", and to "b" in the same run."""


def test_an_adapter_has_checksums_of_its_two_files_and_nothing_else_is_needed(root: Path) -> None:
    assert sorted(set(files(root, "a")) - {"loss.png"}) == ["README.md", CHECKSUMS, CONFIG, WEIGHTS]
    storage.verify_checksums(root / "a", ADAPTER_NAMES)
    plain = PeftModel.from_pretrained(lab.tiny_llama(), root / "a")
    ours = MultiTaskPeftModel.from_pretrained(lab.tiny_llama(), root)
    loaded = {key.replace(".default", ""): value for key, value in plain.named_parameters() if "lora_" in key}
    for key, value in ours.task_parameters("a").items():
        assert torch.equal(loaded[key], value)


@pytest.mark.parametrize("spoils", PAIRS, ids=str)
def test_resuming_repairs_the_adapters_of_ended_tasks_and_says_so(
    spoils: tuple[str, str], root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {name: files(root, name) for name in "ab"}
    for name, spoil in zip("ab", spoils, strict=True):
        file, act = SPOILS[spoil]
        act(root / name / file)
    run, said = resume(root, capsys)
    assert run.losses == {}
    assert {name: files(root, name) for name in "ab"} == before
    assert said.count("It is taken from") == 2
    for name in "ab":
        assert f'task "{name}": ' in said
        assert str(root / name / "checkpoint-3") in said


def test_resuming_repairs_an_adapter_of_other_weights_under_checksums_that_fit(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = files(root, "a")
    flip(root / "a" / WEIGHTS)
    storage.write_checksums(root / "a", ADAPTER_NAMES)
    _, said = resume(root, capsys)
    assert "does not have the weights with which the task ended" in said
    assert files(root, "a") == before


# --------------------------------------------------------------- from_pretrained


@pytest.mark.parametrize("spoil", SPOILS)
def test_loading_a_spoilt_adapter_is_refused_by_task_and_file(spoil: str, root: Path) -> None:
    file, act = SPOILS[spoil]
    act(root / "a" / file)
    if spoil in ("config gone", "checksums gone"):
        # Without a configuration it is no adapter; without checksums it is one that somebody else has written.
        wanted = ("b",) if file == CONFIG else ("a", "b")
        assert MultiTaskPeftModel.from_pretrained(lab.tiny_llama(), root).tasks == wanted
        return
    with pytest.raises(CheckpointError, match='task "a": ') as caught:
        MultiTaskPeftModel.from_pretrained(lab.tiny_llama(), root)
    assert str(root / "a") in str(caught.value)
    assert file in str(caught.value)


TORN: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "weights cut": (WEIGHTS, cut),
    "weights a pipe": (WEIGHTS, put_pipe),
    "config garbage": (CONFIG, lambda path: path.write_bytes(b"\xff{garbage")),
}


@pytest.mark.parametrize("spoil", TORN)
def test_loading_a_torn_adapter_without_checksums_is_refused_by_task_and_file(spoil: str, root: Path) -> None:
    (root / "a" / CHECKSUMS).unlink()
    file, act = TORN[spoil]
    act(root / "a" / file)
    with pytest.raises(CheckpointError, match=f'task "a": .*{file}'):
        MultiTaskPeftModel.from_pretrained(lab.tiny_llama(), root)


def test_a_saved_model_has_checksums_and_saving_over_it_renews_them(root: Path, tmp_path: Path) -> None:
    model = MultiTaskPeftModel.from_pretrained(lab.tiny_llama(), root)
    for number in range(2):
        with torch.no_grad():
            next(iter(model.task_parameters("a").values())).fill_(float(number))
        model.save_pretrained(tmp_path / "saved")
        loaded = MultiTaskPeftModel.from_pretrained(lab.tiny_llama(), tmp_path / "saved")
        assert float(next(iter(loaded.task_parameters("a").values())).max()) == number
