"""Prints LobRA's time model, plans and savings next to the figures of the paper (PVLDB 18(8), 2616-2625).

python -m benchmarks.lobra                       about 2 minutes, one thread
python -m benchmarks.lobra --data FOLDER --seeds 3 --steps 5

The folder holds what its authors published: the time of one layer of Llama2-7B by tensor parallel degree, length and
micro-batch (`profile_time_llama_7B.csv`), the most tokens of a micro-batch (`max_tokens_llama_7B_6tasks.csv`), their
experiment (`exp_task6.json`) and the tables of the paper (`paper_tables.json`). Nothing here runs on a GPU: every time
is that of the time model.

1. Sends between stages, embedding and head are in no layer's time, and so missing with more stages.
2. "over 4K" is the share of tokens in sequences longer than 4096, the work that <4,1> and <8,1> must share: a
   distribution with more of it wants a <4,1>, so that mean and skewness alone do not settle the plan. Where all
   candidates lead to pipelines, the model's error there (table 1, by stages) has a part in it.
3. The paper does not give its fixed boundaries. Equal steps of 1024 tokens pad short sequences most; those that are
   optimal for the sample leave little for dynamic bucketing to save. Lengths are lognormal, of the published mean and
   skewness, but are not the published data, and a step has no exchange of gradients. The paper: LobRA is 1.32-1.44x as
   fast as LobRA-Sequential, over three models. What a step costs besides its layers (exchange, optimizer, starting up)
   is paid once for each task there, and is not in the model. Where configurations of Task-Sequential differ from L
   Table 7, the drawn lengths are shorter than the contexts of the paper's data, or a pipeline is faster by the model.
4. The paper solves every deployment that its filter leaves, with SCIP; here bounds without premises settle most of
   them, exactly for Eq. 2 within the gap of 0.5 %. With few GPUs the start of CBC is the larger part. The paper's 70B
   candidates reach <16,1>, these <8,1>, so that plans differ. "step s" is Eq. 10-12 for the expected batch, "Eq. 2 s"
   what is minimised: its ceilings charge each replica one sequence of every bucket, too much where replicas outnumber
   long sequences; plans that it finds equal are then ordered as if sequences were divisible.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness import Table
from benchmarks.paths import SHARED_DATA
from peft_mux.scheduler.deployment.baselines import lobra_sequential, task_fused, task_sequential
from peft_mux.scheduler.deployment.search import plan_deployment
from peft_mux.scheduler.deployment.space import TaskLengths, count_plans
from peft_mux.scheduler.dispatching.bucketing import (
    DEFAULT_INTERVAL_TOKENS,
    DEFAULT_NUM_BUCKETS,
    bucket_boundaries,
    fixed_bucketing,
)
from peft_mux.scheduler.dispatching.dispatch import dispatch
from peft_mux.scheduler.parallel_layout import ParallelConfig
from peft_mux.scheduler.replicas.time_model import (
    ReplicaGroup,
    ReplicaTimeModel,
    fit_layer,
    in_rank_order,
    read_layer_profile,
    read_max_tokens,
)

NUM_LAYERS = 32
NUM_GPUS = 16
BATCHES_IN_SAMPLE = 100
SIX_TASKS = (
    "databricks-dolly-15k",
    "Evol-Instruct",
    "XSum",
    "CommitPackFt",
    "MeetingBank",
    "python_code_instructions",
)
"""In the order of exp_task6.json."""
TASK_SEQUENTIAL_7B = ("<4,1>x4", "<8,1>x2", "<8,1>x2", "<4,1>x4", "<8,1>x2", "<8,1>x2")
"""L Table 7, in the same order."""
PUBLISHED_SAVINGS = (
    ("unequal replicas, length-based dispatch", 18.94),
    ("+ balanced dispatch", 36.65),
    ("+ dynamic bucketing", 45.03),
)
"""L Figure 8 and section 5.3, percent of Task-Fused's GPU seconds."""

Sampler = Callable[[np.random.Generator, float, float, int], np.ndarray]


def lognormal(rng: np.random.Generator, mean: float, skewness: float, number: int) -> np.ndarray:
    """Draw from the lognormal distribution of this mean and skewness.

    Args:
        rng: the source of the draws.
        mean: mean of the distribution.
        skewness: skewness of the distribution, above 0.
        number: how many values are drawn.
    """
    low, high = 1.0, 1e3  # skewness = (w + 2) sqrt(w - 1) with w = exp(sigma^2), which rises in w
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if (middle + 2) * np.sqrt(middle - 1) < skewness else (low, middle)
    variance = np.log(low)
    return rng.lognormal(np.log(mean) - variance / 2, np.sqrt(variance), number)


def gamma(rng: np.random.Generator, mean: float, skewness: float, number: int) -> np.ndarray:
    """Draw from the gamma distribution of this mean and skewness, which is 2 / sqrt(shape).

    Args:
        rng: the source of the draws.
        mean: mean of the distribution.
        skewness: skewness of the distribution, above 0.
        number: how many values are drawn.
    """
    shape = 4 / skewness**2
    return rng.gamma(shape, mean / shape, number)


SAMPLERS: dict[str, Sampler] = {"lognormal": lognormal, "gamma": gamma}


def draw(
    sampler: Sampler, rng: np.random.Generator, moments: tuple[float, float], longest: int, number: int
) -> list[int]:
    """Draw lengths of 1 to `longest` tokens by mean and skewness; longer ones are drawn again.

    Args:
        sampler: the distribution, by its mean and skewness.
        rng: the source of the draws.
        moments: mean and skewness of the lengths before the longest are drawn again.
        longest: most tokens of a length.
        number: how many lengths are drawn.
    """
    lengths: list[int] = []
    while len(lengths) < number:
        drawn = np.maximum(np.ceil(sampler(rng, *moments, number)), 1)
        lengths += drawn[drawn <= longest].astype(int).tolist()
    return lengths[:number]


class Inputs:
    """What the folder holds.

    Args:
        folder: holds what the paper's authors published.

    Attributes:
        tables: the tables of the paper, by name.
        contexts: tokens of the longest sequence of each of the six tasks.
        fits: the curve of one layer, by tensor parallel degree.
        model: the time model of the replicas that the paper could deploy.
    """

    def __init__(self, folder: Path) -> None:
        self.tables: dict[str, Any] = json.loads((folder / "paper_tables.json").read_text())
        self.contexts = [task["context_length"] for task in json.loads((folder / "exp_task6.json").read_text())["task"]]
        self.fits = fit_layer(read_layer_profile(folder / "profile_time_llama_7B.csv"))
        self.model = ReplicaTimeModel(self.fits, NUM_LAYERS, read_max_tokens(folder / "max_tokens_llama_7B_6tasks.csv"))

    def tasks(self, sampler: Sampler, rng: np.random.Generator, num_batches: int) -> list[TaskLengths]:
        """Draw the six tasks of the 7B experiment.

        Args:
            sampler: the distribution of lengths, by its mean and skewness.
            rng: the source of the draws.
            num_batches: how many batches of each task are drawn.
        """
        published = self.tables["table4_datasets_mean_skew_kurt_batch"]
        tasks = []
        for name, longest in zip(SIX_TASKS, self.contexts, strict=True):
            mean, skewness, _, batch = published[name]
            lengths = draw(sampler, rng, (mean, skewness), longest, num_batches * batch)
            tasks.append(TaskLengths(name, tuple(lengths), batch))
        return tasks


def all_lengths(tasks: Sequence[TaskLengths]) -> list[int]:
    """Return the lengths of all tasks, one task after another."""
    return [length for task in tasks for length in task.lengths]


def layout(groups: Sequence[ReplicaGroup]) -> str:
    """Return replicas in the paper's notation, in one order wherever they come from."""
    return ", ".join(map(str, in_rank_order(groups)))


def published_layout(rows: Sequence[Sequence[Any]]) -> str:
    """Return replicas as the stored tables have them in the paper's notation."""
    return layout([ReplicaGroup(ParallelConfig(*config), count, 0) for config, count in rows])


def print_time_model(inputs: Inputs) -> None:
    """Print how well the time model fits its measurements, and the steps of L Table 11."""
    print("1. Time model: one layer, and whole steps next to L Table 11 (16 GPUs, 64 sequences of one length)")
    for tp, fit in inputs.fits.items():
        print(f"   tp {tp}: mean error {fit.mean_relative_error:5.1%} over the measurements of a layer")
    print()
    table = Table("config:<8", "replicas:>8", "length:>7", "model s:>8.3f", "paper s:>8.3f", "error:>+7.1%")
    errors: dict[int, list[float]] = {}
    for tp, pp, replicas, length, chunks, seconds, _ in inputs.tables[
        "table11_7B_16gpu_batch64_tp_pp_dp_seq_chunks_lobra_nemo_s"
    ]:
        config = ParallelConfig(tp, pp)
        sequences = 64 // replicas
        max_tokens = sequences // chunks * length
        times = ReplicaTimeModel(inputs.fits, NUM_LAYERS, {config: max_tokens})
        predicted = times.step_s(config, [sequences], [length], max_tokens)
        errors.setdefault(pp, []).append(predicted / seconds - 1)
        table.row(str(config), replicas, length, predicted, seconds, errors[pp][-1])
    flat = [abs(error) for group in errors.values() for error in group]
    print(f"   mean |error| {statistics.mean(flat):.1%} over {len(flat)} rows, largest {max(flat):.1%} (target: 5 %)")
    by_stages = ", ".join(f"{pp}: {statistics.mean(group):+.1%}" for pp, group in sorted(errors.items()))
    print(f"   Mean error by stages {by_stages}.")


def print_plans(inputs: Inputs, seeds: Sequence[int]) -> None:
    """Print which plans the drawn lengths lead to, and how often it is that of L Table 2."""
    published = inputs.tables["table2_end_to_end"]["7B_16xA100-40"]
    wanted = published_layout(published["lobra"])
    print(f"2. The 7B plan of {NUM_GPUS} GPUs next to L Table 2: {wanted}")
    table = Table(
        "lengths:<10", "seed:>4", "candidates:<12", "plan:<40", "step s:>7.3f", "over 4K:>8.1%", "as in Table 2:<3"
    )
    matches: dict[tuple[str, bool], list[bool]] = {}
    for name, sampler in SAMPLERS.items():
        for seed in seeds:
            tasks = inputs.tasks(sampler, np.random.default_rng(seed), BATCHES_IN_SAMPLE)
            batch = sum(task.batch_size for task in tasks)
            lengths = np.array(all_lengths(tasks))
            over_4k = lengths[lengths > 4096].sum() / lengths.sum()
            for proposal in (True, False):
                plan = plan_deployment(lengths.tolist(), batch, NUM_GPUS, inputs.model, proposal=proposal)
                matches.setdefault((name, proposal), []).append(plan.layout == wanted)
                kind = f"{len(plan.configurations)} " + ("proposed" if proposal else "(all)")
                agrees = "yes" if matches[name, proposal][-1] else "no"
                table.row(name, seed, kind, plan.layout, plan.expected_step_s, over_4k, agrees)
    for (name, proposal), agreed in matches.items():
        kind = "proposed" if proposal else "all"
        print(f"   {name}, {kind} candidates: {sum(agreed)} of {len(agreed)} as in Table 2")


def uniform_boundaries(
    max_length: int, num_buckets: int = DEFAULT_NUM_BUCKETS, interval: int = DEFAULT_INTERVAL_TOKENS
) -> tuple[int, ...]:
    """Return boundaries at equal distances up to `max_length`, each a multiple of `interval` except the last.

    Fewer than `num_buckets` if there are fewer intervals.
    """
    num_intervals = -(-max_length // interval)
    ends = [-(-num_intervals * bucket // num_buckets) * interval for bucket in range(1, num_buckets + 1)]
    return tuple(sorted({min(end, max_length) for end in ends}))


def step_gpu_seconds(
    groups: Sequence[ReplicaGroup],
    lengths: Sequence[int],
    num_gpus: int,
    time_model: ReplicaTimeModel,
    *,
    boundaries: Sequence[int] | None = None,
    num_buckets: int = DEFAULT_NUM_BUCKETS,
    **options: Any,
) -> float:
    """Return the predicted GPU seconds of one drawn step on a deployment, idle GPUs included.

    Args:
        groups: the replicas that are deployed, by configuration.
        lengths: lengths of the sequences of this step, in tokens.
        num_gpus: GPUs that are paid for, idle ones included.
        time_model: predicts the seconds of one replica.
        boundaries: fixed padded lengths in tokens; by default they are chosen for the step (L Eq. 4).
        num_buckets: most buckets if boundaries are chosen (R in L).
        options: further options of `dispatch`.
    """
    if boundaries is None:
        bucketing = bucket_boundaries(lengths, num_buckets, limits=[group.max_tokens for group in groups])
    else:
        bucketing = fixed_bucketing(lengths, boundaries)
    return dispatch(groups, bucketing, time_model, **options).makespan_s * num_gpus


@dataclass(frozen=True, slots=True)
class Savings:
    """Mean GPU seconds of a step over the drawn batches of one seed.

    Attributes:
        fixed: Task-Fused, length-based and balanced dispatch, for each kind of fixed boundaries.
        chosen: each way with boundaries chosen for the step, by the name of the way.
        configurations: the replicas of each task under Task-Sequential.
    """

    fixed: dict[str, tuple[float, float, float]]
    chosen: dict[str, float]
    configurations: tuple[str, ...]


def savings_of_seed(inputs: Inputs, seed: int, num_steps: int) -> Savings:
    """Plan every way on a sample, then dispatch batches that are drawn apart from it.

    Args:
        inputs: the published profile and tables.
        seed: seed of the drawn lengths.
        num_steps: batches that are drawn to be dispatched.
    """
    rng = np.random.default_rng(seed)
    tasks = inputs.tasks(lognormal, rng, BATCHES_IN_SAMPLE)
    steps = [inputs.tasks(lognormal, rng, 1) for _ in range(num_steps)]

    def joint_s(groups: Sequence[ReplicaGroup], **options: Any) -> float:
        """Return the mean GPU seconds of a step where all tasks share a deployment."""
        costs = [step_gpu_seconds(groups, all_lengths(step), NUM_GPUS, inputs.model, **options) for step in steps]
        return statistics.mean(costs)

    def separate_s(deployments: Sequence[Sequence[ReplicaGroup]], **options: Any) -> float:
        """Return the same where tasks take turns, each on its own deployment."""
        costs = [
            sum(
                step_gpu_seconds(groups, task.lengths, NUM_GPUS, inputs.model, **options)
                for groups, task in zip(deployments, step, strict=True)
            )
            for step in steps
        ]
        return statistics.mean(costs)

    plan = plan_deployment(all_lengths(tasks), sum(task.batch_size for task in tasks), NUM_GPUS, inputs.model)
    fused = task_fused(tasks, NUM_GPUS, inputs.model).deployments[0]
    alone = task_sequential(tasks, NUM_GPUS, inputs.model).deployments
    planned_alone = lobra_sequential(tasks, NUM_GPUS, inputs.model).deployments
    longest = max(inputs.contexts)
    of_sample = (*(boundary for boundary in plan.bucketing.boundaries if boundary < longest), longest)
    fixed = {
        kind: (
            joint_s(fused, policy="uniform", boundaries=boundaries),
            joint_s(plan.groups, policy="length", boundaries=boundaries),
            joint_s(plan.groups, boundaries=boundaries),
        )
        for kind, boundaries in (("equal steps", uniform_boundaries(longest)), ("of the sample", of_sample))
    }
    chosen = {
        "LobRA": joint_s(plan.groups),
        "Task-Fused": joint_s(fused, policy="uniform"),
        "Task-Sequential": separate_s(alone, policy="uniform"),
        "LobRA-Sequential": separate_s(planned_alone),
    }
    return Savings(fixed, chosen, tuple(map(layout, alone)))


def print_savings(inputs: Inputs, seeds: Sequence[int], num_steps: int) -> None:
    """Print what each way saves with fixed boundaries, and then how they compare with chosen ones.

    Args:
        inputs: the published profile and tables.
        seeds: seeds of the drawn lengths.
        num_steps: batches that are drawn for each seed.
    """
    print(f"3. GPU seconds a step, six tasks on {NUM_GPUS} GPUs, as L Figure 8; lognormal lengths, {len(seeds)} seeds")
    print(f"   from 0, {num_steps} drawn batches each; percent saved of Task-Fused with the same fixed boundaries")
    savings_of_seeds = [savings_of_seed(inputs, seed, num_steps) for seed in seeds]
    _print_fixed(savings_of_seeds)
    _print_chosen(savings_of_seeds)


def _print_fixed(savings_of_seeds: Sequence[Savings]) -> None:
    """Print GPU seconds with fixed boundaries next to L Figure 8."""
    table = Table(
        "fixed boundaries:<16", "way:<38", "GPU s:>7.1f", "saved %:>8.2f", "range:>16", "paper %:>8.2f", "apart:>+6.1f"
    )
    for kind in savings_of_seeds[0].fixed:
        costs = np.array([[*savings.fixed[kind], savings.chosen["LobRA"]] for savings in savings_of_seeds])
        saved = 100 * (1 - costs / costs[:, :1])
        table.row(kind, "Task-Fused", costs[:, 0].mean(), *4 * [""])
        for index, (name, percent) in enumerate(PUBLISHED_SAVINGS, start=1):
            column = saved[:, index]
            spread = f"{column.min():.2f} to {column.max():.2f}"
            saved_percent = column.mean()
            table.row("", name, costs[:, index].mean(), saved_percent, spread, percent, saved_percent - percent)


def _print_chosen(savings_of_seeds: Sequence[Savings]) -> None:
    """Print GPU seconds with boundaries chosen for each step, and the configurations next to L Table 7."""
    print()
    table = Table("boundaries chosen for each step:<31", "GPU s:>7.1f", "over LobRA:>10.2f", "range:>14")
    for name in savings_of_seeds[0].chosen:
        costs = [savings.chosen[name] for savings in savings_of_seeds]
        ratios = [savings.chosen[name] / savings.chosen["LobRA"] for savings in savings_of_seeds]
        spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
        table.row(name, statistics.mean(costs), statistics.mean(ratios), spread)
    print()
    table = Table("Task-Sequential:<26", "L Table 7:<9", "here, by seed:<13")
    for index, (task, theirs) in enumerate(zip(SIX_TASKS, TASK_SEQUENTIAL_7B, strict=True)):
        ours = "; ".join(dict.fromkeys(savings.configurations[index] for savings in savings_of_seeds))
        table.row(task, theirs, ours)


def print_planning_times(inputs: Inputs, seed: int) -> None:
    """Print how long planning takes over numbers of GPUs.

    Args:
        inputs: the published profile and tables.
        seed: seed of the drawn lengths.
    """
    print(f"4. Planning time next to L Table 5 (70B there, 7B here), lognormal lengths, seed {seed}")
    tasks = inputs.tasks(lognormal, np.random.default_rng(seed), BATCHES_IN_SAMPLE)
    lengths, batch = all_lengths(tasks), sum(task.batch_size for task in tasks)
    table = Table(
        "GPUs:>4", "deployments:>11", "tried:>6", "ours s:>7.2f", "paper s:>8.2f", "step s:>7.3f", "Eq. 2 s:>8.3f",
        "plan:<1",
    )  # fmt: skip
    for num_gpus in (16, 32, 64, 128, 256):
        start = time.perf_counter()
        plan = plan_deployment(lengths, batch, num_gpus, inputs.model)
        seconds, stats = time.perf_counter() - start, plan.statistics
        _, _, paper_s, _ = inputs.tables["table5_70B_plan_seconds_none_proposal_both"][str(num_gpus)]
        predicted_s = plan.expected_step_s, plan.candidates[0].step_s or 0.0
        table.row(num_gpus, stats.num_enumerated, stats.num_solved, seconds, paper_s, *predicted_s, plan.layout)
    sizes = [config.num_gpus for config in inputs.model.configurations]
    print(f"   Without the proposal 256 GPUs have {count_plans(256, sizes):.2e} deployments; that is refused.")


def parsed(description: str, num_seeds: int) -> tuple[Inputs, range, int]:
    """Return what the command line gives: the folder's contents, seeds, and batches for each seed in table 3."""
    parser = argparse.ArgumentParser(description=description)
    data = SHARED_DATA / "lobra"
    parser.add_argument("--data", type=Path, default=data, help="folder of the published profile and tables")
    parser.add_argument("--seeds", type=int, default=num_seeds, help="how many seeds, from 0")
    parser.add_argument("--steps", type=int, default=5, help="batches for each seed in table 3")
    options = parser.parse_args()
    if not options.data.is_dir():
        parser.error(f"--data is {options.data}, which is no folder; give the one with paper_tables.json")
    return Inputs(options.data), range(options.seeds), options.steps


def main() -> None:
    """Print four tables."""
    inputs, seeds, num_steps = parsed("LobRA's planner next to the figures of the paper", num_seeds=5)
    print_time_model(inputs)
    print_plans(inputs, seeds)
    print_savings(inputs, seeds, num_steps)
    print_planning_times(inputs, 0)
    print(__doc__)
