"""Compares task fusion (M Eq. 6) with the best of all partitions, by simulation.

    python -m benchmarks.planner.fusion                     a minute, one thread

Every instance draws its tasks' tokens per micro-batch (log-uniform, 32 to 4,096), its stages, micro-batches and the
tokens that saturate a stage. A stage takes launch + max(tokens, saturation) * slope, plus adapters by M Eq. 3. All set
partitions of the tasks are judged by the simulation of 1F1B: forward and backward of a micro-batch take the same time,
hTasks run in descending latency, all micro-batches of an hTask in a row (M §3.4.1).
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from benchmarks.harness import Table
from peft_mux.scheduler.pipeline.simulator import simulate
from peft_mux.scheduler.pipeline.template import build_template
from peft_mux.scheduler.plan import BucketLoad
from peft_mux.scheduler.planner.fusion import cheapest_partition, fuse

LAUNCH_S, TOKEN_S = 1.6e-3, 70e-6
"""Seconds of a forward pass through all layers of an invented device for a 7B backbone, and of a token."""
ADAPTER_LAUNCH_S, ADAPTER_TOKEN_S, ADAPTER_TOKENS = 0.3e-3, 2e-6, 2048
"""The same of one task's adapters; as many tokens fill the device with one adapter: utilisation 1."""
Partition = Sequence[Sequence[int]]


class Instance(NamedTuple):
    """Tasks on a pipeline.

    Attributes:
        tokens: of a micro-batch of each task, ascending.
        num_stages: S, all equal.
        num_micro_batches: C of every task.
        saturation_tokens: below as many, a pass takes as long as with them.
    """

    tokens: tuple[int, ...]
    num_stages: int
    num_micro_batches: int
    saturation_tokens: int

    @classmethod
    def drawn(cls, draw: random.Random, num_tasks: int) -> Instance:
        """Draw tokens, stages, micro-batches and saturation."""
        tokens = sorted(round(math.exp(draw.uniform(math.log(32), math.log(4096)))) for _ in range(num_tasks))
        return cls(tuple(tokens), draw.choice([1, 2, 4]), draw.choice([2, 4, 8]), draw.choice([256, 512, 1024]))

    def stage_s(self, tasks: Sequence[int]) -> float:
        """Return the latency of a stage for the hTask of `tasks` (M Eq. 3)."""
        tokens = [self.tokens[task] for task in tasks]
        base_s = LAUNCH_S + max(sum(tokens), self.saturation_tokens) * TOKEN_S
        alone_s = [ADAPTER_LAUNCH_S + max(n, ADAPTER_TOKENS) * ADAPTER_TOKEN_S for n in tokens]
        weighted_s = sum(min(1, n / ADAPTER_TOKENS) * each for n, each in zip(tokens, alone_s, strict=True))
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

    def makespan_s(self, stage_s: Sequence[float]) -> float:
        """Return the makespan of one iteration; `stage_s` is the latency of one pass of each hTask, descending."""
        stages = self.num_stages
        loads = [
            BucketLoad(
                name=f"{number}",
                forward_s=(each,) * stages,
                activation_bytes=(1,) * stages,
                num_micro_batches=self.num_micro_batches,
            )
            for number, each in enumerate(stage_s)
        ]
        return simulate(build_template(loads, "1f1b"), loads).makespan_s

    def partition_s(self, partition: Partition) -> float:
        """Return the makespan of the hTasks of a partition."""
        return self.makespan_s(sorted((self.stage_s(tasks) for tasks in partition), reverse=True))

    def best_s(self) -> float:
        """Return the least makespan; partitions whose lower bound is above it are not simulated.

        The last stage computes every pass (M Appendix A, lemma 2), starts after the first hTask came through all the
        others, and the gradient of some last micro-batch has as far to go back.
        """
        bounded = []
        for partition in set_partitions(range(len(self.tokens))):
            stage_s = sorted((self.stage_s(tasks) for tasks in partition), reverse=True)
            bound_s = 2 * self.num_micro_batches * sum(stage_s) + (self.num_stages - 1) * (stage_s[0] + stage_s[-1])
            bounded.append((bound_s, stage_s))
        best_s = math.inf
        for bound_s, stage_s in sorted(bounded):
            if bound_s * (1 - 1e-12) >= best_s:
                break
            best_s = min(best_s, self.makespan_s(stage_s))
        return best_s

    def fused(self, *, charges_longest: bool, knows_count: bool) -> Partition:
        """Return what `fuse` chooses, or Eq. 6 with the lowest hTask charged whole.

        The share of the others is C / (S - 1 + C), which for C = 1 is the 1 / S of Eq. 6.
        """
        number, latency_s = self.num_micro_batches if knows_count else 1, self.latency_s()
        if charges_longest:
            intervals = fuse(latency_s, self.num_stages, num_micro_batches=number)
        else:
            cost = number / (self.num_stages - 1 + number) * latency_s
            # Only the lowest hTask begins with task 0, so that charging it whole keeps the charges additive.
            cost[0] = latency_s[0]
            intervals = cheapest_partition(cost) or ()
        return [range(start, stop) for start, stop in intervals]


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


CHOICES: dict[str, Callable[[Instance], Partition]] = {
    "Eq. 6 as printed": lambda instance: instance.fused(charges_longest=False, knows_count=False),
    "lowest whole, share by C": lambda instance: instance.fused(charges_longest=False, knows_count=True),
    "longest whole, share 1/S": lambda instance: instance.fused(charges_longest=True, knows_count=False),
    "longest whole, share by C": lambda instance: instance.fused(charges_longest=True, knows_count=True),
    "all in one hTask": lambda instance: [range(len(instance.tokens))],
    "each task an hTask": lambda instance: [[task] for task in range(len(instance.tokens))],
}


def main() -> None:
    """Print the makespan of each choice divided by the makespan of the best partition."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--instances", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for num_tasks in ((2, 7), (7, 7)):
        draw = random.Random(options.seed)
        instances = [Instance.drawn(draw, draw.randint(*num_tasks)) for _ in range(options.instances)]
        best_s = [instance.best_s() for instance in instances]
        print(
            f"\n{options.instances} instances of {num_tasks[0]} to {num_tasks[1]} tasks: makespan over the best of all"
        )
        table = Table("choice:<26", "median:>8.4f", "90 %:>8.4f", "worst:>8.4f", "median, S > 1:>14.4f")
        for name, choose in CHOICES.items():
            ratios = [tasks.partition_s(choose(tasks)) / least for tasks, least in zip(instances, best_s, strict=True)]
            pipelined = [ratio for tasks, ratio in zip(instances, ratios, strict=True) if tasks.num_stages > 1]
            ninetieth = statistics.quantiles(ratios, n=10, method="inclusive")[-1]
            table.row(name, statistics.median(ratios), ninetieth, max(ratios), statistics.median(pipelined))


if __name__ == "__main__":
    main()
