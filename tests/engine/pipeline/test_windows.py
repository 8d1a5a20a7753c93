"""A whole run in windows, which are not flushed between steps, is the run that is flushed, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from transformers import TrainerCallback

from peft_mux import MultiTaskTrainer, Task
from tests.engine.processes.cases import launch, values
from tests.engine.replicas import layout_cases as layouts
from tests.invariants import mux_lab as lab

STOP_AT = 18


@dataclass
class Shown:
    """What a run showed to one process.

    Attributes:
        outcomes: loss and norm of each task by its steps.
        windows: steps of each window, in order.
        statuses: final ones, with reasons.
        history: what was logged of losses, evaluations, rates and norms.
        adapters: as saved, whole.
        step: of the run.
    """

    outcomes: dict[str, list[tuple[float, float]]]
    windows: list[int]
    statuses: dict[str, tuple[str, str]]
    history: list[dict[str, float]]
    adapters: dict[str, dict[str, np.ndarray]]
    step: int


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


def run_all(rank: int, folder: Path, num_stages: int, flushes: list[str]) -> dict[str, list[Shown]]:
    """Train with each kind of flush."""
    del rank
    return {flush: run(folder, num_stages, flush) for flush in flushes}


def run(folder: Path, num_stages: int, flush: str) -> list[Shown]:
    """Train until the script stops the run, and continue in another trainer from what was saved."""
    own = folder / f"{num_stages}-{flush}"
    before, after = first_tasks(), [*(task for task in first_tasks() if task.name != "goes"), late()]
    return [_train(own, before, num_stages, flush), _train(own, after, num_stages, flush, resume=True)]


def _train(folder: Path, tasks: list[Task], num_stages: int, flush: str, *, resume: bool = False) -> Shown:
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
    outcomes, windows = _watch(trainer)
    trainer.train(resume_from_checkpoint=resume or None)
    kinds = ("/loss", "/eval_loss", "/learning_rate", "/grad_norm")
    history = [{key: value for key, value in one.items() if key.endswith(kinds)} for one in trainer.state.log_history]
    adapters = {path.parent.name: load_file(path) for path in sorted(folder.glob("*/adapter_model.safetensors"))}
    statuses = {own.name: (own.status.value, own.reason) for own in trainer.table}
    return Shown(outcomes, windows, statuses, history, adapters, trainer.state.global_step)


def _watch(trainer: MultiTaskTrainer) -> tuple[dict[str, list[tuple[float, float]]], list[int]]:
    """Note every step that is counted, and every window."""
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

    table.count, loop.take_window = counted, taken
    return outcomes, windows


@pytest.mark.distributed
@pytest.mark.parametrize(
    "num_stages", [pytest.param(2, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.nightly)]
)
def test_a_run_in_windows_is_the_run_that_is_flushed_and_the_run_of_one_process(
    num_stages: int, tmp_path: Path
) -> None:
    parts = values(launch(num_stages, run_all, tmp_path, num_stages, ["every_step", "auto"], limit_s=280))
    alone = run(tmp_path, 1, "auto")
    for part in parts:
        for flushed, window, one in zip(part["every_step"], part["auto"], alone, strict=True):
            assert not flushed.windows
            assert max(window.windows) > 2, "nothing was left unflushed"
            check_equal(window, flushed)
            check_close(window, one)
    assert [shown.windows for shown in parts[0]["auto"]] == [shown.windows for shown in parts[-1]["auto"]]
    statuses = {name: status for name, (status, _) in parts[0]["auto"][-1].statuses.items()}
    ended = dict.fromkeys(["long", "short", "steady", "late"], "succeeded")
    assert statuses == {**ended, "wild": "failed"}
    assert "at step 1" in parts[-1]["auto"][0].statuses["wild"][1], "it failed within a window"


def check_equal(found: Shown, wanted: Shown) -> None:
    assert str(found.outcomes) == str(wanted.outcomes)
    assert found.statuses == wanted.statuses
    assert str(found.history) == str(wanted.history)
    assert found.step == wanted.step
    assert found.adapters.keys() == wanted.adapters.keys()
    for name, own in wanted.adapters.items():
        assert all(np.array_equal(found.adapters[name][key], weight) for key, weight in own.items()), name


def check_close(found: Shown, wanted: Shown) -> None:
    assert found.statuses == wanted.statuses
    for name, steps in wanted.outcomes.items():
        losses, norms = zip(*steps, strict=True)
        own_losses, own_norms = zip(*found.outcomes[name], strict=True)
        assert own_losses == pytest.approx(losses, rel=1e-5, nan_ok=True), name
        assert own_norms == pytest.approx(norms, rel=1e-4, nan_ok=True), name
    for name, own in wanted.adapters.items():
        found_flat, flat = (np.concatenate([one[key].ravel() for key in own]) for one in (found.adapters[name], own))
        assert np.linalg.norm(found_flat - flat) <= 1e-4 * np.linalg.norm(flat), name
