"""A whole run in windows, which are not flushed between steps, is the run that is flushed, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from peft_mux import Task
from tests.engine.processes.cases import launch, values
from tests.invariants import mux_lab as lab
from tests.parallel.replicas import layout_cases as layouts

STOP_AT = 18


class Script(TrainerCallback):
    """Lets tasks come and go when losses are logged, and stops the run; gets no events of single steps."""

    trainer: Any = None

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Do what is due at this step."""
        if state.global_step == 6:
            self.trainer.register_tasks([late()])
        if state.global_step == 12:
            self.trainer.remove_task("goes", save=False)
        control.should_training_stop = state.global_step == STOP_AT


def late() -> Task:
    """Return a task that comes while others train."""
    return lab.small_task("late", data_seed=9, rank=4, length=11, max_steps=14, max_grad_norm=0.0)


def first_tasks() -> list[Task]:
    """Return tasks of unequal runs: one is evaluated, one fails, one is to go, one clips always and one never."""
    return [
        lab.small_task(
            "long",
            data_seed=1,
            rank=8,
            length=23,
            lora_dropout=0.1,
            max_steps=25,
            max_grad_norm=0.02,
            eval_dataset=lab.rows(11, 3, 9, 9),
            eval_steps=5,
        ),
        lab.small_task("short", data_seed=2, length=14, max_steps=7, max_grad_norm=0.0, train_batch_size=7),
        lab.small_task("steady", data_seed=5, rank=2, length=12, max_steps=24),
        lab.small_task("wild", data_seed=3, length=9, max_steps=21, optim="sgd", learning_rate=1e30, weight_decay=1.0),
        lab.small_task("goes", data_seed=4, length=16, max_steps=21, weight_decay=0.1, save_steps=3),
    ]


def run_both(rank: int, folder: Path, num_stages: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Train with a flush after every step, and in windows."""
    del rank
    return run(folder, num_stages, "every_step"), run(folder, num_stages, "auto")


def run(folder: Path, num_stages: int, flush: str) -> list[dict[str, Any]]:
    """Train until the script stops the run, and continue in another trainer from what was saved."""
    before, after = first_tasks(), [*(task for task in first_tasks() if task.name != "goes"), late()]
    return [train(folder / flush, tasks, num_stages, flush, resume=tasks is after) for tasks in (before, after)]


def train(folder: Path, tasks: list[Task], num_stages: int, flush: str, *, resume: bool) -> dict[str, Any]:
    """Return all that a run shows to one process; `windows` are the steps of each."""
    script = Script()
    trainer = lab.make_trainer(
        tasks,
        folder,
        model=layouts.backbone("llama"),
        max_tokens_per_micro_batch=64,
        ddp_timeout=60,
        planner="interleaved",
        pipeline_parallel_size=num_stages,
        pipeline_flush=flush,
        logging_strategy="steps",
        logging_steps=6,
        save_strategy="steps",
        save_steps=10,
    )
    trainer.add_callback(script)
    script.trainer = trainer
    outcomes: dict[str, list[tuple[float, float]]] = {}
    windows: list[int] = []
    table, loop = trainer.table, trainer._loop
    count, take = table.count, loop.take_window

    def counted(result: Any, found: Any) -> None:
        for name, one in found.items():
            outcomes.setdefault(name, []).append((one.loss, one.norm))
        count(result, found)

    def taken(num_steps: int) -> None:
        windows.append(num_steps)
        take(num_steps)

    table.count, loop.take_window = counted, taken  # type: ignore[method-assign]
    trainer.train(resume_from_checkpoint=resume or None)
    kinds = ("/loss", "/eval_loss", "/learning_rate", "/grad_norm")
    return {
        "windows": windows,
        "outcomes": str(outcomes),  # of NaN, too, which is unequal to itself
        "statuses": {own.name: (own.status.value, own.reason) for own in trainer.table},
        "history": str([{key: one[key] for key in one if key.endswith(kinds)} for one in trainer.state.log_history]),
        "adapters": {path.parent.name: path.read_bytes() for path in folder.glob("*/adapter_model.safetensors")},
        "step": trainer.state.global_step,
    }


@pytest.mark.distributed
@pytest.mark.parametrize(
    "num_stages", [pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.nightly)]
)
def test_a_run_in_windows_is_the_run_that_is_flushed_bit_for_bit(num_stages: int, tmp_path: Path) -> None:
    parts = values(launch(num_stages, run_both, tmp_path, num_stages, limit_s=280))
    for flushed_runs, window_runs in parts:
        for flushed, found in zip(flushed_runs, window_runs, strict=True):
            assert not flushed.pop("windows")
            assert max(found["windows"]) > 2, "nothing was left unflushed"
            assert {key: found[key] for key in flushed} == flushed
    last = parts[-1][1]
    assert [one["windows"] for one in parts[0][1]] == [one["windows"] for one in last]
    statuses = {name: status for name, (status, _) in last[-1]["statuses"].items()}
    ended = dict.fromkeys(["long", "short", "steady", "late"], "succeeded")
    assert statuses == {**ended, "wild": "failed"}
    assert "at step 1" in last[0]["statuses"]["wild"][1], "it failed within a window"
