"""The parts of LobRA's evaluation: unequal replicas in real processes, and planning in two stages (L Fig. 7, 10)."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.lobra.steps import BATCHES_IN_SAMPLE, NUM_GPUS, Inputs, all_lengths, lognormal
from benchmarks.papers.runs import Contender, Measured, launch, measure, spread
from benchmarks.papers.table import Row, Settings
from benchmarks.paths import SHARED_DATA
from peft_mux.scheduler.deployment.search import plan_deployment
from peft_mux.scheduler.dispatching.bucketing import bucket_boundaries
from peft_mux.scheduler.dispatching.dispatch import dispatch

UNEQUAL = "<2,1>, <1,1>x2"
PROCESSES = 4
LIMIT_TOKENS = 128
"""Most tokens that a replica of one process holds, below the longest rows of the mix."""
STEPS_OF_FIGURE_10 = 5


def replicas(settings: Settings, backbone: Path) -> list[Row]:
    """Figure 7 and Figure 10, actual: three unequal replicas against the baselines, under limits that bind."""
    with tempfile.TemporaryDirectory() as folder:
        case = settings.case("nonuniform")
        shared = {"case": case.to_json(), "backbone": str(backbone)}
        profile = str(Path(folder) / "profile.json")
        prepared = launch(
            {**shared, "kind": "prepare", "profile": profile, "profile_s": settings.profile_s, "tokens": LIMIT_TOKENS},
            1,
        )
        planning = {"memory_limit_gib": prepared["limit_gib"], "cost_profile": profile}
        times = measure(_contenders(settings, planning), case, settings.rounds, backbone)
    return [*_against(times), *_actual(times["unequal replicas"])]


def _contenders(settings: Settings, planning: dict[str, Any]) -> list[Contender]:
    tasks = settings.case("nonuniform").workload().tasks
    longest = {task.name: max(len(row["input_ids"]) for row in task.rows) for task in tasks}
    # A task of short rows alone fits on single processes, as L's Task-Sequential has it.
    alone = tuple({} if longest[task.name] <= LIMIT_TOKENS else {"tensor_parallel_size": 2} for task in tasks)
    return [
        Contender("unequal replicas", PROCESSES, {**planning, "replicas": UNEQUAL}),
        Contender("the same by length", PROCESSES, {**planning, "replicas": UNEQUAL, "dispatch": "length"}),
        Contender("Task-Fused", PROCESSES, {**planning, "tensor_parallel_size": 2}),
        Contender(
            "Task-Sequential",
            PROCESSES,
            planning,
            parts=tuple((task.name,) for task in tasks),
            part_arguments=alone,
        ),
    ]


def _against(times: dict[str, Measured]) -> list[Row]:
    best_s = times["unequal replicas"].median_s
    rows = []
    for name, paper in (("Task-Fused", "45.0 %"), ("Task-Sequential", "-"), ("the same by length", "32.2 %")):
        # All contenders have the same processes, so that seconds compare as GPU seconds do.
        saved = 100 * (1 - best_s / times[name].median_s)
        rows.append(
            Row("e", f"L Fig. 7 and 8, {UNEQUAL}: GPU seconds saved of {name}", paper, saved, "%", spread(times))
        )
    return rows


def _actual(run: Measured) -> list[Row]:
    ratios = [measured / planned for steps in run.steps for measured, planned in steps if planned]
    if not ratios:
        return []
    return [
        Row(
            "e",
            "L Fig. 10, actual over planned seconds of a step, measured profile: median",
            "within 10 %",
            statistics.median(ratios),
            "x",
            f"{len(ratios)} steps, {min(ratios):.2f} to {max(ratios):.2f}",
        )
    ]


def two_stages(settings: Settings, data: Path = SHARED_DATA / "lobra") -> list[Row]:
    """Figure 10: what deploying once costs against solving Eq. 1 again for each step, by the published 7B profile."""
    inputs = Inputs(data)
    draw = np.random.default_rng(0)
    tasks = inputs.tasks(lognormal, draw, BATCHES_IN_SAMPLE)
    plan = plan_deployment(all_lengths(tasks), sum(task.batch_size for task in tasks), NUM_GPUS, inputs.model)
    limits = [group.max_tokens for group in plan.groups]
    ratios, once_s, anew_s, steps_s = [], [], [], []
    for _ in range(STEPS_OF_FIGURE_10):
        lengths = all_lengths(inputs.tasks(lognormal, draw, 1))
        start = time.perf_counter()
        spread = dispatch(plan.groups, bucket_boundaries(lengths, limits=limits), inputs.model)
        once_s.append(time.perf_counter() - start)
        start = time.perf_counter()
        planned = plan_deployment(lengths, len(lengths), NUM_GPUS, inputs.model)
        anew_s.append(time.perf_counter() - start)
        steps_s.append(spread.makespan_s)
        ratios.append(spread.makespan_s / planned.expected_step_s)
    return [
        Row("f", "L Fig. 10, seconds of two stages over those of Eq. 1, 7B, 16 GPUs: worst step", "within 15 %",
            max(ratios), "x", f"median {statistics.median(ratios):.3f} of {len(ratios)} steps"),
        Row("f", "L Fig. 10, solving Eq. 1 over a step's time", "above 1", _median_ratio(anew_s, steps_s), "x",
            f"{statistics.median(anew_s):.2f} s to solve; steps of {statistics.median(steps_s):.2f} s by the model"),
        Row("f", "L Fig. 10, bucketing and dispatch over a step's time", "below 1", _median_ratio(once_s, steps_s), "x",
            f"{1e3 * statistics.median(once_s):.0f} ms to solve"),
    ]  # fmt: skip


def _median_ratio(seconds: Sequence[float], steps_s: Sequence[float]) -> float:
    return statistics.median(measured_s / step for measured_s, step in zip(seconds, steps_s, strict=True))
