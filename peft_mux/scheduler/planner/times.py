"""`TurnTimes`: what groups of passes take under tensor parallelism, sums charged as far as turns do not hide them.

Every group is run through Algorithm 1's order on a compute and a communication stream (M §3.4.2,
`peft_mux.scheduler.subgraphs.passes`), the order in which the engine runs it.
"""

# MERGED: `SlotTimes`: seconds of the micro-batches of buckets on each stage, for plans, and for plans at other costs.

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from peft_mux.data.packing.passes import slot_of
from peft_mux.scheduler.costs.latency import CostModel
from peft_mux.scheduler.costs.sums import PassParts
from peft_mux.scheduler.planner.passes import CutHTask, slot_weights
from peft_mux.scheduler.planner.values import TurnPlan
from peft_mux.scheduler.subgraphs.passes import (
    Direction,
    GroupedPass,
    Stretch,
    neighbour_groups,
    pass_times,
    turn_groups,
    turns_timeline,
)

_FEW_LAYERS = (2, 4)
"""Layers that are simulated of deeper stages: after the first ones every further layer adds the same."""


class TurnMember(NamedTuple):
    """An hTask whose passes may take turns with those of others.

    Attributes:
        tasks: names of its tasks.
        num_passes: its passes of a step.
        parts: what a mean pass computes between its sums.
        pass_s: seconds of a mean pass with its sums in full.
    """

    tasks: Sequence[str]
    num_passes: int
    parts: PassParts
    pass_s: float


class TurnTimes:
    """Seconds of groups of passes.

    Args:
        cost: predicts the parts of passes; its profile tells what turns cost and hide.
        recomputes: whether activations are recomputed in the backward.
    """

    def __init__(self, cost: CostModel, *, recomputes: bool = False) -> None:
        """Know no group yet."""
        self.cost, self.recomputes, self.overlap = cost, recomputes, cost.profile.overlap
        self._known: dict[tuple[object, ...], float] = {}

    @property
    def is_known(self) -> bool:
        """Whether anything is known of what turns hide; else sums are charged in full."""
        return self.cost.devices_per_stage > 1 and self.overlap is not None

    def group_s(self, group: Sequence[PassParts], stage: int = 0, direction: Direction = "both") -> float:
        """Return the seconds of passes that take turns; a single one waits for each of its sums.

        Args:
            group: the parts of each pass.
            stage: the stage that they go through, counted from 0.
            direction: forward, backward, or both.
        """
        key = (tuple(group), stage, direction)
        if key not in self._known:
            self._known[key] = self._simulated_s(group, stage, direction)
        return self._known[key]

    def action_s(
        self,
        tasks: Sequence[Sequence[str]],
        parts: Sequence[PassParts],
        width: int,
        stage: int,
        direction: Direction,
    ) -> float:
        """Return the seconds of one action of a pipeline, whose passes take turns with their neighbours.

        Args:
            tasks: names of the tasks of each pass, in the order in which they run.
            parts: the parts of each pass on the stage.
            width: the most passes of a group.
            stage: the stage of the action, counted from 0.
            direction: forward or backward.
        """
        groups = neighbour_groups([GroupedPass(0, names) for names in tasks], width, may_repeat=self._may_repeat)
        return math.fsum(self.group_s([parts[index] for index in own], stage, direction) for own in groups)

    def bucket_s(self, members: Sequence[TurnMember], width: int) -> tuple[list[tuple[int, ...]], list[float]]:
        """Return the groups of a bucket's passes on one stage, by their places, and the seconds of each.

        Args:
            members: the hTasks of the bucket, in the order of the work.
            width: the most passes of a group.
        """
        passes = [member for member in members for _ in range(member.num_passes)]
        groups = turn_groups([GroupedPass(0, member.tasks) for member in passes], width, may_repeat=self._may_repeat)
        if not self.is_known:
            return groups, [math.fsum(passes[index].pass_s for index in own) for own in groups]
        return groups, [self.group_s([passes[index].parts for index in own]) for own in groups]

    @property
    def _may_repeat(self) -> bool:
        # On a GPU two passes of one task are never in a group: their streams would add to the same gradients.
        return self.cost.profile.device.startswith("cpu")

    def _simulated_s(self, group: Sequence[PassParts], stage: int, direction: Direction) -> float:
        num_layers = self.cost.layers_per_stage[stage]
        is_first, is_last = stage == 0, stage == self.cost.num_stages - 1
        whole = Stretch(num_layers, is_first, is_last, self.recomputes, direction)
        if num_layers <= _FEW_LAYERS[1]:
            return self._makespan_s(group, whole)
        few_s, more_s = (self._makespan_s(group, whole._replace(num_layers=count)) for count in _FEW_LAYERS)
        a_layer_s = (more_s - few_s) / (_FEW_LAYERS[1] - _FEW_LAYERS[0])
        return more_s + (num_layers - _FEW_LAYERS[1]) * a_layer_s

    def _makespan_s(self, group: Sequence[PassParts], stretch: Stretch) -> float:
        return turns_timeline([pass_times(parts, stretch) for parts in group], self.overlap).makespan_s


def turn_plan(width: int, parts: Sequence[PassParts], saved_s: float) -> TurnPlan | None:
    """Return what a plan tells of turns; `None` where passes run one after another.

    Args:
        width: the most passes that take turns.
        parts: what a mean pass of each hTask computes between its sums.
        saved_s: seconds of a step that turns save.
    """
    return TurnPlan(width, tuple(parts), max(0.0, saved_s)) if width > 1 else None


class SlotSeconds(NamedTuple):
    """Seconds of the C micro-batches of a bucket on each of the S stages.

    Attributes:
        forward_s: seconds of the forwards, `[C, S]`.
        backward_s: seconds of the backwards, `[C, S]`.
    """

    forward_s: NDArray[Any]
    backward_s: NDArray[Any]

    @property
    def fields(self) -> dict[str, Any]:
        """What a `BucketLoad` holds of them: those of the mean micro-batch, and what each takes over it."""
        return {
            "forward_s": tuple(map(float, self.forward_s.mean(axis=0))),
            "backward_s": tuple(map(float, self.backward_s.mean(axis=0))),
            "weights": slot_weights((self.forward_s + self.backward_s).sum(axis=1)),
        }


class SlotTimes:
    """Prices micro-batches, each of which holds passes of the hTasks of a bucket.

    Args:
        cost: predicts the seconds of each stage.
        width: the most passes of a micro-batch that take turns.
        recomputes: whether activations are recomputed in the backward.

    Attributes:
        turns: what passes in turns take.
    """

    def __init__(self, cost: CostModel, width: int, *, recomputes: bool = False) -> None:
        """Know no hTask yet."""
        self.cost, self.width = cost, width
        self.turns = TurnTimes(cost, recomputes=recomputes)
        self._parts: dict[CutHTask, tuple[PassParts, ...]] = {}
        self._fractions: dict[CutHTask, NDArray[Any]] = {}

    def parts_of(self, cut: CutHTask) -> tuple[PassParts, ...]:
        """Return what a mean pass of an hTask computes between its sums on each stage.

        Of mean passes, as few compositions of a micro-batch are then simulated, each once.

        Args:
            cut: the hTask, cut into passes.
        """
        if cut not in self._parts:
            stages = range(self.cost.num_stages)
            self._parts[cut] = tuple(self.cost.pass_parts(cut.loads, cut.num_passes, stage=stage) for stage in stages)
        return self._parts[cut]

    def bucket_s(self, cuts: Sequence[CutHTask], num_slots: int) -> SlotSeconds:
        """Return the seconds of each micro-batch of a bucket on each stage.

        Args:
            cuts: the hTasks of the bucket, in the order of the work.
            num_slots: C, micro-batches of the bucket.
        """
        if not self.turns.is_known:
            slots_s = [cut.slots_s(num_slots) for cut in cuts]
            pairs = zip(cuts, slots_s, strict=True)
            forward_s = np.sum([self._forward_fractions(cut) * own for cut, own in pairs], axis=0)
            return SlotSeconds(forward_s, np.sum(slots_s, axis=0) - forward_s)
        slots: list[list[CutHTask]] = [[] for _ in range(num_slots)]
        for cut in cuts:
            for chain in cut.chains:
                slots[slot_of(chain[0], len(cut.passes), num_slots)] += [cut] * len(chain)
        return SlotSeconds(self._in_turns_s(slots, "forward"), self._in_turns_s(slots, "backward"))

    def _forward_fractions(self, cut: CutHTask) -> NDArray[Any]:
        if cut not in self._fractions:
            self._fractions[cut] = self.cost.forward_fractions(cut.loads, cut.num_passes)
        return self._fractions[cut]

    def _in_turns_s(self, slots: Sequence[Sequence[CutHTask]], direction: Direction) -> NDArray[Any]:
        stages = range(self.cost.num_stages)
        return np.array([[self._action_s(own, stage, direction) for stage in stages] for own in slots])

    def _action_s(self, passes: Sequence[CutHTask], stage: int, direction: Direction) -> float:
        tasks = [[load.name for load in cut.loads] for cut in passes]
        parts = [self.parts_of(cut)[stage] for cut in passes]
        return self.turns.action_s(tasks, parts, self.width, stage, direction)
