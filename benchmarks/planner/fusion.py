"""Compares task fusion with the best of all partitions, by simulation, and times it on many tasks.

python -m benchmarks.planner.fusion                     about 15 seconds, one thread

Every instance draws its tasks' tokens per micro-batch (log-uniform, 32 to 4,096), its stages, micro-batches and the
tokens that saturate a stage. A stage takes launch + max(tokens, saturation) * slope, plus adapters by M Eq. 3. All set
partitions of the tasks are judged by a 1F1B simulation: forward and backward of a micro-batch take the same time, a
ready backward comes first, hTasks run in descending latency, all micro-batches of an hTask in a row (M §3.4.1).
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from peft_mux.scheduler.planner.fusion import cheapest_partition, fuse, group

PERCENT = 0.02
"""What the median may be above the best of all partitions."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """An invented but plausible device for a 7B backbone: seconds of one forward pass through all layers.

    Attributes:
        saturation_tokens: below as many, a pass takes as long as with them.
        launch_s: of all base operators.
        token_s: of one token.
        adapter_launch_s: of one task's adapters.
        adapter_token_s: of one token in one task's adapters.
        adapter_saturation_tokens: as many tokens fill the device with one adapter: utilisation 1.
    """

    saturation_tokens: int
    launch_s: float = 1.6e-3
    token_s: float = 70e-6
    adapter_launch_s: float = 0.3e-3
    adapter_token_s: float = 2e-6
    adapter_saturation_tokens: int = 2048


@dataclass(frozen=True, slots=True)
class Instance:
    """Tasks on a pipeline.

    Attributes:
        tokens: of a micro-batch of each task, ascending.
        num_stages: S, all equal.
        num_micro_batches: C of every task.
        hardware: that the stages run on.
    """

    tokens: tuple[int, ...]
    num_stages: int
    num_micro_batches: int
    hardware: Hardware

    def stage_s(self, tasks: Sequence[int]) -> float:
        """Return the latency of a stage for the hTask of `tasks` (M Eq. 3)."""
        hardware = self.hardware
        tokens = [self.tokens[task] for task in tasks]
        base_s = hardware.launch_s + max(sum(tokens), hardware.saturation_tokens) * hardware.token_s
        full = hardware.adapter_saturation_tokens
        alone_s = [hardware.adapter_launch_s + max(n, full) * hardware.adapter_token_s for n in tokens]
        weighted_s = sum(min(1, n / full) * each for n, each in zip(tokens, alone_s, strict=True))
        return (base_s + max(weighted_s, *alone_s)) / self.num_stages

    def latency_s(self) -> np.ndarray:
        """Return the latency of every hTask of consecutive tasks (M Eq. 4), [M, M]."""
        count = len(self.tokens)
        latency = np.full((count, count), np.inf)
        passes = 2 * (self.num_stages - 1 + self.num_micro_batches)
        for start in range(count):
            for last in range(start, count):
                latency[start, last] = passes * self.stage_s(range(start, last + 1))
        return latency

    def stage_latencies_s(self, partition: Sequence[Sequence[int]]) -> list[float]:
        """Return the stage latency of every hTask, descending."""
        return sorted((self.stage_s(tasks) for tasks in partition), reverse=True)


def draw_instance(draw: random.Random, num_tasks: tuple[int, int]) -> Instance:
    """Draw tokens, stages, micro-batches and saturation."""
    tokens = [round(math.exp(draw.uniform(math.log(32), math.log(4096)))) for _ in range(draw.randint(*num_tasks))]
    return Instance(
        tokens=tuple(sorted(tokens)),
        num_stages=draw.choice([1, 2, 4]),
        num_micro_batches=draw.choice([2, 4, 8]),
        hardware=Hardware(saturation_tokens=draw.choice([256, 512, 1024])),
    )


def simulate(stage_s: Sequence[float], num_stages: int, num_micro_batches: int, *, eager: bool) -> float:
    """Return the makespan of one iteration.

    Args:
        stage_s: latency of one pass of each hTask through any stage, in the order in which they run.
        num_stages: of the pipeline.
        num_micro_batches: of each hTask.
        eager: whether a stage starts every ready forward; else stage s of S holds at most S - s micro-batches (1F1B).
    """
    pass_s = [each for each in stage_s for _ in range(num_micro_batches)]
    count = len(pass_s)
    forward_end = [[math.inf] * count for _ in range(num_stages)]
    backward_end = [[math.inf] * count for _ in range(num_stages)]
    forwards, backwards, free_at = [0] * num_stages, [0] * num_stages, [0.0] * num_stages
    events = [0.0]
    while backwards[0] < count:
        now = heapq.heappop(events)
        for stage in range(num_stages):
            if free_at[stage] > now:
                continue
            turn, following = backwards[stage], forwards[stage]
            gradient_at = backward_end[stage + 1] if stage + 1 < num_stages else forward_end[stage]
            if turn < count and gradient_at[turn] <= now:
                free_at[stage] = backward_end[stage][turn] = now + pass_s[turn]
                backwards[stage] += 1
            elif (
                following < count
                and (eager or following - turn < num_stages - stage)
                and (stage == 0 or forward_end[stage - 1][following] <= now)
            ):
                free_at[stage] = forward_end[stage][following] = now + pass_s[following]
                forwards[stage] += 1
            else:
                continue
            heapq.heappush(events, free_at[stage])
    return free_at[0]


def set_partitions(items: Sequence[int]) -> Iterator[list[list[int]]]:
    """Yield every partition of `items` into any number of sets."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for partition in set_partitions(rest):
        yield [[first], *partition]
        for place in range(len(partition)):
            yield [*partition[:place], [first, *partition[place]], *partition[place + 1 :]]


def best_makespan_s(instance: Instance, partitions: Iterator[list[list[int]]], *, eager: bool) -> float:
    """Return the least makespan; partitions whose lower bound is above it are not simulated.

    The last stage computes every pass (M Appendix A, lemma 2), starts after the first hTask came through all the
    others, and the gradient of some last micro-batch has as far to go back.
    """
    stages, number = instance.num_stages, instance.num_micro_batches

    def lower_bound_s(stage_s: Sequence[float]) -> float:
        return 2 * number * sum(stage_s) + (stages - 1) * (stage_s[0] + stage_s[-1])

    candidates = [instance.stage_latencies_s(partition) for partition in partitions]
    best_s = math.inf
    for bound_s, stage_s in sorted((lower_bound_s(stage_s), stage_s) for stage_s in candidates):
        if bound_s * (1 - 1e-12) >= best_s:
            break
        best_s = min(best_s, simulate(stage_s, stages, number, eager=eager))
    return best_s


def contiguous_partitions(count: int) -> Iterator[list[list[int]]]:
    """Yield every partition of 0..count-1 into consecutive ranges."""
    for bits in range(2 ** (count - 1)):
        cuts = [0, *(place + 1 for place in range(count - 1) if bits >> place & 1), count]
        yield [list(range(start, stop)) for start, stop in zip(cuts[:-1], cuts[1:], strict=True)]


def fused_makespan_s(instance: Instance, charged_whole: str, *, knows_c: bool, eager: bool) -> float:
    """Return the simulated makespan of what `fuse` chooses, or Eq. 6 with the lowest hTask charged whole.

    The share of the others is C / (S - 1 + C), which for C = 1 is the 1 / S of Eq. 6.
    """
    number, latency_s = instance.num_micro_batches if knows_c else 1, instance.latency_s()
    if charged_whole == "longest":
        intervals = fuse(latency_s, instance.num_stages, num_micro_batches=number)
    else:
        cost = number / (instance.num_stages - 1 + number) * latency_s
        # Only the lowest hTask begins with task 0, so that charging it whole keeps the charges additive.
        cost[0] = latency_s[0]
        intervals = cheapest_partition(cost) or ()
    stage_s = instance.stage_latencies_s([range(start, stop) for start, stop in intervals])
    return simulate(stage_s, instance.num_stages, instance.num_micro_batches, eager=eager)


Judge = Callable[[Instance, bool], float]

CHOICES: dict[str, Judge] = {
    "Eq. 6 as printed": lambda one, eager: fused_makespan_s(one, "lowest", knows_c=False, eager=eager),
    "lowest whole, share by C": lambda one, eager: fused_makespan_s(one, "lowest", knows_c=True, eager=eager),
    "longest whole, share 1/S": lambda one, eager: fused_makespan_s(one, "longest", knows_c=False, eager=eager),
    "longest whole, share by C": lambda one, eager: fused_makespan_s(one, "longest", knows_c=True, eager=eager),
    "all in one hTask": lambda one, eager: simulate(
        [one.stage_s(range(len(one.tokens)))], one.num_stages, one.num_micro_batches, eager=eager
    ),
    "each task an hTask": lambda one, eager: simulate(
        one.stage_latencies_s([[task] for task in range(len(one.tokens))]),
        one.num_stages,
        one.num_micro_batches,
        eager=eager,
    ),
    "best of consecutive": lambda one, eager: best_makespan_s(one, contiguous_partitions(len(one.tokens)), eager=eager),
}


def print_distribution(instances: Sequence[Instance], *, eager: bool) -> None:
    """Print makespan over the best of all partitions, for each way to fuse, over subsets of the instances."""
    best = [best_makespan_s(one, set_partitions(range(len(one.tokens))), eager=eager) for one in instances]
    subsets = {
        "all": range(len(instances)),
        "S = 1": [index for index, one in enumerate(instances) if one.num_stages == 1],
        "S > 1": [index for index, one in enumerate(instances) if one.num_stages > 1],
    }
    heads = "".join(f"{f'{name} ({len(chosen)})':^27}" for name, chosen in subsets.items())
    print(f"\n  {'':26}{heads}\n  {'':26}" + f"{'median':>9}{'p90':>9}{'worst':>9}" * len(subsets))
    for name, judge in CHOICES.items():
        ratios = [judge(one, eager) / least for one, least in zip(instances, best, strict=True)]
        cells = []
        for chosen in subsets.values():
            some = sorted(ratios[index] for index in chosen)
            ranks = (statistics.median(some), some[math.ceil(0.9 * len(some)) - 1], some[-1]) if some else ()
            cells += [f"{value:9.4f}" for value in ranks]
        median = statistics.median(ratios)
        print(f"  {name:<26}{''.join(cells)}  {'within' if median <= 1 + PERCENT else 'above'} 2% in the median")


def synthetic_latency_s(num_tasks: int, num_stages: int, num_micro_batches: int) -> np.ndarray:
    """Return an [M, M] latency of base operators alone, for timing."""
    draw = np.random.default_rng(num_tasks)
    ends = np.concatenate(([0.0], np.cumsum(np.sort(np.exp(draw.uniform(math.log(32), math.log(4096), num_tasks))))))
    hardware = Hardware(saturation_tokens=512)
    tokens = np.maximum(ends[None, 1:] - ends[:-1, None], hardware.saturation_tokens)
    return 2 * (num_stages - 1 + num_micro_batches) * (hardware.launch_s + tokens * hardware.token_s) / num_stages


def print_times() -> None:
    """Print how long fusion and grouping take."""
    print("\nseconds of one call of fuse(), one thread")
    for num_tasks in (64, 256, 1000):
        for num_stages, number in ((1, 4), (4, 4), (8, 16)):
            latency = synthetic_latency_s(num_tasks, num_stages, number)
            start = time.perf_counter()
            fusion = fuse(latency, num_stages, num_micro_batches=number)
            seconds = time.perf_counter() - start
            print(f"  {num_tasks:5} tasks, S {num_stages}, C {number:2}: {seconds:7.4f}  {len(fusion)} hTasks")
    print("\nseconds of group(), every number of buckets: slowest call and all calls")
    for num_htasks in (10, 64):
        draw = random.Random(num_htasks)
        latencies_s = [draw.uniform(0.01, 0.02) for _ in range(num_htasks)]
        calls = []
        for num_buckets in range(1, num_htasks + 1):
            start = time.perf_counter()
            group(latencies_s, num_buckets)
            calls.append(time.perf_counter() - start)
        print(f"  {num_htasks:5} hTasks: {max(calls):7.4f}  {sum(calls):7.4f}")


def main() -> None:
    """Print the distributions and the times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print("makespan / best of all partitions, by simulation")
    for num_tasks in ((2, 7), (7, 7)):
        draw = random.Random(arguments.seed)
        instances = [draw_instance(draw, num_tasks) for _ in range(arguments.instances)]
        tasks = f"{num_tasks[0]} to {num_tasks[1]} tasks" if num_tasks[0] < num_tasks[1] else f"{num_tasks[0]} tasks"
        for eager in (False, True):
            launching = "every ready forward starts" if eager else "1F1B, at most S - s micro-batches on stage s"
            print(f"\n{arguments.instances} instances of {tasks}; {launching}", end="")
            print_distribution(instances, eager=eager)
    print_times()


if __name__ == "__main__":
    main()
