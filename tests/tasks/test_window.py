"""Windows of steps: as long as nothing is due, and each task's steps in them its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from peft_mux.trainer.loop import steps_until_due
from tests.trainer.parts import make_run


@pytest.mark.parametrize(
    ("arguments", "step", "last_step_s", "expected"),
    [
        ({}, 0, 0.01, 8),
        ({}, 0, 0.0, 1),
        ({}, 0, 3.0, 3),
        ({}, 0, 60.0, 1),
        ({"logging_strategy": "steps", "logging_steps": 5}, 2, 0.01, 3),
        ({"logging_strategy": "steps", "logging_steps": 5}, 5, 0.01, 5),
        ({"logging_strategy": "steps", "logging_steps": 5, "logging_first_step": True}, 0, 0.01, 1),
        ({"save_strategy": "steps", "save_steps": 4}, 7, 0.01, 1),
    ],
    ids="nothing,unknown time,patience,slow,log,after a log,first log,checkpoint".split(","),
)
def test_a_window_ends_where_the_run_has_something_to_do(
    arguments: dict[str, Any], step: int, last_step_s: float, expected: int, tmp_path: Path
) -> None:
    run = make_run(tmp_path, **arguments)
    assert steps_until_due(list(run.table), run.args, step, last_step_s=last_step_s) == expected


def test_a_window_ends_where_a_task_is_evaluated_saved_or_over(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    one, other = run.table

    def window() -> int:
        return steps_until_due([one, other], run.args, 0, last_step_s=0.01)

    assert (one.num_steps, window()) == (8, 8)
    other.step = 5
    assert window() == 3, "the other one ends"
    object.__setattr__(one.hyper, "save_steps", 2)
    assert window() == 2
    object.__setattr__(other.hyper, "eval_steps", 6)
    assert window() == 2, "there are no rows to evaluate"
    other.eval_data = [[1]]
    assert window() == 1
    object.__setattr__(other.hyper, "eval_steps", -1)
    assert window() == 1, f"after {other.loader.steps_per_epoch} steps"
