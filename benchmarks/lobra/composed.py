"""LobRA's deployments priced by MuxTune's plans, next to those that one curve chooses: in simulation, without a GPU.

    python -m benchmarks.lobra.composed                          a few minutes, one thread
    python -m benchmarks.lobra.composed --gpus 4 8 --seeds 2     smaller

Tasks of lognormal lengths on a Llama-2-7B by the data sheet of an A100-40GB, from few rows a step to many. For each:
the deployment of one curve (L Eq. 2, Eq. 10 to 12), the composed one, and the seconds of a step of both by the plans
that `plan_tasks` makes for the rows of each replica, in which a pipeline's template is simulated. `gain` is the one
over the other, `fit` how far the linear forms of the search are from the plans, `curve` what the curve itself says of
its own choice. Seconds of planning are of this machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.harness import Table
from peft_mux.scheduler.costs.hardware import Cluster, parse_devices
from peft_mux.scheduler.costs.loads import AdapterLoad, TaskLoad
from peft_mux.scheduler.costs.memory import MemoryModel, ModelShape
from peft_mux.scheduler.costs.profile import analytic_profile
from peft_mux.scheduler.deployment.composed import compose_deployment
from peft_mux.scheduler.deployment.search import plan_deployment
from peft_mux.scheduler.deployment.space import TaskLengths, candidate_configs, joint_sample
from peft_mux.scheduler.dispatching.bucketing import interval_tokens
from peft_mux.scheduler.replicas.facts import ReplicaFacts, replica_time_model
from peft_mux.scheduler.replicas.replica_planner import ReplicaPlanner

SHAPE_7B = ModelShape(32, 4096, 11008, 4096, 4096, 32000, backbone_bytes=13_476_839_424, activation_bytes=2)
LONGEST = 8192
PASS_TOKENS = 4096
BATCHES_IN_SAMPLE = 20
NUM_TASKS = 6
LOADS = {"light": 2, "medium": 8, "heavy": 64}
"""Rows of each task in a step."""
SINGLE_BUDGET_S, COMPOSED_BUDGET_S, TIME_LIMIT_S = 8.0, 12.0, 2.5
"""As `peft-mux plan --deployment` has them."""


def drawn_tasks(batch_size: int, seed: int) -> tuple[tuple[TaskLoad, ...], list[TaskLengths]]:
    """Draw tasks of skewed lengths: medians of 100 to 1,500 tokens, ranks 8 to 64.

    Args:
        batch_size: rows of each task in a step.
        seed: seed of the draws.
    """
    draw = np.random.default_rng(seed)
    loads, tasks = [], []
    for number, median in enumerate(np.geomspace(100, 1500, NUM_TASKS)):
        lengths = np.clip(draw.lognormal(np.log(median), 0.8, BATCHES_IN_SAMPLE * batch_size), 16, LONGEST).astype(int)
        rank = 8 << number % 4
        adapters = tuple(AdapterLoad(rank, 8192, 4096) for _ in range(4))
        # The middle of each of as many equal parts as the batch has rows.
        typical = tuple(int(length) for length in np.sort(lengths)[BATCHES_IN_SAMPLE // 2 :: BATCHES_IN_SAMPLE])
        tasks.append(TaskLengths(f"task-{number}", tuple(lengths.tolist()), batch_size))
        loads.append(
            TaskLoad(
                f"task-{number}",
                typical,
                sum(typical) // 2,
                adapters,
                SHAPE_7B.num_layers * 4 * rank * 8192,
                longest_row_tokens=int(lengths.max()),
            )
        )
    return tuple(loads), tasks


def facts_of(loads: tuple[TaskLoad, ...], devices: Cluster) -> ReplicaFacts:
    """Return what the costs of a replica depend on, on devices by their data sheet."""
    return ReplicaFacts(
        SHAPE_7B,
        analytic_profile(devices.device, SHAPE_7B),
        loads,
        MemoryModel(SHAPE_7B),
        devices.device.memory_bytes,
        pass_tokens=PASS_TOKENS,
        links=devices,
    )


def compare(num_gpus: int, batch_size: int, seed: int) -> dict[str, Any]:
    """Return both deployments of one set of tasks, and what they take.

    Args:
        num_gpus: devices that may be used.
        batch_size: rows of each task in a step.
        seed: seed of the drawn tasks.
    """
    loads, tasks = drawn_tasks(batch_size, seed)
    facts = facts_of(loads, parse_devices(f"{num_gpus}xA100-40GB"))
    lengths, global_batch = joint_sample(tasks)
    search: dict[str, Any] = {"interval": interval_tokens(max(lengths)), "time_limit_s": TIME_LIMIT_S}
    start = time.perf_counter()
    curve = replica_time_model(facts, candidate_configs(facts, num_gpus))
    single = plan_deployment(lengths, global_batch, num_gpus, curve, budget_s=SINGLE_BUDGET_S, **search)
    single_s = time.perf_counter() - start
    planner = ReplicaPlanner(facts, max_tokens=PASS_TOKENS)
    composed = compose_deployment(tasks, single, curve, planner, budget_s=COMPOSED_BUDGET_S, **search)
    return {
        "num_gpus": num_gpus,
        "batch_size": batch_size,
        "seed": seed,
        "single": single.layout,
        "composed": composed.plan.layout,
        "single_curve_s": single.expected_step_s,
        "single_step_s": composed.single.step_s,
        "composed_step_s": composed.chosen.step_s,
        "gain": composed.single.step_s / composed.chosen.step_s,
        "fit_error": composed.fit_error,
        "num_plans": composed.num_plans,
        "num_unplanned": composed.num_unplanned,
        "planning_s": {"single": single_s, "composed": composed.planning_s},
    }


def print_rows(rows: Sequence[dict[str, Any]]) -> None:
    """Print what was compared, and the gains over the seeds of each size."""
    columns = {
        "num_gpus": "GPUs:>4", "batch_size": "rows:>4", "seed": "seed:>4", "single_curve_s": "curve s:>8.3f",
        "single_step_s": "step s:>8.3f", "composed_step_s": "composed s:>10.3f", "gain": "gain:>6.2f",
        "fit_error": "fit:>6.1%",
    }  # fmt: skip
    table = Table(*columns.values(), "planned in s:>12.1f", "one curve -> composed:<1")
    for row in rows:
        spent_s = sum(row["planning_s"].values())
        table.row(*(row[key] for key in columns), spent_s, f"{row['single']} -> {row['composed']}")
    for num_gpus, batch_size in dict.fromkeys((row["num_gpus"], row["batch_size"]) for row in rows):
        matching = [row for row in rows if (row["num_gpus"], row["batch_size"]) == (num_gpus, batch_size)]
        gains = [row["gain"] for row in matching]
        changed = sum(row["single"] != row["composed"] for row in matching)
        print(
            f"{num_gpus} GPUs, {batch_size} rows a task: {statistics.median(gains):.2f}x in the median, up to "
            f"{max(gains):.2f}x; another deployment in {changed} of {len(matching)}"
        )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lobra.composed", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--gpus", type=int, nargs="+", default=[4, 8, 16, 64])
    parser.add_argument("--loads", nargs="+", choices=LOADS, default=list(LOADS))
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    rows = [
        compare(num_gpus, LOADS[load], seed)
        for num_gpus in options.gpus
        for load in options.loads
        for seed in range(options.seeds)
    ]
    print_rows(rows)


if __name__ == "__main__":
    main()
