"""Runs that end in the middle, go wrong, or leave files: what tests of training and of resuming share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel

from peft_mux import MultiTaskTrainer, Task
from tests.invariants.mux_lab import Recorder, Run, make_trainer, small_task, tiny_llama

SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 100}
"""Saves where a run is interrupted and where it ends."""


def small_tasks(*names: str, **settings: Any) -> list[Task]:
    """Return small tasks of unlike rows."""
    return [small_task(name, data_seed=seed, **settings) for seed, name in enumerate(names, start=1)]


# ------------------------------------------------------------- ends and faults


def stop(trainer: MultiTaskTrainer) -> None:
    """Let a run end at this step, with everything saved."""
    trainer.control.should_training_stop = True


def stops_after(step: int) -> Recorder:
    """Return a recorder that ends a run after a step."""
    return Recorder(at_end={step: stop})


class Killed(Exception):
    """Ends a run in the middle, with nothing saved on the way out."""


def crash(trainer: MultiTaskTrainer) -> None:
    """End the run; for a recorder to call at the end of a step."""
    del trainer
    raise Killed


def train_until_crash(tasks: list[Task], folder: Path, recorder: Recorder, **arguments: Any) -> MultiTaskTrainer:
    """Train tasks in a run that its recorder crashes, and return the trainer."""
    trainer = make_trainer(tasks, folder, recorder=recorder, **arguments)
    try:
        trainer.train()
    except Killed:
        return trainer
    raise AssertionError("the run has not crashed")


def poison(name: str) -> Callable[[MultiTaskTrainer], None]:
    """Return what makes a task fail at its next step: a weight of it becomes NaN."""

    @torch.no_grad()
    def act(trainer: MultiTaskTrainer) -> None:
        next(iter(trainer.model.task_parameters(name).values())).fill_(float("nan"))

    return act


# ------------------------------------------------------------- what runs leave


def assert_equal_weights(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], what: str = "") -> None:
    """Assert that two tasks have the same weights, to the bit."""
    assert found.keys() == wanted.keys(), what
    assert [key for key, weight in wanted.items() if not torch.equal(found[key], weight)] == [], what


def assert_ended_with_the_same_weights(run: Run, whole: Run, *names: str) -> None:
    """Assert that tasks have the same weights in two runs, to the bit."""
    for name in names:
        assert_equal_weights(run.weights(name), whole.weights(name), name)


def weights_in_plain_peft(folder: Path) -> dict[str, torch.Tensor]:
    """Return the weights that PEFT alone reads from the folder of a LoRA adapter."""
    model = PeftModel.from_pretrained(tiny_llama(), folder)
    return {key.replace(".default", ""): value for key, value in model.named_parameters() if "lora_" in key}


def files_in(folder: Path) -> dict[str, bytes]:
    """Return all files below a folder, by their path in it."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def folder_of(run: Run) -> Path:
    """Return the folder of a run."""
    return Path(run.trainer.args.output_dir or "")
