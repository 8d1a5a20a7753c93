"""Prints what keeping freed memory in the process saves: page faults and seconds of passes, with and without it.

    python -m benchmarks.training.allocator                 about 2 minutes on one core

The backbone is that of `benchmarks.training.throughput`; a pass holds 8 sequences a task, forward and backward. Rounds
with and without `keeping_freed_memory` alternate in this one process; the first pass of each round is left out, as it
begins with what the other kind of round left behind. Times are processor times of this process on one thread, medians
over rounds; faults are minor page faults of a pass.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass

import torch

from benchmarks.paths import RESULTS
from benchmarks.planner.accuracy import MixTask
from benchmarks.planner.policies import step_work
from benchmarks.training.report import host_kind
from benchmarks.training.workloads import ModelSpec
from peft_mux.engine.allocator import keeping_freed_memory
from peft_mux.engine.executor import Executor
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.scheduler.planner.values import HTask

_NUM_SEQUENCES = 8
_RANK = 16


@dataclass(frozen=True, slots=True)
class Kind:
    """Passes of one kind.

    Attributes:
        faults: number of page faults of a pass.
        pass_s: processor seconds of a pass.
    """

    faults: float
    pass_s: float


def measured(act: Callable[[], object], rounds: int, passes: int) -> dict[str, Kind]:
    """Run rounds of passes, in turn without and with freed memory kept; returns the medians of both."""
    seen: dict[str, list[tuple[int, float]]] = {"given back": [], "kept": []}
    for _ in range(rounds):
        for name, own in seen.items():
            with keeping_freed_memory(torch.device("cpu")) if name == "kept" else nullcontext():
                own += [_one_pass(act) for _ in range(passes + 1)][1:]
    return {
        name: Kind(statistics.median(faults for faults, _ in own), statistics.median(seconds for _, seconds in own))
        for name, own in seen.items()
    }


def _one_pass(act: Callable[[], object]) -> tuple[int, float]:
    faults, start_s = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, time.process_time()
    act()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - faults, time.process_time() - start_s


def one_pass_of(tasks: Sequence[MixTask]) -> Callable[[], object]:
    """Return what runs all sequences of all tasks in one pass, forward and backward."""
    model = MultiTaskPeftModel(ModelSpec().build(), {task.name: task.lora_config() for task in tasks}, verify=False)
    num_tokens = sum(sum(task.lengths) for task in tasks)
    htasks = (HTask(tuple(task.name for task in tasks), 1, float(num_tokens)),)
    executor, work = Executor(model.train()), step_work(tasks, htasks, num_tokens)
    return lambda: executor.run(work)


def main() -> None:
    """Measure passes of each size, and print both kinds."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 3072], help="tokens of a pass")
    parser.add_argument("--tasks", type=int, default=4, help="number of tasks")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of each kind")
    parser.add_argument("--passes", type=int, default=3, help="passes of a round")
    parser.add_argument("--write", action="store_true", help="write JSON into benchmarks/results/")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("tokens   page faults of a pass: given back, kept   seconds of a pass: given back, kept   kept / given back")
    rows = []
    for num_tokens in options.tokens:
        length = max(1, num_tokens // (options.tasks * _NUM_SEQUENCES))
        tasks = [MixTask(f"task-{i}", (length,) * _NUM_SEQUENCES, _RANK, "all-linear") for i in range(options.tasks)]
        kinds = measured(one_pass_of(tasks), options.rounds, options.passes)
        back, kept = kinds["given back"], kinds["kept"]
        print(
            f"{num_tokens:>6}   {back.faults:>22,.0f} {kept.faults:>15,.0f}   {back.pass_s:>20.3f} {kept.pass_s:>14.3f}"
            f"   {kept.pass_s / back.pass_s:>17.3f}",
            flush=True,
        )
        rows.append({"tokens": num_tokens, **{name: asdict(kind) for name, kind in kinds.items()}})
    if options.write:
        path = RESULTS / f"allocator-{host_kind()}.json"
        path.write_text(json.dumps({"settings": vars(options), "rows": rows}, indent=1) + "\n", encoding="utf-8")
        print(f"written: {path.name}")


if __name__ == "__main__":
    main()
