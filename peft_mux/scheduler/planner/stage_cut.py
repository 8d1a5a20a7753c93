"""How many layers each stage of a pipeline has: balanced by predicted cost, under the memory of each stage.

The pace of a pipeline is that of its slowest stage (second term of M Eq. 4). Equal numbers of layers are not equal
work: the first stage has the embedding besides and the last one the head with the loss, and layers below the lowest
adapters of the tasks have no backward. The cut is chosen for the mean micro-batch of all tasks together; it stays
while tasks come and go, as a model that is cut cannot change.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache

from peft_mux.scheduler.costs.latency import CostModel
from peft_mux.scheduler.costs.loads import TaskLoad
from peft_mux.scheduler.costs.memory import MemoryModel
from peft_mux.scheduler.costs.model_shape import split_layers
from peft_mux.scheduler.planner.admission import least_pass_tokens
from peft_mux.scheduler.planner.values import MICRO_BATCHES_PER_STAGE, MOST_DOUBLINGS

_SAME = 1e-9
"""Relative difference below which two latencies are one."""


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
        most: the most layers that each stage has room for.
        least: the fewest layers that each stage needs.

    Raises:
        ValueError: where the stages have room for fewer layers than there are, or need more.

    Example:
        >>> balanced_layers(lambda stage, first, layers: layers + 2.0 * (stage == 1), 8, (8, 8))
        (5, 3)
    """
    _check_room(num_layers, most, least)
    slowest_s, _ = _best_cut(stage_s, max, num_layers, most, least)
    # Latencies that are equal on paper may differ by rounding, which is not to keep a cut from being even.
    bound_s = slowest_s + _SAME * abs(slowest_s)

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
        found: dict[int, tuple[float, tuple[int, ...]]] = {}
        for first, (cost, fewer) in best.items():
            for layers in range(least, min(room, num_layers - first) + 1):
                # Layers are counted downwards, so that the least of equal costs has most of them first.
                cut = joined(cost, stage_cost(stage, first, layers)), (*fewer, -layers)
                found[first + layers] = min(cut, found.get(first + layers, cut))
        best = found
    cost, negative = best[num_layers]
    return cost, tuple(-layers for layers in negative)


def _check_room(num_layers: int, most: Sequence[int], least: int) -> None:
    """Refuse stages that have room for fewer layers than there are, or need more."""
    if least * len(most) > num_layers or min(most) < least or sum(most) < num_layers:
        raise ValueError(
            f"{num_layers} layers are to be cut into stages of {least} layers or more with room for {tuple(most)};"
            " allowed: room for all layers, and layers for all stages. Take another number of stages."
        )


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
    tries and as many of them in flight as 1F1B has: smaller micro-batches cost less than unequal stages. Where no cut
    does, the same with one in flight; where none does either, the cut whose fullest stage is the least full, and the
    planner lets tasks wait.

    Args:
        loads: the loads of all tasks; without any, layers are as equal as can be.
        cost: predicts seconds; how its own layers are cut does not count.
        memory: predicts bytes; how its own layers are cut does not count.
        limit_bytes: memory of a device that may be filled, in bytes; `None` for no limit.
        max_tokens: the most tokens of a pass, as asked for.
        num_chunks: virtual stages of a device, each of which needs a layer.
    """
    num_layers, num_stages = cost.shape.num_layers, cost.num_stages
    if not loads or num_stages == 1:
        return split_layers(num_layers, num_stages)
    count = MICRO_BATCHES_PER_STAGE * num_stages
    # Virtual stages of a device lie apart, so that none of its layers are known to be below all adapters.
    terms = cost.stage_terms(loads if num_chunks == 1 else [replace(load, lowest_layer=0) for load in loads], count)

    def stage_s(_: int, first: int, layers: int) -> float:
        return terms.stage_s(first, layers)

    # Each of the other stages needs a layer for each of its virtual stages.
    most = num_layers - num_chunks * (num_stages - 1)
    if limit_bytes is None:
        return balanced_layers(stage_s, num_layers, (most,) * num_stages, least=num_chunks)
    filled, single = _stage_memories(loads, memory, count, max_tokens)
    for held in (filled, single):
        room = [held.most_layers(stage, limit_bytes, most) for stage in range(num_stages)]
        if min(room) >= num_chunks and sum(room) >= num_layers:
            return balanced_layers(stage_s, num_layers, room, least=num_chunks)
    held_bytes = cache(single.peak_bytes)
    return balanced_layers(
        lambda stage, _, layers: held_bytes(stage, layers), num_layers, (most,) * num_stages, least=num_chunks
    )


def _stage_memories(
    loads: Sequence[TaskLoad], memory: MemoryModel, count: int, max_tokens: int
) -> tuple[_StageMemory, _StageMemory]:
    """Return what stages hold with the smallest micro-batches: as many in flight as in 1F1B, and one.

    Args:
        loads: the loads of all tasks.
        memory: predicts bytes; how its own layers are cut does not count.
        count: C, the number of micro-batches that the planner tries first.
        max_tokens: the most tokens of a pass, as asked for.
    """
    longest = least_pass_tokens(loads)
    # After all doublings of C that the planner tries.
    smallest = min(max_tokens, sum(load.tokens for load in loads) / (count * 2 ** (MOST_DOUBLINGS - 1)))
    return (
        _StageMemory(loads, memory, max(longest, smallest), is_filled=True),
        _StageMemory(loads, memory, longest, is_filled=False),
    )


class _StageMemory:
    """The bytes of a stage with a number of layers, whatever the other stages have.

    Args:
        loads: the loads of all tasks.
        memory: predicts bytes; how its own layers are cut does not count.
        tokens: tokens of a micro-batch.
        is_filled: whether as many micro-batches are in flight as in 1F1B; otherwise one is.
    """

    def __init__(self, loads: Sequence[TaskLoad], memory: MemoryModel, tokens: float, *, is_filled: bool) -> None:
        self.loads, self.memory, self.tokens, self.is_filled = loads, memory, tokens, is_filled

    def peak_bytes(self, stage: int, layers: int) -> float:
        """Return the most bytes that a stage holds at once.

        Args:
            stage: the stage, counted from 0.
            layers: layers that it has.
        """
        num_stages = self.memory.num_stages
        # Only this stage is read, but a cut has to name the layers of all.
        others = split_layers(self.memory.shape.num_layers - layers, num_stages - 1)
        cut = replace(self.memory, layers_per_stage=(*others[:stage], layers, *others[stage:]))
        in_flight = num_stages - stage if self.is_filled else 1
        return cut.peak_bytes(self.loads, self.tokens, in_flight, stage)

    def most_layers(self, stage: int, limit_bytes: int, most: int) -> int:
        """Return the most layers with which a stage stays within its limit; 0 where none does.

        Args:
            stage: the stage, counted from 0.
            limit_bytes: memory of a device that may be filled, in bytes.
            most: the number of layers up to which stages are tried.
        """
        return max(
            (layers for layers in range(1, most + 1) if self.peak_bytes(stage, layers) <= limit_bytes), default=0
        )
