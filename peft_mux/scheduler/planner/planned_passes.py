"""The real passes of an hTask: its rows cut by the engine's rules, and the cost of each pass.

M splits every global batch into C equal parts. Rows are whole, so that an hTask of few rows has fewer passes than C,
and these are unequal: what is planned here is cut by `peft_mux.data.packing.passes`, as every step of a run is.

`TurnTimes`: what the micro-batches of buckets take on each stage, whether or not their passes take turns.
Under tensor parallelism passes wait for sums over the devices of a stage. Passes that take turns hide them: a group of
them is run through Algorithm 1's order on a compute and a communication stream (M §3.4.2,
`peft_mux.scheduler.subgraphs`), the order in which the engine runs it, and sums are charged as far as they show.
Plans are made with these times, priced again at other costs (`peft_mux.planning.learning`), and compared with what
passes really took.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from peft_mux.data.packing.passes import (
    Member,
    PassRules,
    TaskRows,
    chains_of_passes,
    cut_into_passes,
    passes_meant,
    slot_of,
)
from peft_mux.scheduler.costs.latency import CostModel, PassWork
from peft_mux.scheduler.costs.loads import TaskLoad
from peft_mux.scheduler.plan import HTask, PassParts, PlannedPass
from peft_mux.scheduler.subgraphs import (
    Direction,
    Stretch,
    neighbour_groups,
    pass_times,
    turn_groups,
    turns_timeline,
)

_MOST_CUTS = 4
"""Times that an hTask is cut into as many passes as were found, until their number stays."""


@dataclass(frozen=True, slots=True, eq=False)
class CutHTask:
    """An hTask cut into passes.

    Attributes:
        loads: the loads of its tasks.
        passes: the members of each of its P passes; none if no rows are known.
        work: what these passes amount to.
        chains: for each chain the indices of its passes; a pass of whole rows is a chain by itself.
        forward_s: seconds of the forward of each pass on each stage, `[P, S]`.
        stage_s: seconds of each pass on each stage, forward and backward, `[P, S]`.
        tokens: tokens of each pass.
    """

    loads: Sequence[TaskLoad]
    passes: Sequence[Sequence[Member]]
    work: PassWork
    chains: Sequence[Sequence[int]]
    forward_s: NDArray[Any]
    stage_s: NDArray[Any]
    tokens: Sequence[int]

    @property
    def num_passes(self) -> int:
        """P; 1 if no rows are known."""
        return max(1, len(self.passes))

    @property
    def num_chains(self) -> int:
        """Micro-batches that its passes fill, as the passes of a chain stay together; 1 if no rows are known."""
        return max(1, len(self.chains))

    @property
    def held_tokens(self) -> int:
        """Tokens that memory is kept for: the largest chain, or the longest row that may come, which stays whole."""
        largest = max((sum(self.tokens[number] for number in chain) for chain in self.chains), default=0)
        return max(largest, *(load.longest for load in self.loads))

    @property
    def mean_tokens(self) -> float:
        """Mean tokens of a pass."""
        return sum(self.tokens) / self.num_passes

    @property
    def pass_s(self) -> float:
        """Mean seconds of a pass, forward and backward through all stages one after another."""
        return float(self.stage_s.sum()) / self.num_passes


def cut_htask(
    loads: Sequence[TaskLoad],
    cost: CostModel,
    rules: PassRules,
    max_tokens: int,
    num_passes: int,
    *,
    stable: bool = True,
) -> CutHTask:
    """Cut an hTask into about so many passes, and predict their seconds.

    Args:
        loads: the loads of its tasks.
        cost: predicts the seconds of each stage.
        rules: whether and how long rows are cut.
        max_tokens: the most tokens of a pass.
        num_passes: the number of passes that is meant.
        stable: whether to cut until cutting into as many passes as were found finds as many again, as a plan needs.
    """
    rows = [task_rows(load) for load in loads]
    for _ in range(_MOST_CUTS if stable else 1):
        passes = cut_into_passes(rows, rules, bound=max_tokens, num_passes=num_passes)
        if len(passes) in (0, num_passes):
            break
        num_passes = len(passes)
    work = cost.pass_work(loads, passes)
    tokens = [sum(member.num_computed for member in members) for members in passes]
    return CutHTask(loads, passes, work, chains_of_passes(rows, passes), *cost.work_times(work), tokens)


def task_rows(load: TaskLoad) -> TaskRows:
    """Return what cutting a task's typical global batch into passes depends on."""
    return TaskRows(load.lengths, stay_whole=load.stays_whole, trie=load.trie)


def planned_passes(
    htasks: Sequence[HTask], loads: Sequence[TaskLoad], rules: PassRules, max_tokens: int
) -> tuple[PlannedPass, ...]:
    """Return the passes that a step of a plan has with the rows of one replica, in the order in which they are made.

    Args:
        htasks: the hTasks of the plan.
        loads: the loads of its tasks, with the rows of the replica.
        rules: whether and how long rows are cut.
        max_tokens: the most tokens of a pass.
    """
    by_name = {load.name: load for load in loads}
    passes = []
    for number, htask in enumerate(htasks):
        fused = [by_name[name] for name in htask.tasks]
        tokens, planned = sum(load.tokens for load in fused), htask.micro_batches * htask.tokens_per_micro_batch
        has_shared = any(load.trie is not None for load in fused)
        meant = passes_meant(tokens, planned, htask.micro_batches, has_shared=has_shared)
        for members in cut_into_passes([task_rows(load) for load in fused], rules, bound=max_tokens, num_passes=meant):
            names = tuple(dict.fromkeys(htask.tasks[member.task] for member in members))
            passes.append(PlannedPass(number, names, sum(member.num_computed for member in members)))
    return tuple(passes)


_FEW_LAYERS = (2, 4)
"""Layers that are simulated of deeper stages: after the first ones every further layer adds the same."""


class TurnTimes:
    """Seconds of passes that may take turns; remembers those of each group.

    Args:
        cost: predicts the parts of passes; its profile has what turns cost and hide.
        width: the most passes that take turns.
        recomputes: whether activations are recomputed in the backward.
    """

    def __init__(self, cost: CostModel, width: int = 1, *, recomputes: bool = False) -> None:
        self.cost, self.width, self.recomputes = cost, width, recomputes
        # On a GPU two passes of one task are never in a group: their streams would add to the same gradients.
        self.may_repeat = cost.profile.device.startswith("cpu")
        self._group_s: dict[tuple[object, ...], float] = {}
        self._parts: dict[tuple[CutHTask, int], PassParts] = {}

    @property
    def is_known(self) -> bool:
        """Whether it is known what turns hide; otherwise sums are charged in full."""
        return self.cost.devices_per_stage > 1 and self.cost.profile.overlap is not None

    def group_s(self, group: Sequence[PassParts], stage: int = 0, direction: Direction = "both") -> float:
        """Return the seconds of passes that take turns on a stage; a single one waits for each of its sums."""
        key = (tuple(group), stage, direction)
        if key not in self._group_s:
            num_layers = self.cost.layers_per_stage[stage]
            is_first, is_last = stage == 0, stage == self.cost.num_stages - 1
            few, more = _FEW_LAYERS if num_layers > _FEW_LAYERS[1] else (num_layers, num_layers)
            few_s, more_s = (
                turns_timeline(
                    [
                        pass_times(parts, Stretch(count, is_first, is_last, self.recomputes, direction))
                        for parts in group
                    ],
                    self.cost.profile.overlap,
                ).makespan_s
                for count in (few, more)
            )
            layer_s = (more_s - few_s) / (more - few) if more > few else 0.0
            self._group_s[key] = more_s + (num_layers - more) * layer_s
        return self._group_s[key]

    def action_s(
        self, tasks: Sequence[Sequence[str]], parts: Sequence[PassParts], stage: int, direction: Direction
    ) -> float:
        """Return the seconds of one action of a pipeline, whose passes take turns with their neighbours.

        Args:
            tasks: names of the tasks of each pass, in the order in which they run.
            parts: the parts of each pass on the stage.
            stage: the stage of the action, counted from 0.
            direction: forward or backward.
        """
        groups = neighbour_groups(tasks, self.width, may_repeat=self.may_repeat)
        return math.fsum(self.group_s([parts[index] for index in group], stage, direction) for group in groups)

    def parts_of(self, cut: CutHTask, stage: int = 0) -> PassParts:
        """Return what a mean pass of an hTask computes between its sums on a stage.

        Of mean passes, as few compositions of a micro-batch are then simulated, each once.
        """
        if (cut, stage) not in self._parts:
            work = cut.work if cut.passes else self.cost.pass_work(cut.loads, [[]])
            self._parts[cut, stage] = self.cost.pass_parts(stage, work)
        return self._parts[cut, stage]

    def groups_of(self, cuts: Sequence[CutHTask]) -> list[list[CutHTask]]:
        """Return the hTask of each pass of each group in which a bucket's passes go through a single stage."""
        passes = [cut for cut in cuts for _ in range(cut.num_passes)]
        tasks = [[load.name for load in cut.loads] for cut in passes]
        groups = turn_groups(tasks, [0] * len(passes), self.width, may_repeat=self.may_repeat)
        return [[passes[index] for index in group] for group in groups]

    def bucket_fields(self, cuts: Sequence[CutHTask], num_slots: int | None = None) -> dict[str, Any]:
        """Return what a `BucketLoad` holds of the seconds of a bucket.

        On a single stage with passes in turns micro-batches are their groups; otherwise passes are spread over as many
        micro-batches as the hTask with most of them has.

        Args:
            cuts: the hTasks of the bucket, in the order of the work.
            num_slots: C, micro-batches of the bucket, if it is given.
        """
        if self.is_known and self.cost.num_stages == 1:
            groups = self.groups_of(cuts)
            both_s = np.array([[self.group_s([self.parts_of(cut) for cut in group])] for group in groups])
            forward_s = self.cost.profile.forward_fraction * both_s
            backward_s = both_s - forward_s
        else:
            forward_s, backward_s = self._slots_s(cuts, num_slots or max(cut.num_chains for cut in cuts))
        slots_s = (forward_s + backward_s).sum(axis=1)
        weights: tuple[float, ...] = ()
        if not np.allclose(slots_s, slots_s.mean(), rtol=1e-9, atol=0.0):
            weights = tuple((slots_s / slots_s.mean()).tolist())
        return {
            "forward_s": tuple(forward_s.mean(axis=0).tolist()),
            "backward_s": tuple(backward_s.mean(axis=0).tolist()),
            "weights": weights,
            "num_micro_batches": len(forward_s),
        }

    def _slots_s(self, cuts: Sequence[CutHTask], num_slots: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the forward and the backward seconds of each of the C micro-batches of a bucket, two `[C, S]`."""
        num_stages = self.cost.num_stages
        forward_s, stage_s, mean_s = np.zeros((3, num_slots, num_stages))
        slots: list[list[CutHTask]] = [[] for _ in range(num_slots)]
        for cut in cuts:
            for chain in cut.chains:
                slot = slot_of(chain[0], len(cut.passes), num_slots)
                slots[slot] += [cut] * len(chain)
                forward_s[slot] += cut.forward_s[list(chain)].sum(axis=0)
                stage_s[slot] += cut.stage_s[list(chain)].sum(axis=0)
                mean_s[slot] += len(chain) * cut.stage_s.mean(axis=0)
        if not self.is_known:
            return forward_s, stage_s - forward_s
        in_turns_s = np.zeros((2, num_slots, num_stages))
        directions: tuple[Direction, ...] = ("forward", "backward")
        # Most micro-batches have passes of the same hTasks.
        alike: dict[tuple[CutHTask, ...], list[int]] = {}
        for slot, passes in enumerate(slots):
            alike.setdefault(tuple(passes), []).append(slot)
        for passes, numbers in alike.items():
            tasks = [[load.name for load in cut.loads] for cut in passes]
            for stage in range(num_stages):
                parts = [self.parts_of(cut, stage) for cut in passes]
                for way, direction in enumerate(directions):
                    in_turns_s[way, numbers, stage] = self.action_s(tasks, parts, stage, direction)
        # Turns are simulated of mean passes; real ones take as much more or less as they do one after another.
        in_turns_s *= np.where(mean_s > 0, stage_s / np.where(mean_s > 0, mean_s, 1.0), 1.0)
        return in_turns_s[0], in_turns_s[1]
