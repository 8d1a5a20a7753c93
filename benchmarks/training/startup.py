"""Prints what begins a run of many tasks: parts of it on a backbone without weights, or all of it on one with weights.

    python -m benchmarks.training.startup --tasks 8 32 64 --layers 32            half a minute, one thread
    python -m benchmarks.training.startup --tasks 8 64 --shape qwen3-0.6b        two minutes, torch's threads
    python -m benchmarks.training.startup --steps 3 --tasks 8 --shape qwen3-0.6b       four minutes, one thread

The first has the shapes of Llama-2-7B and no weights, as in `peft-mux plan`: registering the tasks, and counting what a
pass keeps, in seconds of the processor. The second is what a user waits for who gives a loaded model, in seconds of the
clock: `MultiTaskTrainer(...)`, with the proof that packing changes nothing, and what `train()` does before its first
step. Every task has LoRA of rank 8 on all linear layers. Adapters are copies of the first one; where tasks are unlike,
each has a scaling and a seed of its own, from which its weights are drawn.

The third trains the tasks of `benchmarks.training.throughput` (non-uniform mix, two rows a step), and prints for the
trainer, the opening, each step and the end: seconds of the clock, of the program, and of the system on its behalf, and
by how much memory the process grows. Memory that is touched for the first time costs seconds of the system: several
times as many on virtual machines whose host supplies memory only then.
"""

from __future__ import annotations

import argparse
import copy
import resource
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import psutil
from transformers import TrainerCallback

from benchmarks.training.shapes import SHAPES
from benchmarks.training.workloads import ModelSpec


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table, two lines for each number of tasks."""
    parser = argparse.ArgumentParser(description="What begins a run of many tasks")
    parser.add_argument("--tasks", type=int, nargs="+", default=[8, 32, 64], help="numbers of tasks")
    parser.add_argument("--layers", type=int, help="layers of the backbone; by default 32, or all of the shape")
    parser.add_argument("--shape", choices=SHAPES, help="begin whole runs on a published shape, with random weights")
    parser.add_argument("--steps", type=int, help="train so many steps on the shape, and print what each part takes")
    options = parser.parse_args(arguments)
    if options.steps:
        if not options.shape:
            parser.error("--steps needs --shape: one of the published shapes")
        for number in options.tasks:
            print_parts_of_training(number, options)
        return
    backbone = ModelSpec.of_shape(options.shape, options.layers).build() if options.shape else None
    titles = (
        ("registered in s", "one more in s", "pass counted in s") if backbone is None else ("trainer in s", "opened")
    )
    print(f"{'tasks':>5} {'':>6}" + "".join(f"{title:>19}" for title in titles))
    for number in options.tasks:
        for kind in ("alike", "unlike"):
            configs = configs_of(number + (backbone is None), are_alike=kind == "alike")
            if backbone is None:
                seconds = measure_parts(configs, options.layers or 32)
            else:
                seconds = measure_run(configs, backbone, are_alike=kind == "alike")
            print(f"{number:>5} {kind:>6}" + "".join(f"{one:>19.2f}" for one in seconds), flush=True)


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
    from peft_mux.planning.profiling.memory import count_activation_bytes_per_token

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
    from peft_mux import MultiTaskTrainer, MultiTaskTrainingArguments, Task

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
        args = MultiTaskTrainingArguments(
            output_dir=folder, save_strategy="no", report_to="none", disable_tqdm=True, use_cpu=True
        )
        trainer, made_s = timed(lambda: MultiTaskTrainer(model, args, tasks), time.perf_counter)
        _, opened_s = timed(lambda: trainer._loop.opening.open(None), time.perf_counter)
    return made_s, opened_s


class _PartClock(TrainerCallback):
    """Prints what each part of a run takes, from the end of the one before."""

    def __init__(self) -> None:
        """Begin the first part."""
        self._before = self._now()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End what came before the first step."""
        if state.global_step == 0:
            self.end("opened")

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """End a step."""
        self.end(f"step {state.global_step}")

    def end(self, part: str) -> None:
        """Print a line about the part that ends here."""
        now = self._now()
        wall_s, user_s, system_s, size_bytes = (one - other for one, other in zip(now, self._before, strict=True))
        print(f"{part:<8}{wall_s:>9.2f}{user_s:>9.2f}{system_s:>9.2f}{size_bytes / 2**30:>+9.2f}", flush=True)
        self._before = now

    @staticmethod
    def _now() -> tuple[float, float, float, float]:
        used = resource.getrusage(resource.RUSAGE_SELF)
        return time.perf_counter(), used.ru_utime, used.ru_stime, psutil.Process().memory_info().rss


def print_parts_of_training(num_tasks: int, options: argparse.Namespace) -> None:
    """Train the tasks of the throughput benchmark on one thread, and print what each part takes."""
    import torch

    from benchmarks.training.mux import trainer_for
    from benchmarks.training.workloads import Case

    torch.set_num_threads(1)
    spec = ModelSpec.of_shape(options.shape, options.layers)
    workload = Case("nonuniform", num_tasks, options.steps, "full", spec, 2).workload()
    backbone = spec.build()
    print(f"{num_tasks} tasks, {options.shape}\n{'':8}{'wall s':>9}{'user s':>9}{'system s':>9}{'GiB':>9}")
    with tempfile.TemporaryDirectory() as folder:
        clock = _PartClock()
        trainer = trainer_for(lambda: backbone, workload, folder, False)
        clock.end("trainer")
        trainer.add_callback(clock)
        trainer.train()
        clock.end("end")


def timed(function: Callable[[], Any], clock: Callable[[], float] = time.process_time) -> tuple[Any, float]:
    """Return what a call gives, and its seconds; by default of the processor, which others on it add little to."""
    start = clock()
    value = function()
    return value, clock() - start


if __name__ == "__main__":
    main()
