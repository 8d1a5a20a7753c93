"""Prints what begins a run of many tasks: registering them on a backbone, and counting what a pass keeps.

    python -m benchmarks.training.startup --tasks 8 32 64 --layers 32         half a minute, one thread

The backbone has the shapes of Llama-2-7B and no weights, as in `peft-mux plan`; a run does the same once more on the
loaded weights. Every task has LoRA with dropout on all linear layers: of rank 8 where tasks are alike, so that adapters
are copies of the first one's, else each of a scaling of its own, so that PEFT injects them all.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from typing import Any


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table, one line for each number of tasks."""
    parser = argparse.ArgumentParser(description="What begins a run of many tasks")
    parser.add_argument("--tasks", type=int, nargs="+", default=[8, 32, 64], help="numbers of tasks")
    parser.add_argument("--layers", type=int, default=32, help="layers of the backbone")
    options = parser.parse_args(arguments)
    print(f"{'tasks':>5} {'':>6} {'registered in s':>16} {'one more in s':>14} {'pass counted in s':>18}")
    for number in options.tasks:
        for kind in ("alike", "unlike"):
            seconds = measure(number, options.layers, are_alike=kind == "alike")
            print(f"{number:>5} {kind:>6} " + "{:>16.2f} {:>14.2f} {:>18.2f}".format(*seconds))


def measure(num_tasks: int, num_layers: int, *, are_alike: bool) -> tuple[float, float, float]:
    """Return seconds of registering all tasks, one more, and of counting the bytes that a pass keeps."""
    import torch
    from peft import LoraConfig
    from transformers import LlamaConfig, LlamaForCausalLM

    from peft_mux.modeling.model import MultiTaskPeftModel
    from peft_mux.profiling.memory import count_activation_bytes_per_token

    torch.set_num_threads(1)
    with torch.device("meta"):
        backbone = LlamaForCausalLM(LlamaConfig(num_hidden_layers=num_layers))
    configs = {
        f"task-{number}": LoraConfig(
            r=8, lora_alpha=8 if are_alike else 8 + number, lora_dropout=0.05, target_modules="all-linear"
        )
        for number in range(num_tasks + 1)
    }
    last = configs.popitem()
    model, registered_s = timed(lambda: MultiTaskPeftModel(backbone, configs, verify=False))
    _, one_more_s = timed(lambda: model.register_tasks(dict([last])))
    _, counted_s = timed(lambda: count_activation_bytes_per_token(model, [100] * max(32, num_tasks)))
    return registered_s, one_more_s, counted_s


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """Return what a call gives, and its seconds of the processor, which others that share the machine add little to."""
    start = time.process_time()
    value = function()
    return value, time.process_time() - start


if __name__ == "__main__":
    main()
