"""Times of planning: how long the planner takes for how many tasks on how many stages.

python -m benchmarks.planner             about 10 seconds, one thread

Bounds: fusion of 1,000 tasks 2 s, full planning of 64 tasks on 8 stages 5 s, on one core (M §4: "under 10
seconds"), the search for the number of micro-batches included.
Tasks are drawn (seed 0) from sequences of 64, 128 and 256 tokens and batches of 8, 16 and 32; Llama 7B, analytic A40.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable, Sequence

from benchmarks.harness import Table, in_turns
from benchmarks.planner.cluster.trace import TaskKind
from benchmarks.planner.figures_bench import LLAMA_7B
from peft_mux.scheduler.costs.hardware import DEVICES
from peft_mux.scheduler.costs.latency import CostModel
from peft_mux.scheduler.costs.loads import TaskLoad
from peft_mux.scheduler.costs.memory import MemoryModel
from peft_mux.scheduler.costs.profile import analytic_profile
from peft_mux.scheduler.planner.fusion import fuse
from peft_mux.scheduler.planner.planner import Budget, plan_tasks
from peft_mux.scheduler.planner.policies import POLICIES

DEVICE = DEVICES["A40"]
MAX_TOKENS = 16384
NUM_MICRO_BATCHES = 8
FUSION_BOUND_S = 2.0
PLANNING_BOUND_S = 5.0


def random_loads(count: int, seed: int = 0) -> list[TaskLoad]:
    """Draw tasks."""
    draw = random.Random(seed)
    kinds = [TaskKind(draw.choice((64, 128, 256)), draw.choice((8, 16, 32)), 16) for _ in range(count)]
    return [kind.load(f"task {number}", LLAMA_7B) for number, kind in enumerate(kinds)]


def models(num_stages: int) -> tuple[CostModel, MemoryModel]:
    """Return what predicts seconds and bytes on a pipeline."""
    cost = CostModel(analytic_profile(DEVICE, LLAMA_7B), LLAMA_7B, num_stages=num_stages)
    return cost, MemoryModel(LLAMA_7B, num_stages=num_stages)


def median_s(work: Callable[[], object], repeats: int) -> float:
    """Return the median seconds of a call."""
    return statistics.median(in_turns({"call": work}, repeats, time.perf_counter, num_warm=0)["call"])


def time_fusion(count: int, num_stages: int, repeats: int) -> tuple[float, float]:
    """Return seconds of predicting the latencies of all ranges of tasks, and of fusing by them."""
    loads = sorted(random_loads(count), key=lambda load: load.tokens)
    cost, _ = models(num_stages)
    latency_s = cost.latency_matrix(loads, NUM_MICRO_BATCHES)
    predict_s = median_s(lambda: cost.latency_matrix(loads, NUM_MICRO_BATCHES), repeats)
    return predict_s, median_s(lambda: fuse(latency_s, num_stages, num_micro_batches=NUM_MICRO_BATCHES), repeats)


def time_planning(count: int, num_stages: int, policy: str, repeats: int) -> tuple[float, int, int, float]:
    """Return seconds of planning, hTasks, buckets, and the predicted step."""
    loads = random_loads(count)
    cost, memory = models(num_stages)
    budget = Budget(MAX_TOKENS, DEVICE.memory_bytes)
    outcome = plan_tasks(loads, cost, memory, budget, policy=policy)
    seconds = median_s(lambda: plan_tasks(loads, cost, memory, budget, policy=policy), repeats)
    return seconds, len(outcome.htasks), len(outcome.buckets), outcome.step_s


def main(argv: Sequence[str] | None = None) -> int:
    """Print the tables; return 1 where a bound is broken."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planner", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tasks", type=int, nargs="+", default=[8, 32, 64])
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--fusion-tasks", type=int, nargs="+", default=[100, 1000])
    arguments = parser.parse_args(argv)
    faults: list[str] = []
    print(f"median of {arguments.repeats}, seconds\n")
    table = Table("fusion on 4 stages, tasks:>25", "predict:>7.3f", "fuse:>7.3f", "sum:>7.3f")
    for count in arguments.fusion_tasks:
        predict_s, fuse_s = time_fusion(count, 4, arguments.repeats)
        table.row(count, predict_s, fuse_s, predict_s + fuse_s)
        if count <= 1000 and predict_s + fuse_s > FUSION_BOUND_S:
            faults.append(f"fusion of {count} tasks took {predict_s + fuse_s:.2f} s; the bound is {FUSION_BOUND_S:g} s")
    print()
    table = Table("planning:<20", "policy:<12", "seconds:>7.3f", "hTasks:>6", "buckets:>7", "predicted step s:>16.3f")
    for num_stages in arguments.stages:
        for count in arguments.tasks:
            for policy in POLICIES:
                seconds, *outcome = time_planning(count, num_stages, policy, arguments.repeats)
                what = f"{count} tasks, {num_stages} stages"
                table.row(what, policy, seconds, *outcome)
                if count <= 64 and num_stages <= 8 and seconds > PLANNING_BOUND_S:
                    faults.append(f"{what} took {seconds:.2f} s; the bound is {PLANNING_BOUND_S:g} s")
    for fault in faults:
        print(f"FAULT {fault}")
    return 1 if faults else 0
