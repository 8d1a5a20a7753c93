"""Runs that end in the middle, go wrong, or leave files: what tests of training and of resuming share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftConfig, PeftModel
from transformers import TrainerCallback

from peft_mux import MultiTaskTrainer, MultiTaskTrainingArguments, Task
from tests.invariants.mux_lab import Recorder, Run, make_trainer, small_task, tiny_llama

SAVING: dict[str, Any] = {"save_strategy": "steps", "save_steps": 100}
"""Saves where a run is interrupted and where it ends."""


LORA = LoraConfig(r=4, target_modules="all-linear")


def task_of(name: str, rows: Any, config: PeftConfig = LORA, **settings: Any) -> Task:
    """Return a task of given rows, which learns fast."""
    options = {"train_batch_size": 4, "learning_rate": 3e-3, "max_steps": 8, "seed": 1, **settings}
    return Task(name=name, peft_config=config, train_dataset=rows, **options)


def small_tasks(*names: str, **settings: Any) -> list[Task]:
    """Return small tasks of unlike rows."""
    return [small_task(name, data_seed=seed, **settings) for seed, name in enumerate(names, start=1)]


def trainer_of(
    folder: Path, tasks: list[Task], *, model: Any = None, tokenizer: Any = None, **arguments: Any
) -> MultiTaskTrainer:
    """Return a trainer with the arguments that a run has by default, on the CPU and without trackers."""
    options = {"output_dir": str(folder), "use_cpu": True, "report_to": "none", **arguments}
    args = MultiTaskTrainingArguments(**options)
    return MultiTaskTrainer(model or tiny_llama(), args, tasks, processing_class=tokenizer)


# ------------------------------------------------------------- ends and faults


def stop(trainer: MultiTaskTrainer) -> None:
    """Let a run end at this step, with everything saved."""
    trainer.control.should_training_stop = True


def stops_after(step: int) -> Recorder:
    """Return a recorder that ends a run after a step."""
    return Recorder(at_end={step: stop})


class Acts(TrainerCallback):
    """Does something at an event, at one step or at each.

    Args:
        act: gets the facts of the event, by name.
        event: name of the method.
        step: of the task or of the run, whichever has this callback.
    """

    def __init__(self, act: Callable[..., Any], *, event: str = "on_step_end", step: int | None = None) -> None:
        def hear(args: Any, state: Any, control: Any, **facts: Any) -> Any:
            return act(args=args, state=state, control=control, **facts) if step in (None, state.global_step) else None

        setattr(self, event, hear)


def hearing(event: str) -> Callable[..., Any]:
    """Return a method of a callback that gives all that it gets to the method `hear`, with the name of the event."""

    def method(self: Any, args: Any, state: Any, control: Any, **facts: Any) -> Any:
        return self.hear(event, args, state, control, facts)

    return method


def raising(error: BaseException) -> Callable[..., Any]:
    """Return a function that raises an error, whatever it is given."""

    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


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
