"""Contender `mux`: peft_mux itself, called as its users call it, all of its settings at their defaults."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from typing import Any

from benchmarks.training.baselines import ModelFactory
from benchmarks.training.baselines.hf_trainer import StepClock
from benchmarks.training.timing import Run, now_s
from benchmarks.training.workloads import Workload


def run_mux(model_factory: ModelFactory, workload: Workload, record_losses: bool = False) -> Run:
    """Train all tasks at once.

    Args:
        model_factory: returns a fresh backbone.
        workload: the tasks and their rows.
        record_losses: whether to log the loss of each task at each step; timed runs log nothing, as those of `hf`.
    """
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_for(model_factory, workload, folder, record_losses)
        clock = StepClock()
        trainer.add_callback(clock)
        start_s = now_s()
        trainer.train()
        train_s = now_s() - start_s
    for task in workload.tasks:
        num_steps = trainer.task_states[task.name].global_step
        if num_steps != workload.num_steps:
            raise RuntimeError(f"{task.name}: {num_steps} steps, not {workload.num_steps}")
    losses = {task.name: _losses(trainer.task_states[task.name]) for task in workload.tasks} if record_losses else {}
    # Nothing is padded in a stream, so the tokens that are processed are the real ones.
    return Run(train_s, workload.num_timed_tokens, clock.steps_s, losses)


def trainer_for(
    model_factory: Callable[[], Any], workload: Workload, folder: str, record_losses: bool, **arguments: Any
) -> Any:
    """Return the trainer of all tasks of a workload.

    Args:
        model_factory: returns a fresh backbone, or the folder that one is loaded from.
        workload: the tasks and their rows.
        folder: the output folder, in which nothing is saved.
        record_losses: whether to log the loss of each task at each step.
        **arguments: further arguments of the run.
    """
    from peft_mux import MultiTaskTrainer

    logging = {"logging_strategy": "steps", "logging_steps": 1} if record_losses else {}
    args = quiet_arguments(folder, **{**logging, **arguments})
    return MultiTaskTrainer(model=model_factory(), tasks=workload.to_tasks(), args=args)


def quiet_arguments(folder: str, **arguments: Any) -> Any:
    """Return the arguments of a run on a CPU that logs, saves, reports and draws nothing.

    Args:
        folder: the output folder.
        **arguments: further arguments, and others in place of these.
    """
    from peft_mux import MultiTaskTrainingArguments

    quiet = {"logging_strategy": "no", "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    return MultiTaskTrainingArguments(**{"output_dir": folder, "use_cpu": True, **quiet, **arguments})


def _losses(state: Any) -> list[float]:
    """Return the logged training losses of a task."""
    return [entry["loss"] for entry in state.log_history if "loss" in entry]
