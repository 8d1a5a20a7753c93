"""A small Llama and tasks for the checks of `benchmarks.gpu` that train: what the kernels meet, in little time."""

from __future__ import annotations

import random
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
    from benchmarks.training.workloads import IGNORE_INDEX, TaskWorkload, Workload

    num_steps, most = 4 + num_extra_steps, longest or min(120, shape.vocab_size // 6)
    tasks = []
    for index, rank in enumerate(RANKS):
        draw = random.Random(f"small-{index}")
        rows = []
        for _ in range(3 * num_steps):
            ids = draw.choices(range(1, shape.vocab_size), k=draw.randint(3, most))
            rows.append({"input_ids": ids, "labels": [IGNORE_INDEX, *ids[1:]]})
        tasks.append(TaskWorkload(f"task-{index}", "random", rank, 100 + index, 3, tuple(rows)))
    return Workload("small", tuple(tasks), num_steps, "full", "random rows", learning_rate=1e-3)


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
