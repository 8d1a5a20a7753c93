"""How a run ends in the middle: what tests of resuming share."""

from __future__ import annotations

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


class Killed(Exception):
    """Ends a run in the middle, with nothing saved on the way out."""


def crash(trainer: Any) -> None:
    """End the run; for a recorder to call at the end of a step."""
    del trainer
    raise Killed
