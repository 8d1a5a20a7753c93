"""Prints how fast and how good LobRA's per-step dispatch is: each policy, each installed solver, what moves add.

    python -m benchmarks.lobra.dispatch            about two minutes, one thread

Steps are drawn: a lognormal of short sequences and a gamma of long ones, seeds 0, 1, ... Replica times come from the
published profile of one layer (`benchmarks.lobra.steps`); no device is measured. Milliseconds are wall-clock on this
machine and include the start of a solver's process.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pulp

from benchmarks.harness import Table
from benchmarks.lobra.steps import NUM_LAYERS
from benchmarks.paths import SHARED_DATA
from peft_mux.scheduler.dispatching.bucketing import Bucketing, bucket_boundaries
from peft_mux.scheduler.dispatching.dispatch import DEFAULT_RELATIVE_GAP, dispatch, predict_replica_s, refine
from peft_mux.scheduler.dispatching.ilp import solve_ilp
from peft_mux.scheduler.dispatching.problem import build_problem, length_based, relocate
from peft_mux.scheduler.parallel_layout import ParallelConfig
from peft_mux.scheduler.replicas.time_model import ReplicaGroup, ReplicaTimeModel, fit_layer, read_layer_profile

MAX_LENGTH = 16384
GROUPS = [
    ReplicaGroup(ParallelConfig(tp, pp), count, max_tokens)
    for tp, pp, count, max_tokens in (
        (1, 1, 6, 2048),
        (2, 1, 3, 4096),
        (1, 4, 2, 4096),
        (4, 1, 2, 8192),
        (8, 1, 1, MAX_LENGTH),
    )
]


def draw_step(seed: int, sequences: int) -> list[int]:
    """Return the lengths of one step: one in seventeen is of a long task."""
    draw = np.random.default_rng(seed)
    short = draw.lognormal(5.5, 0.8, sequences - sequences // 17)
    long = draw.gamma(1.4, 2800, sequences // 17)
    return np.concatenate([short, long]).clip(16, MAX_LENGTH).astype(int).tolist()


def print_way(
    table: Table, name: str, bucketings: Sequence[Bucketing], model: ReplicaTimeModel, **options: Any
) -> None:
    """Print how fast a way to dispatch makes a step, how long it takes to decide, and how often it is proven."""
    answers, milliseconds = [], []
    for bucketing in bucketings:
        start = time.perf_counter()
        answers.append(dispatch(GROUPS, bucketing, model, **options))
        milliseconds.append((time.perf_counter() - start) * 1e3)
    proven = sum(answer.status == "optimal" for answer in answers)
    step_s = np.mean([answer.makespan_s for answer in answers])
    table.row(name, step_s, *np.quantile(milliseconds, [0.5, 0.9, 1.0]), f"{proven}/{len(answers)}")


def print_parts(bucketings: Sequence[Bucketing], model: ReplicaTimeModel) -> None:
    """Print what the ILP and the moves after it are each worth, at the ceilings of Eq. 3."""
    rows, moves = [], []
    for bucketing in bucketings:
        problem = build_problem(GROUPS, bucketing, model)
        moved = relocate(problem, length_based(problem))
        answer = solve_ilp(problem, moved, time_limit_s=10, relative_gap=DEFAULT_RELATIVE_GAP)
        solved = moved if answer is None else answer[0]
        refined, num_moves = refine(problem, GROUPS, model, solved)
        moves.append(num_moves)
        makespans = []
        for counts in (moved, solved, refined):
            pairs = zip(GROUPS, counts.tolist(), strict=True)
            makespans.append(max(predict_replica_s(problem, group, model, row) for group, row in pairs))
        rows.append((problem.group_s(solved).max(), *makespans))
    linear_s, moved_s, solved_s, refined_s = np.mean(rows, axis=0)
    print("\nParts of balanced dispatch, seconds at the ceilings of Eq. 3 (mean)")
    print(f"  by length, moved off the slowest group   {moved_s:.3f}")
    print(f"  ILP                                      {solved_s:.3f}, which its linear form takes for {linear_s:.3f}")
    print(f"  ILP, then moves by the time model        {refined_s:.3f}")
    print(f"  moves of a step                          {np.median(moves):.0f} (median), {max(moves)} at most")


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="steps drawn")
    parser.add_argument("--sequences", type=int, default=800, help="sequences of a step")
    parser.add_argument("--buckets", type=int, default=16)
    parser.add_argument("--data", type=Path, default=SHARED_DATA / "lobra", help="folder of the published profile")
    options = parser.parse_args()
    fits = fit_layer(read_layer_profile(options.data / "profile_time_llama_7B.csv"))
    model = ReplicaTimeModel(fits, NUM_LAYERS, {group.config: group.max_tokens for group in GROUPS})
    steps = [draw_step(seed, options.sequences) for seed in range(options.steps)]
    bucketings = [bucket_boundaries(lengths, options.buckets) for lengths in steps]
    print(
        f"{' '.join(map(str, GROUPS))}\n{len(steps)} steps of {options.sequences} sequences, {options.buckets} buckets"
    )
    print(
        "seconds of a step by the time model (mean); milliseconds to decide; how many steps are proven to be the best"
    )
    table = Table("way:<20", "step s:>7.3f", "median ms:>9.1f", "90 %:>8.1f", "max:>8.1f", "proven:>6")
    for policy in ("balanced", "uniform", "length"):
        print_way(table, policy, bucketings, model, policy=policy)
    print_way(table, "balanced, no solver", bucketings, model, least_solved_s=math.inf)
    for solver in pulp.listSolvers(onlyAvailable=True):
        if solver in ("PULP_CBC_CMD", "HiGHS"):
            for gap in (0.01, 0.005, 0.002):
                print_way(table, f"{solver}, gap {gap:.1%}", bucketings, model, solver=solver, relative_gap=gap)
    print_parts(bucketings, model)


if __name__ == "__main__":
    main()
