"""Contender `hf`: `transformers.Trainer` and `peft.get_peft_model`, one task after the other.

Each task gets a fresh copy of the backbone. Batches are padded to their longest row. All settings of Trainer
are its defaults (fused AdamW, linear schedule, clipping at 1), but logging, saving and the progress bar are
off, and rows come in the order of the workload. Building the models is not timed.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from peft import get_peft_model
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments

from benchmarks.training.baselines import ModelFactory
from benchmarks.training.timing import Run, now_s, timed
from benchmarks.training.workloads import IGNORE_INDEX, TaskWorkload, Workload


class PadToLongest:
    """Pads the rows of a batch at their end to the longest, as transformers' collators do; counts tokens.

    Attributes:
        tokens_per_batch: number of tokens of each batch so far, padding included.
    """

    def __init__(self) -> None:
        self.tokens_per_batch: list[int] = []

    def __call__(self, rows: list[dict[str, list[int]]]) -> dict[str, torch.Tensor]:
        """Return `input_ids`, `labels` and `attention_mask`, `[B, L]` each."""
        length = max(len(row["input_ids"]) for row in rows)
        self.tokens_per_batch.append(length * len(rows))

        def padded(lists: list[list[int]], value: int) -> torch.Tensor:
            return torch.tensor([values + [value] * (length - len(values)) for values in lists])

        return {
            "input_ids": padded([row["input_ids"] for row in rows], 0),
            "labels": padded([row["labels"] for row in rows], IGNORE_INDEX),
            "attention_mask": padded([[1] * len(row["input_ids"]) for row in rows], 0),
        }


class StepClock(TrainerCallback):
    """Notes when the steps of a `train()` end, and when the first one begins."""

    def __init__(self) -> None:
        self.first_begin_s: float | None = None
        self.ends_s: list[float] = []

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Note the time of the first step only."""
        if self.first_begin_s is None:
            self.first_begin_s = now_s()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Note the time at which a step ended."""
        self.ends_s.append(now_s())

    @property
    def least_s(self) -> float:
        """The least seconds of a step but the first."""
        return min(after - before for before, after in pairwise(self.ends_s))

    @property
    def steps_s(self) -> float:
        """Seconds from the end of the first to the end of the last step; of the only step where there is one."""
        assert self.first_begin_s is not None, "train() ended without a step"
        return self.ends_s[-1] - (self.ends_s[0] if len(self.ends_s) > 1 else self.first_begin_s)


class RecordsLosses:
    """What keeps the loss of each step of a Trainer that it is put before; for the guard, not for timed runs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.losses: list[float] = []

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the trainer returns, and keep the loss."""
        result = super().compute_loss(*args, **kwargs)  # type: ignore[misc]
        self.losses.append((result[0] if isinstance(result, tuple) else result).item())
        return result


class _RecordingTrainer(RecordsLosses, Trainer):
    pass


def train_in_turn(workload: Workload, make_trainer: Callable[[TaskWorkload, str], Any], record_losses: bool) -> Run:
    """Train every task alone, one after the other, as if nothing were padded; building the models is not timed.

    Args:
        workload: the tasks and their rows.
        make_trainer: returns the trainer of a task, given a folder that it may write to.
        record_losses: whether trainers have kept the losses of their steps.
    """
    train_s = steps_s = 0.0
    losses: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for task in workload.tasks:
            clock, trainer = StepClock(), make_trainer(task, folder)
            trainer.add_callback(clock)
            start_s = now_s()
            trainer.train()
            train_s += now_s() - start_s
            steps_s += clock.steps_s
            if trainer.state.global_step != workload.num_steps:
                raise RuntimeError(f"{task.name}: {trainer.state.global_step} steps, not {workload.num_steps}")
            if record_losses:
                losses[task.name] = trainer.losses
            # A Trainer sits in reference cycles, which would keep its backbone alive next to the next one.
            del trainer
            gc.collect()
    return Run(train_s, workload.num_timed_tokens, steps_s, losses)


def run_hf_trainer(model_factory: ModelFactory, workload: Workload, record_losses: bool = False) -> Run:
    """Train every task alone, one after the other.

    Args:
        model_factory: returns a fresh backbone.
        workload: the tasks and their rows.
        record_losses: whether to keep the loss of each step.
    """
    collators: list[PadToLongest] = []

    def make(task: TaskWorkload, folder: str) -> Any:
        collators.append(PadToLongest())
        trainer = _trainer(task, workload, model_factory, collators[-1], folder, record_losses)
        trainer.remove_callback(PrinterCallback)
        return trainer

    result = train_in_turn(workload, make, record_losses)
    num_tokens = sum(sum(timed(collator.tokens_per_batch)) for collator in collators)
    return replace(result, num_processed_tokens=num_tokens)


def _trainer(
    task: TaskWorkload,
    workload: Workload,
    model_factory: ModelFactory,
    collator: PadToLongest,
    folder: str,
    record_losses: bool,
) -> Any:
    backbone = model_factory()
    torch.manual_seed(task.seed)
    model = get_peft_model(backbone, task.lora_config())
    arguments = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=task.batch_size,
        max_steps=workload.num_steps,
        learning_rate=workload.learning_rate,
        seed=task.seed,
        train_sampling_strategy="sequential",
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    trainer_class = _RecordingTrainer if record_losses else Trainer
    return trainer_class(model=model, args=arguments, train_dataset=list(task.rows), data_collator=collator)
