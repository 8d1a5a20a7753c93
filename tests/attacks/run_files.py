"""What the attacks on run folders share: runs that leave a folder, and readers of its files."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from peft_mux import EarlyStopping, Task
from tests.attacks import attack_lab as attacks
from tests.attacks.attack_lab import Outcome, nano_task
from tests.invariants import mux_lab as lab
from tests.runs import Killed, crash

SAVING = {"save_strategy": "steps", "save_steps": 2, "logging_strategy": "steps", "logging_steps": 1}
NUM_STEPS = 6


def two_tasks() -> list[Task]:
    """Return a task of six steps that keeps its best adapter, and one that ends after three."""
    rule = EarlyStopping(patience=5)
    long = nano_task("long", 1, eval_dataset=attacks.rows(9, 2), eval_steps=2, early_stopping=rule)
    return [long, nano_task("short", 2, max_steps=3)]


def crash_run(folder: Path) -> None:
    """Leave the folder of a run that saved after steps 2 and 4, and crashed in step 5."""
    with pytest.raises(Killed):
        attacks.train(two_tasks(), folder, at_end={5: crash}, **SAVING)


def adapter_digests(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every adapter at the root of its task's folder."""
    paths = sorted(folder.glob("*/adapter_model.safetensors"))
    return {path.parent.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def loss_log(folder: Path) -> list[tuple[Any, ...]]:
    """Return what was logged of losses, each record once and in order."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    return [
        (one["event"], one["task"], one["step"], one.get("loss"), one.get("eval_loss"))
        for one in records
        if one["event"] in ("train", "eval")
    ]


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def remove(path: Path) -> None:
    """Remove a file, a link or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def assert_told_truly(run: Outcome, folder: Path) -> None:
    """Assert that a task which is reported as succeeded has its adapter on the disk."""
    for name, status in run.statuses.items():
        if status in ("waiting", "running", "paused"):
            continue
        if status != "succeeded":
            assert "adapter" in run.reasons[name] or "save" in run.reasons[name], run.reasons[name]
            continue
        saved = load_file(folder / name / "adapter_model.safetensors")
        wanted = lab.weights(run.trainer, name)
        assert saved.keys() == wanted.keys()
        assert all(torch.equal(saved[key], wanted[key]) for key in saved), f"the adapter of {name} is an older one"
