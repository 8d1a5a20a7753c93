"""Prints how LobRA's plans depend on tasks, GPUs and buckets, next to L Appendix B (Tables 6, 8 to 10, Figures 11, 12).

python -m benchmarks.lobra.sensitivity           half a minute, one thread
python -m benchmarks.lobra.sensitivity --data FOLDER --seeds 3 --steps 5

The folder is that of `benchmarks.lobra.steps`: the published profile of Llama2-7B. The paper's Tables 6, 9 and 10 and
its Figure 11 are of a 70B model, whose profile is not published: shapes of curves can be compared with it, seconds
cannot. Every time is that of the time model.

1. Plans differ as lengths are drawn by mean and skewness alone: what is long decides on the largest replica, and
   CommitPackFt, which the paper gives a <4,1>, has nothing here that the smallest does not hold.
2. As in the paper, with the fewest GPUs both have room for the largest replica alone and are equal; with more, equal
   replicas cost more and more a step, and unequal ones hardly more than with few.
3. In the paper too the step's time is as good as constant from R = 12 on, while padding still shrinks: Eq. 3 rounds up
   what each replica has of a bucket, and more buckets are rounded more often.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence

import numpy as np

from benchmarks.harness import Table
from benchmarks.lobra.steps import (
    BATCHES_IN_SAMPLE,
    NUM_GPUS,
    SIX_TASKS,
    Inputs,
    all_lengths,
    layout,
    lognormal,
    parsed,
    step_gpu_seconds,
)
from peft_mux.scheduler.deployment.baselines import lobra_sequential, task_fused, task_sequential
from peft_mux.scheduler.deployment.search import plan_deployment
from peft_mux.scheduler.deployment.space import joint_sample
from peft_mux.scheduler.dispatching.bucketing import bucket_boundaries

LOBRA_SEQUENTIAL_7B = (
    "<1,1>x4, <1,4>x2, <4,1>x1",
    "<1,1>x6, <2,1>x1, <8,1>x1",
    "<1,1>x6, <2,1>x1, <8,1>x1",
    "<1,1>x10, <2,1>x1, <4,1>x1",
    "<1,4>x2, <8,1>x1",
    "<2,1>x2, <4,1>x1, <8,1>x1",
)
"""L Table 8, in the order of the six tasks."""
SAVED_70B = (34.54, 61.91, 46.89, 40.91, 42.85, 45.04)
"""L Table 6, percent of Task-Sequential's GPU seconds, in the same order; of a 70B model on 64 GPUs."""
NUMBERS_OF_GPUS = (8, 16, 24, 32, 48, 64)
NUMBERS_OF_BUCKETS = (4, 6, 8, 12, 16, 24, 32)


def print_alone(inputs: Inputs, seed: int) -> None:
    """Print what unequal replicas gain for each task alone."""
    print(f"1. Each task alone on {NUM_GPUS} GPUs, next to L Tables 6 and 8; lognormal lengths, seed {seed}")
    tasks = inputs.tasks(lognormal, np.random.default_rng(seed), BATCHES_IN_SAMPLE)
    equal = task_sequential(tasks, NUM_GPUS, inputs.model)
    planned = lobra_sequential(tasks, NUM_GPUS, inputs.model)
    table = Table("task:<26", "saved %:>8.1f", "70B %:>6.1f", "here:<32", "L Table 8:<28")
    for index, task in enumerate(tasks):
        saved = 100 * (1 - planned.step_s[index] / equal.step_s[index])
        ours = layout(planned.deployments[index])
        table.row(task.name, saved, SAVED_70B[index], ours, LOBRA_SEQUENTIAL_7B[index])


def print_scale(inputs: Inputs, seed: int) -> None:
    """Print GPU seconds over numbers of GPUs, and of tasks."""
    print(
        f"2. GPU seconds of a step over GPUs and tasks, next to L Figure 11 (70B there); lognormal lengths, seed {seed}"
    )
    tasks = inputs.tasks(lognormal, np.random.default_rng(seed), BATCHES_IN_SAMPLE)
    table = Table(
        "tasks:>5", "GPUs:>4", "Task-Fused:>10.1f", "LobRA:>8.1f", "saved %:>8.1f", "equal replicas:<16", "LobRA's:<1"
    )
    sizes = [*((tasks, num_gpus) for num_gpus in NUMBERS_OF_GPUS)]
    sizes += [(tasks[:number], NUM_GPUS) for number in range(2, len(SIX_TASKS))]
    for some, num_gpus in sizes:
        fused = task_fused(some, num_gpus, inputs.model)
        plan = plan_deployment(*joint_sample(some), num_gpus, inputs.model)
        saved = 100 * (1 - plan.gpu_seconds / fused.gpu_seconds)
        seconds = fused.gpu_seconds, plan.gpu_seconds
        table.row(len(some), num_gpus, *seconds, saved, layout(fused.deployments[0]), plan.layout)


def print_buckets(inputs: Inputs, seeds: Sequence[int], num_steps: int) -> None:
    """Print the step's time, the padding and the seconds of dispatching over numbers of buckets.

    Args:
        inputs: the published profile and tables.
        seeds: seeds of the drawn lengths.
        num_steps: batches that are drawn for each seed.
    """
    print(
        f"3. Buckets (R), next to L Figure 12; {len(seeds)} seeds from 0, {num_steps} drawn batches each, 7B, 16 GPUs"
    )
    rows: dict[int, list[tuple[float, float, float]]] = {number: [] for number in NUMBERS_OF_BUCKETS}
    for seed in seeds:
        rng = np.random.default_rng(seed)
        tasks = inputs.tasks(lognormal, rng, BATCHES_IN_SAMPLE)
        groups = plan_deployment(*joint_sample(tasks), NUM_GPUS, inputs.model).groups
        limits = [group.max_tokens for group in groups]
        for _ in range(num_steps):
            lengths = all_lengths(inputs.tasks(lognormal, rng, 1))
            for number in NUMBERS_OF_BUCKETS:
                start = time.perf_counter()
                gpu_s = step_gpu_seconds(groups, lengths, NUM_GPUS, inputs.model, num_buckets=number)
                solved_s = time.perf_counter() - start
                bucketing = bucket_boundaries(lengths, number, limits=limits)
                padding = bucketing.padding_tokens / bucketing.padded_tokens
                rows[number].append((gpu_s, padding, solved_s))
    table = Table("R:>3", "step time / that of R = 4:>25.3f", "padding %:>9.1f", "bucketing and dispatch ms:>25.1f")
    base_s = [gpu_s for gpu_s, _, _ in rows[NUMBERS_OF_BUCKETS[0]]]
    for number, figures in rows.items():
        ratio = statistics.mean(gpu_s / least for (gpu_s, _, _), least in zip(figures, base_s, strict=True))
        padding = 100 * statistics.mean(padding for _, padding, _ in figures)
        solved_ms = 1e3 * statistics.median(seconds for _, _, seconds in figures)
        table.row(number, ratio, padding, solved_ms)


def main() -> None:
    """Print three tables."""
    inputs, seeds, num_steps = parsed("LobRA's planner over tasks, GPUs and buckets", num_seeds=3)
    print_alone(inputs, 0)
    print_scale(inputs, 0)
    print_buckets(inputs, seeds, num_steps)
    print(__doc__)


if __name__ == "__main__":
    main()
