"""Prints what a training step of peft_mux is made of: passes with and without adapters, updates, and the first step.

python -m benchmarks.training.step_parts --mix nonuniform            about 1 minute on 2 cores
"""

from __future__ import annotations

import argparse
import resource
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.training.mux import trainer_for
from benchmarks.training.workloads import MIXES, Case, ModelSpec


def main() -> None:
    """Build the benchmark's trainer, take the same step again and again, and print the least time of each part."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mix", choices=MIXES, default="nonuniform", help="kind of workload")
    parser.add_argument("--tasks", type=int, default=8, help="number of tasks")
    parser.add_argument("--repeats", type=int, default=8, help="times that the step is taken")
    parser.add_argument("--threads", type=int, help="threads of torch; default is torch's own number")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    case = Case(options.mix, options.tasks, 2, "full", ModelSpec())
    with tempfile.TemporaryDirectory() as folder:
        trainer = trainer_for(case.model.build, case.workload(), folder, False)
        trainer._loop.opening.open(None)
        parts: dict[str, list[float]] = {}
        for _ in range(options.repeats):
            result = timed("forward and backward", parts, lambda: run(trainer))
            timed("updates of all tasks", parts, lambda result=result: trainer.table.apply(result))
            timed("the same without adapters", parts, lambda: run_without_adapters(trainer))
            for task_run in trainer.table.running:
                task_run.step = 0  # the same batch again
    print(f"\n{options.tasks} tasks, {options.mix}, {torch.get_num_threads()} threads; seconds: first, then least")
    for name, seconds in parts.items():
        print(f"  {name:32s} {seconds[0]:7.3f} {min(seconds):7.3f}")
    with_s, without_s = (min(parts[name]) for name in ("forward and backward", "the same without adapters"))
    print(f"  adapters make the passes {with_s / without_s:.2f} times as long")


def timed(name: str, parts: dict[str, list[float]], act: Callable[[], Any]) -> Any:
    """Run something and keep its seconds; of the first time, print how many pages of memory it touched first."""
    faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    start_s = time.perf_counter()
    result = act()
    parts.setdefault(name, []).append(time.perf_counter() - start_s)
    if len(parts[name]) == 1:
        print(f"{name}: {resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults:,} page faults the first time")
    return result


def run(trainer: Any) -> Any:
    """Run the passes of one step."""
    return trainer._placement.executor.run(trainer._plans.next_works()[0])


def run_without_adapters(trainer: Any) -> None:
    """Run the same passes through the frozen backbone alone, down to the gradient of the embeddings."""
    model = trainer.model
    embeddings = model.backbone.get_input_embeddings()
    hook = embeddings.register_forward_hook(lambda module, inputs, output: output.detach().requires_grad_())
    try:
        with model.without_adapters():
            for micro_batch in trainer._plans.next_works()[0].micro_batches:
                model(micro_batch).losses.sum().backward()
    finally:
        hook.remove()


if __name__ == "__main__":
    main()
