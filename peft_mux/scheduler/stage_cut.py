"""How many layers each stage of a pipeline has: balanced by predicted cost, under the memory of each stage.

The pace of a pipeline is that of its slowest stage (second term of M Eq. 4). All layers cost the same, but the first
stage has the embedding besides and the last one the head with the loss, so that equal numbers of layers are not equal
work. The cut is chosen for the mean micro-batch of all tasks together; it stays while tasks come and go, as a model
that is cut cannot change.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from peft_mux.scheduler.admission import least_pass_tokens
from peft_mux.scheduler.cost_model import CostModel
from peft_mux.scheduler.loads import TaskLoad
from peft_mux.scheduler.memory import MemoryModel, split_layers
from peft_mux.scheduler.planner_values import MICRO_BATCHES_PER_STAGE, MOST_DOUBLINGS

_SAME = 1e-9
"""Relative difference below which two latencies are one."""


def balanced_layers(
    stage_s: Callable[[int, int], float], num_layers: int, most: Sequence[int], *, least: int = 1
) -> tuple[int, ...]:
    """Return the layers of each stage that make the slowest stage fastest; among such, as equal as can be.

    A stage's latency grows with its layers, so that giving one layer after another to the stage that is fastest with
    it makes the least maximum. Under that maximum every stage has a greatest number of layers; giving one after another
    to the stage with the fewest makes them as equal as can be (least sum of squares), the first stages taking more.

    Args:
        stage_s: seconds of a stage (from 0) with a number of layers; grows with it.
        num_layers: of the backbone.
        most: layers that each stage has room for.
        least: layers that each stage needs.

    Raises:
        ValueError: where the stages have room for fewer layers than there are, or need more.

    Example:
        >>> balanced_layers(lambda stage, layers: layers + 2.0 * (stage == 1), 8, (8, 8))
        (5, 3)
    """
    stages = range(len(most))
    if least * len(most) > num_layers or min(most) < least or sum(most) < num_layers:
        raise ValueError(
            f"{num_layers} layers are to be cut into stages of {least} layers or more with room for {tuple(most)};"
            " allowed: room for all layers, and layers for all stages. Take another number of stages."
        )

    def filled(most: Sequence[int], preferred: Callable[[int, int], float]) -> list[int]:
        layers = [least] * len(most)
        for _ in range(num_layers - least * len(most)):
            open_stages = [stage for stage in stages if layers[stage] < most[stage]]
            layers[min(open_stages, key=lambda stage: preferred(stage, layers[stage] + 1))] += 1
        return layers

    slowest_s = max(stage_s(stage, count) for stage, count in enumerate(filled(most, stage_s)))
    bound_s = slowest_s * (1 + _SAME)
    allowed = [max(n for n in range(least, most[stage] + 1) if stage_s(stage, n) <= bound_s) for stage in stages]
    return tuple(filled(allowed, lambda stage, layers: float(layers)))


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
        loads: of all tasks; without any, layers are as equal as can be.
        cost: predicts seconds; its own layers do not count.
        memory: predicts bytes; likewise.
        limit_bytes: of a device; `None` for no limit.
        max_tokens: of a pass, as asked for.
        num_chunks: virtual stages of a device, each of which needs a layer.
    """
    num_layers, num_stages = cost.shape.num_layers, cost.num_stages
    if not loads or num_stages == 1:
        return split_layers(num_layers, num_stages)
    count = MICRO_BATCHES_PER_STAGE * num_stages
    terms = cost.stage_terms(loads, count)

    def stage_s(stage: int, layers: int) -> float:
        return terms.stage_s(layers, is_first=stage == 0, is_last=stage == num_stages - 1)

    most_layers = num_layers - num_chunks * (num_stages - 1)
    if limit_bytes is None:
        return balanced_layers(stage_s, num_layers, (most_layers,) * num_stages, least=num_chunks)
    longest = least_pass_tokens(loads)
    smallest = min(max_tokens, sum(load.tokens for load in loads) / (count * 2 ** (MOST_DOUBLINGS - 1)))
    for tokens, is_filled in ((max(longest, smallest), True), (longest, False)):
        room = _Room(loads, memory, tokens, is_filled=is_filled)
        most = [room.most_layers(stage, limit_bytes, most_layers) for stage in range(num_stages)]
        if min(most) >= num_chunks and sum(most) >= num_layers:
            return balanced_layers(stage_s, num_layers, most, least=num_chunks)
    least_room = _Room(loads, memory, longest, is_filled=False)
    return balanced_layers(least_room.bytes, num_layers, (most_layers,) * num_stages, least=num_chunks)


class _Room:
    """What stages hold with a number of layers, whatever the others have."""

    def __init__(self, loads: Sequence[TaskLoad], memory: MemoryModel, tokens: float, *, is_filled: bool) -> None:
        self.loads, self.memory, self.tokens, self.is_filled = loads, memory, tokens, is_filled

    def bytes(self, stage: int, layers: int) -> float:
        """Return the most that a stage holds at once."""
        num_stages = self.memory.num_stages
        others = split_layers(self.memory.shape.num_layers - layers, num_stages - 1)
        cut = replace(self.memory, layers_per_stage=(*others[:stage], layers, *others[stage:]))
        in_flight = num_stages - stage if self.is_filled else 1
        return cut.peak_bytes(self.loads, self.tokens, in_flight, stage)

    def most_layers(self, stage: int, limit_bytes: int, most: int) -> int:
        """Return the most layers with which a stage holds its limit; 0 where none does."""
        return max((layers for layers in range(1, most + 1) if self.bytes(stage, layers) <= limit_bytes), default=0)
