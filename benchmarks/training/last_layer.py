"""Prints what computing the last layer at the rows that are read alone saves, by how many of the rows have a target.

    python -m benchmarks.training.last_layer            4 minutes on one core

A forward and backward pass of eight tasks is made in turn with and without it, in one process, on one thread; times are
of the processor, the ratio is the median over the rounds. Of each row the last tokens are targets.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import replace
from typing import Any

import torch
from peft import LoraConfig

from benchmarks.training.workloads import ModelSpec, make_workload
from peft_mux import ChunkPackingCollator, MultiTaskPeftModel
from peft_mux.data.batch import MuxBatch
from peft_mux.data.task_batch import IGNORE_INDEX

NUM_TASKS, ROUNDS = 8, 5
LAYERS = (4, 16)
SHARES = (0.02, 0.25, 0.5, 0.7)
"""Parts of each row that are targets; one token at least."""


def main() -> None:
    """Measure each depth and share, and print a line of it."""
    torch.set_num_threads(1)
    for num_layers in LAYERS:
        spec = replace(ModelSpec(), num_layers=num_layers)
        for share in SHARES:
            with_s, without_s = measure(spec, share)
            ratio = statistics.median(a / b for a, b in zip(with_s, without_s, strict=True))
            times = f"{min(with_s):6.2f} s with, {min(without_s):6.2f} s without"
            print(f"{num_layers:3} layers, {share:4.0%} of the rows read: {times}; {ratio:.3f}", flush=True)


def measure(spec: ModelSpec, share: float) -> tuple[list[float], list[float]]:
    """Return the processor seconds of passes with and without it.

    Args:
        spec: the backbone.
        share: part of each row that are targets.
    """
    model, batch = _model_and_batch(spec, share)
    _pass_s(model, batch, is_wanted=True)
    pairs = [[_pass_s(model, batch, is_wanted=is_wanted) for is_wanted in (True, False)] for _ in range(ROUNDS)]
    return [one for one, _ in pairs], [other for _, other in pairs]


def _model_and_batch(spec: ModelSpec, share: float) -> tuple[MultiTaskPeftModel, MuxBatch]:
    tasks = make_workload("nonuniform", num_tasks=NUM_TASKS, num_steps=1, vocab_size=spec.vocab_size).tasks
    configs = {task.name: LoraConfig(r=task.rank, target_modules="all-linear") for task in tasks}
    model = MultiTaskPeftModel(spec.build(), configs).train()
    rows = [{"task": task.name, **_masked(list(row["input_ids"]), share)} for task in tasks for row in task.rows]
    return model, ChunkPackingCollator()(rows)


def _masked(ids: list[int], share: float) -> dict[str, list[int]]:
    num_targets = max(round(share * len(ids)), 1)
    first = len(ids) - num_targets
    return {"input_ids": ids, "labels": [IGNORE_INDEX] * first + ids[first:]}


def _pass_s(model: MultiTaskPeftModel, batch: Any, *, is_wanted: bool) -> float:
    model.last_layer.is_wanted = is_wanted
    start = time.process_time()
    model(batch).losses.sum().backward()
    return time.process_time() - start


if __name__ == "__main__":
    main()
