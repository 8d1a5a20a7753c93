"""Prints what stopping the backward at each task's lowest adapter saves: eight tasks, some on the upper layers alone.

    python -m benchmarks.training.depth            1 minute on one core

A forward and backward pass of all tasks is made in turn with and without the stop, in one process, on one thread; times
are of the processor, the ratio is the median over the rounds. Tasks whose adapters are on the upper half of the layers
are the first ones, or every other one.
"""

from __future__ import annotations

import statistics
import time
from typing import Any
from unittest import mock

import torch

from benchmarks.training.workloads import ModelSpec, TaskWorkload, make_workload
from peft_mux import ChunkPackingCollator, MultiTaskPeftModel
from peft_mux.modeling.stream import Stream

NUM_TASKS, ROUNDS = 8, 5
LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
PLACES = {"none": (), "first four": range(4), "every other": range(1, 8, 2), "all but the last": range(7)}


def main() -> None:
    """Measure each choice of tasks on the upper half, and print a line of it."""
    torch.set_num_threads(1)
    spec = ModelSpec()
    tasks = make_workload("nonuniform", num_tasks=NUM_TASKS, num_steps=1, vocab_size=spec.vocab_size).tasks
    for name, upper in PLACES.items():
        with_s, without_s = measure(spec, tasks, set(upper))
        ratio = statistics.median(a / b for a, b in zip(with_s, without_s, strict=True))
        print(f"on the upper half: {name:18} {min(with_s):6.2f} s with, {min(without_s):6.2f} s without; {ratio:.3f}")


def measure(spec: ModelSpec, tasks: tuple[TaskWorkload, ...], upper: set[int]) -> tuple[list[float], list[float]]:
    """Return the processor seconds of passes with and without the stop.

    Args:
        spec: the backbone.
        tasks: the tasks of a pass.
        upper: numbers of the tasks whose adapters are on the upper half of the layers.
    """
    layers = list(range(spec.num_layers // 2, spec.num_layers))
    configs = {task.name: _config(task, layers if number in upper else None) for number, task in enumerate(tasks)}
    model = MultiTaskPeftModel(spec.build(), configs, verify=False).train()
    batch = ChunkPackingCollator()([{"task": task.name, **row} for task in tasks for row in task.rows])
    _pass_s(model, batch)
    with_s, without_s = [], []
    for _ in range(ROUNDS):
        with_s.append(_pass_s(model, batch))
        with mock.patch.object(Stream, "reset_adapter_tracking", return_value=None):
            without_s.append(_pass_s(model, batch))
    return with_s, without_s


def _config(task: TaskWorkload, layers: list[int] | None) -> Any:
    from peft import LoraConfig

    return LoraConfig(r=task.rank, target_modules=LINEAR, layers_to_transform=layers)


def _pass_s(model: MultiTaskPeftModel, batch: Any) -> float:
    start = time.process_time()
    model(batch).losses.sum().backward()
    return time.process_time() - start


if __name__ == "__main__":
    main()
