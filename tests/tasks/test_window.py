"""Windows of steps: as long as nothing is due, and each task's steps in them its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from peft_mux.engine.tasks.task_run import Outcome, WindowSteps, steps_until_due
from peft_mux.engine.work import StepResult
from peft_mux.task import TaskStatus
from tests.trainer.parts import make_run, start_all


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
    assert steps_until_due(run.table, run.args, step, last_step_s=last_step_s) == expected


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


def numbers(**values: float) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value) for name, value in values.items()}


def test_a_task_that_must_not_step_takes_no_step_until_the_window_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path)
    start_all(run)
    asked: list[list[str]] = []

    def update(losses: dict[str, torch.Tensor], norms: list[torch.Tensor]) -> dict[str, Outcome]:
        asked.append(list(losses))
        assert len(losses) == len(norms)
        return {
            name: Outcome(loss.item(), norm.item(), "" if loss.isfinite() else "non_finite: loss is nan")
            for (name, loss), norm in zip(losses.items(), norms, strict=True)
        }

    monkeypatch.setattr(run.table, "update", update)
    steps = WindowSteps(run.table, 3)
    assert steps.update(0, numbers(a=1.0), numbers(a=2.0)) == set()
    assert steps.update(0, numbers(b=1.0), numbers(b=2.0)) == set()
    assert steps.update(1, numbers(a=float("nan")), numbers(a=2.0)) == {"a"}
    assert steps.update(2, numbers(a=1.0), numbers(a=2.0)) == {"a"}, "a finite loss does not bring it back"
    assert steps.update(1, numbers(b=3.0), numbers(b=4.0)) == {"a"}
    assert steps.update(2, numbers(b=5.0), numbers(b=6.0)) == {"a"}
    assert asked == [["a"], ["b"], ["a"], [], ["b"], ["b"]]
    assert run.table["b"].step == 0, "nothing is counted within the window"
    for step in range(3):
        steps.count(step, StepResult(numbers(a=0.0, b=0.0), {"a": 10, "b": 20}, 30))
    assert (run.table["a"].status, run.table["a"].step) == (TaskStatus.FAILED, 1)
    assert run.table["a"].reason == "non_finite: loss is nan at step 1"
    assert (run.table["b"].status, run.table["b"].step, run.table["b"].num_tokens) == (TaskStatus.RUNNING, 3, 60)
    assert (run.table["b"].last_loss, run.table["b"].last_gradient_norm) == (5.0, 6.0)


def test_a_task_whose_schedule_gives_out_keeps_the_step_that_it_has_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path)
    start_all(run)
    found = {"a": Outcome(1.0, 2.0, rate_failure="learning_rate: the learning rate is nan")}
    monkeypatch.setattr(run.table, "update", lambda losses, norms: found if losses else {})
    steps = WindowSteps(run.table, 2)
    assert steps.update(0, numbers(a=1.0), numbers(a=2.0)) == {"a"}
    steps.update(1, numbers(a=1.0), numbers(a=2.0))
    for step in range(2):
        steps.count(step, StepResult(numbers(a=0.0), {"a": 10}, 30))
    assert (run.table["a"].step, run.table["a"].reason) == (1, "learning_rate: the learning rate is nan at step 1")
