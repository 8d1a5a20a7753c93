"""A task that goes wrong beside one that must not notice.

The one beside it trains as if alone, to the last bit: with `planner="interleaved"` it has passes of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from peft import LoraConfig

from peft_mux import Task
from tests.invariants.mux_lab import Run, assert_bit_identical, rows, small_task, train

HELD_OUT = rows(90, 3, 5, 9)
BREAKS_AT = 9
"""Row at which streams go wrong: in the third step of four rows."""


def good() -> Task:
    return small_task("good", data_seed=1, lora_dropout=0.2, eval_dataset=HELD_OUT, eval_steps=3)


def train_alone(folder: Path) -> Run:
    """Return the run that all others are held against."""
    return train([good()], folder, planner="interleaved")


def check_fails_alone(bad: Task, folder: Path, alone: Run, *reasons: str, **arguments: Any) -> Run:
    """Train a task that goes wrong beside one that does not; return the run."""
    return check_all_fail_alone([(bad, *reasons)], folder, alone, **arguments)


def check_all_fail_alone(bad: Sequence[tuple[Any, ...]], folder: Path, alone: Run, **arguments: Any) -> Run:
    """Train tasks that go wrong, each given with what its reason says, beside one that does not; return the run."""
    tasks = [task for task, *_ in bad]
    run = train([good(), *tasks], folder, planner="interleaved", save_strategy="steps", save_steps=2, **arguments)
    assert run.trainer.task_statuses == {"good": "succeeded", **{task.name: "failed" for task in tasks}}
    for task, *reasons in bad:
        for reason in reasons:
            assert reason in run.trainer.table[task.name].reason
        assert (folder / task.name / "adapter_model.safetensors").is_file(), "the last good adapter is kept"
    assert_bit_identical(run, alone, "good")
    return run


def bad_task(name: str = "bad", **settings: Any) -> Task:
    return small_task(name, data_seed=2, eval_dataset=HELD_OUT, **settings)


class Stream:
    """Rows until a function is asked for the next one."""

    def __init__(self, then: Callable[[], Any]) -> None:
        self.then = then

    def __iter__(self) -> Iterator[Any]:
        yield from rows(5, BREAKS_AT, 12, 12)
        yield self.then()
        yield from rows(6, 100, 12, 12)


def stream_task(stream: Any, name: str = "bad", **settings: Any) -> Task:
    options = {"train_batch_size": 4, "max_steps": 8, "learning_rate": 1e-3, **settings}
    return Task(name=name, peft_config=LoraConfig(r=4, target_modules=["q_proj"]), train_dataset=stream, **options)


def recursing() -> Any:
    return recursing()


def raising(error: BaseException) -> Callable[[], Any]:
    def fail() -> Any:
        raise error

    return fail
