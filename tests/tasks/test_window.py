"""Windows of steps: as long as nothing is due, and each task's steps in them its own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peft_mux.engine.tasks.active_task import UpdateOutcome
from peft_mux.engine.work import StepResult
from peft_mux.parallel.pipeline.executor import PipelineExecutor
from peft_mux.task import TaskStatus
from peft_mux.trainer.loop import TrainingLoop, steps_until_due
from tests.trainer.parts import make_run, start_all


@pytest.mark.parametrize(
    ("arguments", "step", "last_step_s", "expected"),
    [
        ({}, 0, 0.01, 8),
        ({}, 0, 0.0, 1),
        ({}, 0, 3.0, 3),
        ({"logging_strategy": "steps", "logging_steps": 5}, 2, 0.01, 3),
        ({"logging_strategy": "steps", "logging_steps": 5, "logging_first_step": True}, 0, 0.01, 1),
        ({"save_strategy": "steps", "save_steps": 4}, 7, 0.01, 1),
    ],
    ids="nothing,unknown time,patience,log,first log,checkpoint".split(","),
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


class OneBucket(PipelineExecutor):
    """Lets one task step through a window, without a pipeline."""

    def __init__(self) -> None:
        self.stopped: list[Any] = []

    def run_window(self, works: Any, update: Any) -> list[StepResult]:
        loss, norm = {"a": torch.tensor(1.0)}, {"a": torch.tensor(2.0)}
        self.stopped = [update(step, loss, norm) for step in range(len(works))]
        return [StepResult(loss, {"a": 10}, 30) for _ in works]


def test_a_task_whose_schedule_gives_out_in_a_window_keeps_the_step_that_it_has_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, executor = make_run(tmp_path), OneBucket()
    start_all(run)
    plans = SimpleNamespace(next_works=lambda count: [None] * count, record_step=lambda *_, num_steps: None)
    parts: tuple[Any, ...] = (SimpleNamespace(executor=executor), plans, None, None, None)
    loop = TrainingLoop(run, *parts)
    gives_out = {"a": UpdateOutcome(1.0, 2.0, 0.1, rate_failure="learning_rate: the learning rate is nan")}
    monkeypatch.setattr(run.table, "update", lambda losses, norms: gives_out if losses else {})
    loop.take_window(3)
    assert executor.stopped == [{"a"}] * 3
    assert (run.table["a"].status, run.table["a"].step) == (TaskStatus.FAILED, 1)
    assert run.table["a"].reason == "learning_rate: the learning rate is nan at step 1"
    assert (run.table["b"].status, run.state.global_step) == (TaskStatus.RUNNING, 3)
