"""Prints what begins a run of many tasks: parts of it on a backbone without weights, or all of it on one with weights.

    python -m benchmarks.training.startup --tasks 8 32 64 --layers 32            half a minute, one thread
    python -m benchmarks.training.startup --tasks 8 64 --shape qwen3-0.6b        two minutes, torch's threads

The first has the shapes of Llama-2-7B and no weights, as in `peft-mux plan`: registering the tasks, and counting what a
pass keeps, in seconds of the processor. The second is what a user waits for who gives a loaded model, in seconds of the
clock: `MultiTaskTrainer(...)`, with the proof that packing changes nothing, and what `train()` does before its first
step. Every task has LoRA of rank 8 on all linear layers. Adapters are copies of the first one; where tasks are unlike,
each has a scaling and a seed of its own, from which its weights are drawn.
"""

from __future__ import annotations

import argparse
import copy
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.harness import Table, timed
from benchmarks.training.mux import quiet_arguments
from benchmarks.training.shapes import SHAPES
from benchmarks.training.workloads import ModelSpec


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table, two lines for each number of tasks."""
    parser = argparse.ArgumentParser(description="What begins a run of many tasks")
    parser.add_argument("--tasks", type=int, nargs="+", default=[8, 32, 64], help="numbers of tasks")
    parser.add_argument("--layers", type=int, help="layers of the backbone; by default 32, or all of the shape")
    parser.add_argument("--shape", choices=SHAPES, help="begin whole runs on a published shape, with random weights")
    options = parser.parse_args(arguments)
    backbone = ModelSpec.of_shape(options.shape, options.layers).build() if options.shape else None
    titles = ("registered", "one more", "pass counted") if backbone is None else ("trainer", "opened")
    table = Table("tasks:>5", "adapters:>8", *(f"{title} in s:>17.2f" for title in titles))
    for number in options.tasks:
        for kind in ("alike", "unlike"):
            configs = configs_of(number + (backbone is None), are_alike=kind == "alike")
            if backbone is None:
                seconds = measure_parts(configs, options.layers or 32)
            else:
                seconds = measure_run(configs, backbone, are_alike=kind == "alike")
            table.row(number, kind, *seconds)


def configs_of(num_tasks: int, *, are_alike: bool) -> dict[str, Any]:
    """Return each task's `LoraConfig`, by name."""
    from peft import LoraConfig

    return {
        f"task-{number}": LoraConfig(
            r=8, lora_alpha=8 if are_alike else 8 + number, lora_dropout=0.05, target_modules="all-linear"
        )
        for number in range(num_tasks)
    }


def measure_parts(configs: dict[str, Any], num_layers: int) -> tuple[float, ...]:
    """Return seconds of registering all tasks but one, that one, and of counting the bytes that a pass keeps."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from peft_mux.modeling.model import MultiTaskPeftModel
    from peft_mux.planning.profiling.activation_bytes import count_activation_bytes_per_token

    torch.set_num_threads(1)
    with torch.device("meta"):
        backbone = LlamaForCausalLM(LlamaConfig(num_hidden_layers=num_layers))
    last = configs.popitem()
    lengths = [100] * max(32, len(configs))
    model, registered_s = timed(lambda: MultiTaskPeftModel(backbone, configs, verify=False))
    _, one_more_s = timed(lambda: model.register_tasks(dict([last])))
    _, counted_s = timed(lambda: count_activation_bytes_per_token(model, lengths))
    return registered_s, one_more_s, counted_s


def measure_run(configs: dict[str, Any], backbone: Any, *, are_alike: bool) -> tuple[float, ...]:
    """Return seconds of making the trainer of all tasks, and of what lies before its first step."""
    from peft_mux import MultiTaskTrainer, Task

    rows = [{"input_ids": list(range(1, 65))}, {"input_ids": list(range(1, 49))}]
    tasks = [
        Task(
            name=name,
            peft_config=config,
            train_dataset=rows,
            train_batch_size=2,
            max_steps=2,
            seed=42 if are_alike else number,
        )
        for number, (name, config) in enumerate(configs.items())
    ]
    model = copy.deepcopy(backbone)
    with tempfile.TemporaryDirectory() as folder:
        args = quiet_arguments(folder)
        trainer, made_s = timed(lambda: MultiTaskTrainer(model, args, tasks), time.perf_counter)
        _, opened_s = timed(lambda: trainer._opening.open(None), time.perf_counter)
    return made_s, opened_s


if __name__ == "__main__":
    main()
