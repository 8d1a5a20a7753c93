"""Prints how fast and how good LobRA's per-step dispatch is: bucketing, each policy, each installed solver, gaps, R.

python -m benchmarks.lobra.dispatch            about two minutes, one thread

Steps are drawn: a lognormal of short sequences and a gamma of long ones, seeds 0, 1, ... Replica times come from a
stored profile of one layer where `--data` has one, else from an analytic model whose coefficients stand below; no
device is measured. Milliseconds are wall-clock on this machine and include the start of a solver's process.
"""

from __future__ import annotations

import argparse
import platform
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pulp

from benchmarks.lobra.boundaries import uniform_boundaries
from benchmarks.paths import SHARED_DATA
from peft_mux.scheduler.dispatching.bucketing import Bucketing, bucket_boundaries, fixed_bucketing
from peft_mux.scheduler.dispatching.dispatch import DEFAULT_RELATIVE_GAP, Dispatch, dispatch, predict_replica_s, refine
from peft_mux.scheduler.dispatching.ilp import solve_ilp
from peft_mux.scheduler.dispatching.problem import DispatchProblem, build_problem, length_based, relocate
from peft_mux.scheduler.replicas.time_model import (
    ParallelConfig,
    ReplicaGroup,
    ReplicaTimeModel,
    fit_layer,
    read_layer_profile,
)

DATA = SHARED_DATA / "lobra"
MAX_LENGTH = 16384
NUM_LAYERS = 32
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


class NoSolver(pulp.LpSolver):
    """Stands for a machine without any."""

    def actualSolve(self, lp: pulp.LpProblem, **arguments: object) -> int:
        raise pulp.PulpSolverError("no solver")


@dataclass(frozen=True)
class AnalyticModel:
    """t(b, s) = (b (linear s + quadratic s^2) / (tp efficiency(tp)) + launch) / pp seconds for one pass.

    Attributes:
        linear: seconds that each token takes.
        quadratic: seconds for each token squared, of one sequence.
        launch: seconds of a pass, however small it is.
        loss: share of its efficiency that tensor parallelism loses with each doubling of its degree.
    """

    linear: float = 1.5e-4
    quadratic: float = 4e-9
    launch: float = 0.05
    loss: float = 0.14

    def pass_s(self, config: ParallelConfig, sequences: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return the seconds of one micro-batch on each stage; 0 where it is empty.

        Args:
            config: how the replica is spread over GPUs.
            sequences: sequences in each micro-batch.
            lengths: padded length of each micro-batch's sequences, in tokens, of the same shape.
        """
        efficiency = (1 - self.loss) ** np.log2(config.tp)
        work = sequences * (self.linear * lengths + self.quadratic * lengths**2) / (config.tp * efficiency)
        return np.where(sequences > 0, (work + self.launch) / config.pp, 0.0)

    def linear_terms(self, config: ParallelConfig, lengths: Sequence[int], max_tokens: int) -> tuple[np.ndarray, float]:
        """See `ReplicaTimeModel`."""
        sizes = np.asarray(lengths, dtype=np.float64)
        fullest = max_tokens // sizes
        full_s = self.pass_s(config, fullest, sizes)
        return full_s / fullest, float((config.pp - 1) * full_s.max())

    def step_s(self, config: ParallelConfig, counts: Sequence[int], lengths: Sequence[int], max_tokens: int) -> float:
        """See `ReplicaTimeModel`."""
        sizes, numbers = np.asarray(lengths, dtype=np.float64), np.asarray(counts, dtype=np.float64)
        fullest = max_tokens // sizes
        full_s = self.pass_s(config, fullest, sizes)
        rest_s = self.pass_s(config, numbers % fullest, sizes)
        longest_s = np.where(numbers >= fullest, full_s, rest_s).max()
        return float((numbers // fullest * full_s + rest_s).sum() + (config.pp - 1) * longest_s)


def find_model(folder: Path) -> tuple[ReplicaTimeModel, str]:
    """Return the model of the stored profile, or the analytic one, and what it is."""
    profile = folder / "profile_time_llama_7B.csv"
    if not profile.is_file():
        model = AnalyticModel()
        return model, f"analytic, as {profile.name} is absent: {model}"
    limits = {group.config: group.max_tokens for group in GROUPS}
    fits = fit_layer(read_layer_profile(profile))
    return ReplicaTimeModel(fits, NUM_LAYERS, limits), f"{profile.name}, {NUM_LAYERS} layers"


def draw_step(seed: int, sequences: int) -> list[int]:
    """Return the lengths of one step: one in seventeen is of a long task."""
    draw = np.random.default_rng(seed)
    short = draw.lognormal(5.5, 0.8, sequences - sequences // 17)
    long = draw.gamma(1.4, 2800, sequences // 17)
    return np.concatenate([short, long]).clip(16, MAX_LENGTH).astype(int).tolist()


def quantiles(milliseconds: Sequence[float]) -> str:
    """Return median, 90th percentile and maximum."""
    return "{:8.1f} {:8.1f} {:8.1f}".format(*np.quantile(milliseconds, [0.5, 0.9, 1.0]))


def timed(run: Callable[[], Dispatch]) -> tuple[Dispatch, float]:
    """Return what was dispatched, and the milliseconds that it took."""
    start = time.perf_counter()
    found = run()
    return found, (time.perf_counter() - start) * 1e3


def replicas_s(problem: DispatchProblem, model: ReplicaTimeModel, ceilings: np.ndarray) -> float:
    """Return the makespan by the time model where every replica has all its ceilings.

    Args:
        problem: the linear form of the step.
        model: predicts the seconds of one replica.
        ceilings: most sequences of each bucket on any replica of each group, of shape `(groups, buckets)`.
    """
    rows = zip(GROUPS, ceilings.tolist(), strict=True)
    return max(predict_replica_s(problem, group, model, row) for group, row in rows)


def print_bucketing(steps: list[list[int]]) -> None:
    """Print what dynamic and fixed boundaries pad, and how long the dynamic ones take."""
    print(
        "\nBucketing at intervals of 256 tokens: padding over all padded tokens, milliseconds of the dynamic programme"
    )
    print("   R   dynamic     fixed    median ms")
    for num_buckets in (4, 8, 12, 16, 32):
        fixed = uniform_boundaries(MAX_LENGTH, num_buckets)
        found, times = [], []
        for lengths in steps:
            start = time.perf_counter()
            found.append(bucket_boundaries(lengths, num_buckets))
            times.append((time.perf_counter() - start) * 1e3)
        others = [fixed_bucketing(lengths, fixed) for lengths in steps]
        ratios = [sum(b.padding_tokens for b in many) / sum(b.padded_tokens for b in many) for many in (found, others)]
        print(f"  {num_buckets:>2}  {ratios[0]:8.1%}  {ratios[1]:8.1%}    {np.median(times):8.2f}")


def print_policies(bucketings: list[Bucketing], model: ReplicaTimeModel) -> None:
    """Print how fast each policy makes a step, and how long it takes to decide."""
    print("\nPolicies: predicted seconds of a step (mean), and milliseconds to decide")
    print("  policy                      seconds   median      90 %      max")
    choices: dict[str, dict[str, Any]] = {
        "balanced": {},
        "balanced, no solver": {"solver": NoSolver()},
        "uniform": {},
        "length": {},
    }
    for name, options in choices.items():
        policy: Any = name.split(",")[0]
        runs = [timed(lambda b=b, p=policy, o=options: dispatch(GROUPS, b, model, policy=p, **o)) for b in bucketings]
        mean_s = np.mean([found.makespan_s for found, _ in runs])
        print(f"  {name:<24}  {mean_s:9.3f} {quantiles([ms for _, ms in runs])}")


def print_parts(bucketings: list[Bucketing], model: ReplicaTimeModel) -> None:
    """Print what the ILP and the moves after it are each worth, at the ceilings of Eq. 3."""
    rows, moves = [], []
    for bucketing in bucketings:
        problem = build_problem(GROUPS, bucketing, model)
        moved = relocate(problem, length_based(problem))
        answer = solve_ilp(problem, moved, time_limit_s=10, relative_gap=DEFAULT_RELATIVE_GAP)
        solved = moved if answer is None else answer[0]
        start = time.perf_counter()
        refined, num_moves = refine(problem, GROUPS, model, solved)
        moves.append(num_moves)
        milliseconds = (time.perf_counter() - start) * 1e3
        makespans = [replicas_s(problem, model, ceilings) for ceilings in (moved, solved, refined)]
        rows.append((problem.group_s(solved).max(), *makespans, milliseconds))
    linear_s, moved_s, solved_s, refined_s, milliseconds = np.mean(rows, axis=0)
    print("\nParts of balanced dispatch, seconds at the ceilings of Eq. 3 (mean)")
    print(f"  by length, moved off the slowest group   {moved_s:.3f}")
    print(f"  ILP                                      {solved_s:.3f}, which its linear form takes for {linear_s:.3f}")
    print(f"  ILP, then moves by the time model        {refined_s:.3f}, in {milliseconds:.1f} ms")
    print(f"  moves of a step                          {np.median(moves):.0f} (median), {max(moves)} at most")


def print_solvers(bucketings: list[Bucketing], model: ReplicaTimeModel) -> None:
    """Print what the installed solvers take at several gaps, with and without a warm start."""
    print(
        "\nSolvers and relative gaps: milliseconds of dispatch(), predicted seconds of a step (mean), how many proven"
    )
    print("  solver        gap    warm    median     90 %      max     seconds   proven")
    installed = [name for name in ("PULP_CBC_CMD", "HiGHS") if name in pulp.listSolvers(onlyAvailable=True)]
    for solver in installed:
        for gap in (0.01, 0.005, 0.002):
            for warm in (False, True):
                last, runs = None, []
                for bucketing in bucketings:
                    options = {"solver": solver, "relative_gap": gap, "warm_start": last if warm else None}
                    last, milliseconds = timed(lambda b=bucketing, o=options: dispatch(GROUPS, b, model, **o))
                    runs.append((last, milliseconds))
                proven = sum(found.status == "optimal" for found, _ in runs)
                mean_s = np.mean([found.makespan_s for found, _ in runs])
                print(
                    f"  {solver:<12} {gap:5.1%}  {'yes' if warm else 'no':>5}  {quantiles([ms for _, ms in runs])}"
                    f"  {mean_s:9.3f}    {proven}/{len(runs)}"
                )


def print_overlap(steps: list[list[int]], model: ReplicaTimeModel) -> None:
    """Print how long a step waits for its dispatch where the one before takes half a second."""
    waits = []
    limits = [group.max_tokens for group in GROUPS]

    def solve(lengths: list[int]) -> None:
        dispatch(GROUPS, bucket_boundaries(lengths, limits=limits), model)

    with ThreadPoolExecutor(1) as thread:
        pending = thread.submit(solve, steps[0])
        for position in range(len(steps)):
            start = time.perf_counter()
            pending.result()
            waits.append((time.perf_counter() - start) * 1e3)
            if position + 1 < len(steps):
                pending = thread.submit(solve, steps[position + 1])
            time.sleep(0.5)
    print(
        f"\nBackground thread, steps of 0.5 s: the first waits {waits[0]:.1f} ms, "
        f"the others {max(waits[1:]):.2f} ms or less"
    )


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="steps drawn")
    parser.add_argument("--sequences", type=int, default=800, help="sequences of a step")
    parser.add_argument("--buckets", type=int, default=16)
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the stored profile")
    arguments = parser.parse_args()
    model, description = find_model(arguments.data)
    steps = [draw_step(seed, arguments.sequences) for seed in range(arguments.steps)]
    bucketings = [bucket_boundaries(lengths, arguments.buckets) for lengths in steps]
    print(" ".join(map(str, GROUPS)))
    print(f"{len(steps)} steps of {arguments.sequences} sequences, {arguments.buckets} buckets")
    print(f"replica times: {description}")
    print(f"PuLP {pulp.__version__}, Python {platform.python_version()}, {platform.machine()}")
    print_bucketing(steps)
    print_policies(bucketings, model)
    print_parts(bucketings, model)
    print_solvers(bucketings, model)
    print_overlap(steps[:6], model)


if __name__ == "__main__":
    main()
