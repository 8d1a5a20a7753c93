"""Prints why the planner simulates more than M's one template and one fusion: what each alone would lose.

    python -m benchmarks.planner.choices            about 1 minute, one thread

Templates: random buckets whose stages differ are ordered by M's template (§3.4.1) and by plain 1F1B, and simulated.
Partitions: random tasks on 2 or 4 stages of A40s (Llama 7B shapes, analytic profile) are fused by Eq. 6, kept all
apart and put all together, without a limit of memory; each partition is grouped, ordered and simulated as the planner
does. Printed is the makespan of M's choice over that of the alternative, less 1: above 0 the alternative is faster.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterable

import numpy as np

from benchmarks.planner.cluster.trace import TaskKind
from benchmarks.planner.figures_bench import LLAMA_7B
from peft_mux.scheduler.costs.hardware import DEVICES
from peft_mux.scheduler.costs.latency import CostModel
from peft_mux.scheduler.costs.memory import MemoryModel
from peft_mux.scheduler.costs.profile import analytic_profile
from peft_mux.scheduler.pipeline.simulator import simulate
from peft_mux.scheduler.pipeline.template import build_template
from peft_mux.scheduler.plan import BucketLoad
from peft_mux.scheduler.planner.planner import Budget, plan_tasks
from peft_mux.scheduler.planner.policies import POLICIES, Partition, Policy, policy_named, register_policy

MAX_TOKENS = 16384


class _OneOfMux(Policy):
    """One of the partitions that the planner compares.

    Args:
        number: its place among them: what Eq. 6 fuses, all apart, all together.
    """

    name = "one of mux"
    words = "one partition of the planner"
    search_schedule = "mux"

    def __init__(self, number: int) -> None:
        self.number = number

    def partitions(self, latency_s: np.ndarray, num_stages: int, num_micro_batches: int) -> list[Partition]:
        return [policy_named("mux").partitions(latency_s, num_stages, num_micro_batches)[self.number]]


def template_losses(count: int, seed: int) -> list[float]:
    """Return what M's template takes longer than 1F1B on each of so many random instances, as a part of 1."""
    return [_template_loss(random.Random(f"template-{seed}-{number}")) for number in range(count)]


def _template_loss(draw: random.Random) -> float:
    num_stages, num_micro_batches = draw.choice((2, 4, 8)), draw.choice((2, 4, 8))
    buckets = [
        BucketLoad(
            name=f"bucket {index}",
            forward_s=tuple(draw.uniform(0.5, 2.0) * scale for _ in range(num_stages)),
            activation_bytes=(1,) * num_stages,
            num_micro_batches=num_micro_batches,
        )
        for index, scale in enumerate(draw.uniform(0.2, 2.0) for _ in range(draw.randint(2, 6)))
    ]
    mux_s, plain_s = (simulate(build_template(buckets, name), buckets).makespan_s for name in ("mux", "1f1b"))
    return mux_s / plain_s - 1.0


def partition_losses(count: int, seed: int) -> list[float]:
    """Return what Eq. 6's fusion takes longer than the better of all apart and all together, as a part of 1."""
    return [_partition_loss(random.Random(f"partition-{seed}-{number}")) for number in range(count)]


def _partition_loss(draw: random.Random) -> float:
    num_stages, num_micro_batches = draw.choice((2, 4)), draw.choice((2, 4, 8))
    cost = CostModel(analytic_profile(DEVICES["A40"], LLAMA_7B), LLAMA_7B, num_stages=num_stages)
    memory, num_tasks = MemoryModel(LLAMA_7B, num_stages=num_stages), draw.randint(2, 6)
    of_loads = random.Random(draw.randrange(2**31))
    kinds = [TaskKind(of_loads.choice((64, 128, 256)), of_loads.choice((8, 16, 32)), 16) for _ in range(num_tasks)]
    loads = [kind.load(f"task {number}", LLAMA_7B) for number, kind in enumerate(kinds)]
    budget = Budget(MAX_TOKENS, num_micro_batches=num_micro_batches)

    def makespan_s(number: int) -> float:
        register_policy(_OneOfMux(number))
        try:
            return plan_tasks(loads, cost, memory, budget, policy=_OneOfMux.name).step_s - cost.outside_s(loads)
        finally:
            POLICIES.pop(_OneOfMux.name)

    return makespan_s(0) / min(makespan_s(1), makespan_s(2)) - 1.0


def line(name: str, losses: Iterable[float]) -> str:
    """Return one line: median, the 90th percentile and the worst."""
    ordered = sorted(losses)
    slower = sum(loss > 1e-9 for loss in ordered) / len(ordered)
    most = ordered[int(0.9 * len(ordered))]
    return (
        f"{name:<42} median {statistics.median(ordered):+7.1%}   nine in ten below {most:+7.1%}"
        f"   worst {ordered[-1]:+7.1%}   slower in {slower:.0%} of {len(ordered)}"
    )


def main() -> None:
    """Draw instances, simulate both choices, and print two lines."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--templates", type=int, default=2000, help="instances")
    parser.add_argument("--partitions", type=int, default=200, help="instances")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    print(line("M's template against 1F1B", template_losses(options.templates, options.seed)))
    print(line("fusion against all apart and all together", partition_losses(options.partitions, options.seed)))


if __name__ == "__main__":
    main()
