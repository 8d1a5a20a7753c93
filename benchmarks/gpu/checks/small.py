"""A small Llama and tasks for the checks of `benchmarks.gpu` that train: what the kernels meet, in little time."""

from __future__ import annotations

from typing import Any

from benchmarks.gpu.rehearsal import stand_ins
from benchmarks.gpu.roofline import Backbone
from benchmarks.gpu.settings import Settings
from benchmarks.gpu.trainers import task_batch

SMALL = Backbone(256, 2, 512, 4, 2048)
TINY = Backbone(32, 1, 48, 4, 64)
RANKS = (8, 24, 4)
"""Narrow, wide, and narrow again, so that tasks share some launches and not others."""


def small_workload(shape: Backbone, num_extra_steps: int = 0, *, longest: int | None = None) -> Any:
    """Return three tasks of other ranks and lengths, each with four steps of three rows, or more.

    Args:
        shape: the shape of the backbone, for its words.
        num_extra_steps: steps beyond four.
        longest: tokens of the longest row; by default a ninth of the vocabulary up to 120.
    """
    from benchmarks.training.workloads import random_workload

    most = longest or min(120, shape.vocab_size // 6)
    return random_workload(
        "small",
        ranks=RANKS,
        batch_sizes=[3] * len(RANKS),
        num_steps=4 + num_extra_steps,
        vocab_size=shape.vocab_size,
        length_of=lambda draw: draw.randint(3, most),
    )


def work_of(workload: Any, step: int) -> Any:
    """Return the work of a step of all tasks."""
    from peft_mux.data.collator import ChunkPackingCollator
    from peft_mux.engine.work import StepWork

    batches = [task_batch(task, step) for task in workload.tasks]
    streams = tuple(ChunkPackingCollator().micro_batches(batches, max_tokens=4096))
    return StepWork(tuple(task.name for task in workload.tasks), streams, {b.task: b.num_tokens for b in batches})


def passes_of(settings: Settings, model: Any, workload: Any, step: int) -> Any:
    """Run the passes of a step eagerly; gradients stay in the model."""
    from peft_mux.engine.executor import Executor

    with stand_ins(settings):
        return Executor(model, bf16=not settings.is_rehearsal).run(work_of(workload, step))
