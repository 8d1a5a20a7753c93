"""How many layers each stage of a pipeline has: balanced by predicted cost, under the memory of each stage.

The pace of a pipeline is that of its slowest stage (second term of M Eq. 4). Equal numbers of layers are not equal
work: the first stage also has the embedding and the last one the head with the loss, and layers below the lowest
adapters of all tasks have no backward. The cut is chosen for the mean micro-batch of all tasks together; it stays while
tasks come and go, because a model that is cut cannot change.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from peft_mux.data.packing.passes import PassRules, cut_into_passes
from peft_mux.scheduler.costs.latency import CostModel
from peft_mux.scheduler.costs.loads import TaskLoad, split_layers
from peft_mux.scheduler.costs.memory import MemoryModel
from peft_mux.scheduler.planner.planned_passes import task_rows
from peft_mux.scheduler.planner.planner import MOST_PER_STAGE, least_pass_tokens
from peft_mux.scheduler.units import RELATIVE_ROUNDING

_MICRO_BATCHES_PER_STAGE = 4
"""C over S of a common pipeline (M Appendix A), for which layers are cut into stages."""
_LEAST_TOKENS_PART = _MICRO_BATCHES_PER_STAGE / MOST_PER_STAGE
"""The smallest micro-batches that stages are cut for, which the planner tries, over those of a common pipeline."""


def balanced_layers(
    stage_s: Callable[[int, int, int], float], num_layers: int, most: Sequence[int], *, least: int = 1
) -> tuple[int, ...]:
    """Return the layers of each stage that make the slowest stage fastest; among such, as equal as can be.

    Both are found by dynamic programming over the stages: first the seconds of the slowest, then, of the cuts under
    which no stage takes longer, the one with the least sum of squares, the first stages taking more.

    Args:
        stage_s: a function that returns the seconds of a stage (from 0), given its lowest layer (from 0) and the number
            of its layers.
        num_layers: layers of the backbone.
        most: the most layers that each stage has room for; together at least `num_layers`.
        least: the fewest layers that each stage needs.

    Example:
        >>> balanced_layers(lambda stage, first, layers: layers + 2.0 * (stage == 1), 8, (8, 8))
        (5, 3)
    """
    slowest_s, _ = _best_cut(stage_s, max, num_layers, most, least)
    # Latencies that are equal on paper may differ by rounding, which must not keep a cut from being even.
    bound_s = slowest_s + RELATIVE_ROUNDING * abs(slowest_s)

    def inequality(stage: int, first: int, layers: int) -> float:
        return math.inf if stage_s(stage, first, layers) > bound_s else float(layers * layers)

    return _best_cut(inequality, operator.add, num_layers, most, least)[1]


def _best_cut(
    stage_cost: Callable[[int, int, int], float],
    joined: Callable[[float, float], float],
    num_layers: int,
    most: Sequence[int],
    least: int,
) -> tuple[float, tuple[int, ...]]:
    """Return the least joined cost of all stages, and the cut that has it; of several, that with most layers first."""
    best: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, ())}
    for stage, room in enumerate(most):
        best_up_to: dict[int, tuple[float, tuple[int, ...]]] = {}
        for first, (cost, fewer) in best.items():
            for layers in range(least, min(room, num_layers - first) + 1):
                # Layers are counted downwards, so that the least of equal costs has most of them first.
                cut = joined(cost, stage_cost(stage, first, layers)), (*fewer, -layers)
                best_up_to[first + layers] = min(cut, best_up_to.get(first + layers, cut))
        best = best_up_to
    cost, negative = best[num_layers]
    return cost, tuple(-layers for layers in negative)


def choose_layers(
    loads: Sequence[TaskLoad],
    cost: CostModel,
    memory: MemoryModel,
    limit_bytes: int | None,
    *,
    max_tokens: int,
    num_chunks: int = 1,
) -> tuple[int, ...]:
    """Return how many layers each stage shall have.

    The fastest of the cuts is taken under which memory holds all tasks with the smallest micro-batches that the planner
    tries and as many of them in flight as 1F1B has: smaller micro-batches cost less than unequal stages. If no cut
    does, the same with one in flight; if none does either, the cut whose fullest stage is the least full, and the
    planner lets tasks wait.

    Args:
        loads: the loads of all tasks; without any rows, layers are as equal as can be.
        cost: predicts seconds; how its own layers are cut does not count.
        memory: predicts bytes; how its own layers are cut does not count.
        limit_bytes: memory of a device that may be filled, in bytes; `None` for no limit.
        max_tokens: the most tokens of a pass, as asked for.
        num_chunks: virtual stages of a device, each of which needs a layer.
    """
    num_layers, num_stages = cost.shape.num_layers, cost.num_stages
    if num_stages == 1 or not any(load.lengths for load in loads):
        return split_layers(num_layers, num_stages)
    count = _MICRO_BATCHES_PER_STAGE * num_stages
    # Virtual stages of a device are not adjacent, so that none of its layers are known to be below all adapters.
    timed = loads if num_chunks == 1 else [replace(load, lowest_layer=0) for load in loads]
    passes = cut_into_passes([task_rows(load) for load in timed], PassRules(), bound=max_tokens, num_passes=count)
    layer_by_layer = replace(cost, num_stages=num_layers, layers_per_stage=())
    # Less the overhead of a pass, which each stage pays once, however many layers it has.
    layers_s = layer_by_layer.passes_s(timed, passes).mean(axis=0) - cost.profile.pass_s
    before_s = list(itertools.accumulate(layers_s.tolist(), initial=0.0))

    def stage_s(_: int, first: int, layers: int) -> float:
        return before_s[first + layers] - before_s[first]

    @cache
    def held_bytes(stage: int, layers: int, tokens: float, in_flight: int) -> int:
        # Only this stage is read, but a cut has to name the layers of all.
        others = split_layers(num_layers - layers, num_stages - 1)
        cut = replace(memory, layers_per_stage=(*others[:stage], layers, *others[stage:]))
        return cut.peak_bytes(loads, tokens, in_flight, stage)

    # Each of the other stages needs a layer for each of its virtual stages.
    most = num_layers - num_chunks * (num_stages - 1)
    if limit_bytes is None:
        return balanced_layers(stage_s, num_layers, (most,) * num_stages, least=num_chunks)
    longest = least_pass_tokens(loads)
    smallest = max(longest, min(max_tokens, _LEAST_TOKENS_PART * sum(load.tokens for load in loads) / count))
    for tokens, is_filled in ((smallest, True), (longest, False)):
        room = [0] * num_stages
        for stage in range(num_stages):
            in_flight = num_stages - stage if is_filled else 1
            while room[stage] < most and held_bytes(stage, room[stage] + 1, tokens, in_flight) <= limit_bytes:
                room[stage] += 1
        if min(room) >= num_chunks and sum(room) >= num_layers:
            return balanced_layers(stage_s, num_layers, room, least=num_chunks)
    return balanced_layers(
        lambda stage, _, layers: held_bytes(stage, layers, longest, 1),
        num_layers,
        (most,) * num_stages,
        least=num_chunks,
    )
