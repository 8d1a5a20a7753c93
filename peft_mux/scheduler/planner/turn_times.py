"""`TurnTimes`: what groups of passes take under tensor parallelism, sums charged as far as turns do not hide them.

Every group is run through Algorithm 1's order on a compute and a communication stream (M §3.4.2,
`peft_mux.scheduler.subgraphs.passes`), the order in which the engine runs it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from peft_mux.scheduler.costs.latency import CostModel
from peft_mux.scheduler.costs.sums.pass_parts import PassParts
from peft_mux.scheduler.planner.values import TurnPlan
from peft_mux.scheduler.subgraphs.groups import GroupedPass, neighbour_groups, turn_groups
from peft_mux.scheduler.subgraphs.passes import Direction, Stretch, pass_times, turns_timeline

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
