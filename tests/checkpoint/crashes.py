"""What tests of resuming after a crash train, and how they spoil files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from peft_mux.task import Task
from tests.invariants import mux_lab as lab

SAVING = {"save_strategy": "steps", "save_steps": 2}


def crashed_tasks(**settings: Any) -> list[Task]:
    """Return the tasks of the fixture `crashed`."""
    return [
        lab.small_task("a", data_seed=1, lora_dropout=0.1, **{"max_steps": 7, **settings}),
        lab.small_task("b", data_seed=2, length=9, rank=2, max_steps=7),
    ]


def flip(path: Path) -> None:
    """Change one bit in the middle of a file."""
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def truncate(path: Path) -> None:
    """Leave the first half of a file."""
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
