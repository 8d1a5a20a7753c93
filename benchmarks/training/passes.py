"""A pass of eight tasks with and without parts of the package, by turns in one process: what each costs or saves.

    python -m benchmarks.training.passes                     3 minutes on one core
    python -m benchmarks.training.passes --shape qwen3-0.6b --only memory

    adapters   all adapters, and the frozen backbone alone, down to the gradient of the embeddings; by mix
    memory     memory that is freed stays in the process, or goes back to the system; also page faults of a pass
    depth      the backward stops at each task's lowest adapter, or goes down to the first layer; by which tasks have
               adapters on the upper half of the layers alone

A pass is forward and backward of all tasks. Seconds are of the processor, on one thread; the ratio is the median over
the rounds of with over without.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from peft import LoraConfig

from benchmarks.harness import in_turns, ratio
from benchmarks.training.shapes import SHAPES
from benchmarks.training.workloads import MIXES, ModelSpec, make_workload
from peft_mux import ChunkPackingCollator, MultiTaskPeftModel
from peft_mux.engine.allocator import keeping_freed_memory
from peft_mux.modeling.stream import Stream

NUM_TASKS = 8
LINEAR_LAYERS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
UPPER = {"no task": (), "first four": range(4), "every other": range(1, 8, 2), "all but the last": range(7)}
PARTS = ("adapters", "memory", "depth")


class Pass:
    """Forward and backward of all tasks of a mix.

    Args:
        spec: the backbone.
        mix: kind of workload.
        upper: numbers of the tasks that have adapters on the upper half of the layers alone.
    """

    def __init__(self, spec: ModelSpec, mix: str, upper: Collection[int] = ()) -> None:
        tasks = make_workload(mix, num_tasks=NUM_TASKS, num_steps=1, vocab_size=spec.vocab_size).tasks
        layers = list(range(spec.num_layers // 2, spec.num_layers))
        configs = {
            task.name: LoraConfig(
                r=task.rank, target_modules=LINEAR_LAYERS, layers_to_transform=layers if number in upper else None
            )
            for number, task in enumerate(tasks)
        }
        self.model = MultiTaskPeftModel(spec.build(), configs, verify=False).train()
        self.batch = ChunkPackingCollator()([{"task": task.name, **row} for task in tasks for row in task.rows])

    def __call__(self) -> None:
        self.model(self.batch).losses.sum().backward()

    def under(self, change: Callable[[], AbstractContextManager[Any]]) -> Callable[[], None]:
        """Return the pass as it is under a change of the package."""

        def run() -> None:
            with change():
                self()

        return run

    @contextmanager
    def without_adapters(self) -> Any:
        """Leave the frozen backbone, whose embeddings get a gradient."""
        embeddings = self.model.backbone.get_input_embeddings()
        hook = embeddings.register_forward_hook(lambda module, inputs, output: output.detach().requires_grad_())
        with self.model.disable_adapter():
            yield
        hook.remove()


def print_line(what: str, seconds: dict[str, list[float]]) -> None:
    """Print the seconds of a pass with something and without it, and their ratio."""
    with_s, without_s = seconds["with"], seconds["without"]
    print(f"{what:<40} {min(with_s):7.3f} s with, {min(without_s):7.3f} s without; {ratio(with_s, without_s):.3f}")


def compare_memory(run: Callable[[], None], rounds: int) -> None:
    """Time passes with freed memory kept and given back, and count the pages that they touch first.

    The first pass of each round is left out: it begins with what the other kind of round left behind.
    """
    seconds: dict[str, list[float]] = {"with": [], "without": []}
    faults: dict[str, list[float]] = {"with": [], "without": []}
    for _ in range(rounds):
        for name in seconds:
            with keeping_freed_memory(torch.device("cpu")) if name == "with" else nullcontext():
                run()
                before, start_s = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.process_time()
                run()
                seconds[name].append(time.process_time() - start_s)
                faults[name].append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    print_line("memory", seconds)
    print(f"{'memory: page faults of a pass':<40} {faults['with'][-1]:,} with, {faults['without'][-1]:,} without")


def main() -> None:
    """Print a line for each part, and each mix or choice of tasks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--shape", choices=SHAPES, help="a published shape instead of a Llama of 29.5M parameters")
    parser.add_argument("--layers", type=int, help="layers of the backbone")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    spec = ModelSpec.of_shape(options.shape, options.layers) if options.shape else ModelSpec()
    if options.layers and not options.shape:
        spec = ModelSpec(num_layers=options.layers)
    if "adapters" in options.only:
        for mix in MIXES:
            run = Pass(spec, mix)
            runs = {"with": run, "without": run.under(run.without_adapters)}
            print_line(f"adapters: {mix}", in_turns(runs, options.rounds))
    if "memory" in options.only:
        compare_memory(Pass(spec, "nonuniform"), options.rounds)
    if "depth" in options.only:
        for name, upper in UPPER.items():
            run = Pass(spec, "nonuniform", set(upper))
            whole = run.under(lambda: mock.patch.object(Stream, "reset_adapter_tracking", return_value=None))
            print_line(f"depth: upper half of {name}", in_turns({"with": run, "without": whole}, options.rounds))


if __name__ == "__main__":
    main()
