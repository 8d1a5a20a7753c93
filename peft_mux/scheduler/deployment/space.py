"""Which deployments there are: tasks, candidate configurations, and every way to fill the GPUs with replicas of them.

This holds the first heuristic of L section 4.2 and Appendix A (configuration proposal) and the enumeration that follows
it. What a deployment is worth is found in `bounds.py` and `solve.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from peft_mux.scheduler.parallel_layout import ParallelConfig
from peft_mux.scheduler.replicas.facts import ReplicaFacts
from peft_mux.scheduler.replicas.time_model import ReplicaTimeModel

DEFAULT_NUM_MICRO_BATCHES = 16
"""Micro-batches over which throughputs are compared: many, as L Definition 1 asks, yet few enough to count a pipeline's
bubble."""
MOST_DEPLOYMENTS = 20_000
"""So many deployments can all be looked at in seconds."""
_PLANS_AT_ONCE = 65536
"""Deployments in a block, so that memory stays small however many there are."""


@dataclass(frozen=True, slots=True)
class TaskLengths:
    """What planning a deployment needs to know of a task.

    Attributes:
        name: name of the task, for messages.
        lengths: lengths of a sample of its sequences, in tokens.
        batch_size: sequences of the task in one step.
    """

    name: str
    lengths: tuple[int, ...]
    batch_size: int


def joint_sample(tasks: Sequence[TaskLengths]) -> tuple[list[int], int]:
    """Return one sample of the lengths of all tasks, each in proportion to its batch, and the batch of all together."""
    return joint_rows(tasks)[0], sum(task.batch_size for task in tasks)


def joint_rows(tasks: Sequence[TaskLengths]) -> tuple[list[int], list[int]]:
    """Return one sample of the lengths of all tasks, each in proportion to its batch, and the task of each length.

    Each task's sample is repeated in full, and the rest taken evenly along it, so that nothing is random.
    """
    # As many batches as the largest sample makes, so that no sample is cut.
    draws = max(-(-len(task.lengths) // task.batch_size) for task in tasks)
    lengths: list[int] = []
    task_numbers: list[int] = []
    for number, task in enumerate(tasks):
        wanted = draws * task.batch_size
        whole, rest = divmod(wanted, len(task.lengths))
        lengths += task.lengths * whole
        lengths += [task.lengths[index * len(task.lengths) // rest] for index in range(rest)]
        task_numbers += [number] * wanted
    return lengths, task_numbers


def candidate_configs(facts: ReplicaFacts, num_devices: int) -> tuple[ParallelConfig, ...]:
    """Return the configurations that can be deployed: shards by powers of two, on at most `num_devices`.

    Depths of pipelines are all those that leave the largest stage fewer layers than the next smaller depth does, as in
    L's <1,6> (Table 2). If deployments that mix replicas of so many sizes are too many to look at, depths are powers of
    two as well. `facts.supports` says which configurations the engine can run.
    """

    def of_depths(depths: Sequence[int]) -> tuple[ParallelConfig, ...]:
        degrees = [2**power for power in range(num_devices.bit_length())]
        every = (ParallelConfig(tp, pp) for tp in degrees for pp in depths if tp * pp <= num_devices)
        return tuple(sorted(filter(facts.supports, every), key=lambda config: (config.num_gpus, config)))

    most = min(num_devices, facts.shape.num_layers)
    layers = [-(-facts.shape.num_layers // depth) for depth in range(1, most + 1)]
    # The slowest stage sets the pace: a depth that leaves it as many layers only costs more devices and bubble.
    configs = of_depths([depth for depth in range(1, most + 1) if depth == 1 or layers[depth - 1] < layers[depth - 2]])
    if configs and count_plans(num_devices, [config.num_gpus for config in configs]) <= MOST_DEPLOYMENTS:
        return configs
    return of_depths([2**power for power in range(most.bit_length())])


def propose_configurations(
    time_model: ReplicaTimeModel,
    num_gpus: int,
    lengths: Sequence[int],
    *,
    num_micro_batches: int = DEFAULT_NUM_MICRO_BATCHES,
) -> tuple[ParallelConfig, ...]:
    """Return the configurations of highest throughput for some number of GPUs and length (L Appendix A, Table 3).

    A configuration competes on its own number of GPUs and on every multiple, on which it is replicated; ties go to
    fewer GPUs, then to the lower tensor parallel degree. The paper does not say at how many micro-batches it measures:
    with more of them the bubble of a pipeline weighs less.

    Args:
        time_model: predicts the seconds of one replica, and knows the configurations to choose from.
        num_gpus: GPUs of the whole deployment; replicas larger than that are left out.
        lengths: the sequence lengths at which throughputs are compared, in tokens.
        num_micro_batches: full micro-batches over which each throughput is taken.

    Raises:
        ValueError: for a length that no configuration supports.
    """
    fitting = configurations_that_fit(time_model, num_gpus, max(lengths))
    chosen: set[ParallelConfig] = set()
    for length in sorted(set(lengths)):
        rates = {
            config: time_model.throughput(config, length, num_micro_batches)
            for config in fitting
            if time_model.max_tokens[config] >= length
        }
        for size in {config.num_gpus for config in fitting}:
            # On a multiple of its GPUs a configuration is replicated, at the same tokens a GPU and second. max takes
            # the first of equal rates, and `fitting` is in the order in which ties go.
            rivals = [config for config in rates if size % config.num_gpus == 0]
            if rivals:
                chosen.add(max(rivals, key=rates.__getitem__))
    return tuple(config for config in fitting if config in chosen)


def configurations_that_fit(time_model: ReplicaTimeModel, num_gpus: int, longest: int) -> tuple[ParallelConfig, ...]:
    """Return all configurations of at most `num_gpus` GPUs, by GPUs and then by tensor parallel degree.

    Raises:
        ValueError: if none of them supports a sequence of `longest` tokens.
    """
    fitting = tuple(config for config in time_model.configurations if config.num_gpus <= num_gpus)
    supported = max((time_model.max_tokens[config] for config in fitting), default=0)
    if longest > supported:
        raise ValueError(
            f"the longest sequence must have at most {supported} tokens, the most that a replica on {num_gpus} GPUs "
            f"supports, got {longest}. Truncate the sequences, or use more GPUs."
        )
    return fitting


def benchmark_lengths(time_model: ReplicaTimeModel, longest: int) -> tuple[int, ...]:
    """Return the lengths of L Table 3: what each configuration supports, up to the first that holds `longest`."""
    limits = sorted(set(time_model.max_tokens.values()))
    return tuple(limit for index, limit in enumerate(limits) if index == 0 or limits[index - 1] < longest)


def count_plans(num_gpus: int, sizes: Sequence[int]) -> int:
    """Return how many deployments `enumerate_plans` yields, without making them.

    Args:
        num_gpus: GPUs of the whole deployment (N in L).
        sizes: GPUs of one replica of each configuration (n_i in L).
    """
    return _count_plans(tuple(sorted(sizes, reverse=True)), num_gpus)


# Prefixes that leave equally many GPUs ask for the same counts.
@lru_cache(maxsize=65536)
def _count_plans(sizes: tuple[int, ...], left: int) -> int:
    """Return the number of plans by dynamic programming over descending sizes."""
    if len(sizes) == 1:
        return 1
    return sum(_count_plans(sizes[1:], left - used) for used in range(0, left + 1, sizes[0]))


def enumerate_plans(num_gpus: int, sizes: Sequence[int], *, at_once: int = _PLANS_AT_ONCE) -> Iterator[np.ndarray]:
    """Yield all deployments that leave no room for one more replica: replicas of each size, lazily in blocks.

    L Eq. 2 allows GPUs to idle (sum p_i n_i <= N); Appendix A partitions N. Both meet here: GPUs idle only if they are
    fewer than the smallest replica needs. Nothing is lost by that, as an added replica may stay without sequences and
    so makes no deployment slower. A block is int64 of shape `(plans, len(sizes))`.

    Args:
        num_gpus: GPUs of the whole deployment (N in L).
        sizes: GPUs of one replica of each configuration (n_i in L).
        at_once: about how many deployments a block has at most.
    """
    # From the largest replicas down, so that only the last, smallest size is left no choice.
    descending = sorted(range(len(sizes)), key=lambda index: (-sizes[index], index))
    ordered = tuple(sizes[index] for index in descending)
    # The inverse permutation: columns go back to the order of `sizes`.
    back = np.argsort(descending)

    def blocks(left: int, prefix: tuple[int, ...]) -> Iterator[np.ndarray]:
        """Yield the plans with these counts of the first sizes, and all counts of the rest."""
        rest = ordered[len(prefix) :]
        if len(rest) == 1 or _count_plans(rest, left) <= at_once:
            tail = _all_plans(rest, left)
            yield np.concatenate([np.tile(np.array(prefix, dtype=np.int64), (len(tail), 1)), tail], axis=1)
            return
        for count in range(left // rest[0] + 1):
            yield from blocks(left - count * rest[0], (*prefix, count))

    for block in blocks(num_gpus, ()):
        yield block[:, back]


def _all_plans(sizes: tuple[int, ...], left: int) -> np.ndarray:
    """Return all plans over a few sizes at once; the last, smallest one takes all that the others leave."""
    plans = np.zeros((1, 0), dtype=np.int64)
    free = np.array([left], dtype=np.int64)
    for size in sizes[:-1]:
        choices = free // size + 1
        # Each row so far is repeated once for each count that it has room for: 0, 1, ..., free // size.
        starts = np.repeat(np.cumsum(choices) - choices, choices)
        counts = np.arange(len(starts)) - starts
        plans = np.concatenate([np.repeat(plans, choices, axis=0), counts[:, None]], axis=1)
        free = np.repeat(free, choices) - counts * size
    return np.concatenate([plans, (free // sizes[-1])[:, None]], axis=1)
