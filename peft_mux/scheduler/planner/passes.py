"""The passes that an hTask really has: its rows cut by the engine's own rules, and what each pass costs.

M splits every global batch into C equal parts. Rows are whole, so that an hTask of few rows has fewer passes than C,
and these are unequal: what is planned here is cut by `peft_mux.data.packing.passes`, as every step of a run is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from peft_mux.data.packing.passes import (
    Member,
    PassRules,
    TaskRows,
    chains_of_passes,
    cut_into_passes,
    passes_meant,
)
from peft_mux.scheduler.costs.latency import CostModel
from peft_mux.scheduler.costs.loads import TaskLoad
from peft_mux.scheduler.planner.values import HTask, PlannedPass

_MOST_CUTS = 4
"""Times that an hTask is cut into as many passes as were found, until their number stays."""


@dataclass(frozen=True, slots=True, eq=False)
class CutHTask:
    """An hTask cut into passes.

    Attributes:
        loads: the loads of its tasks.
        passes: the members of each of its P passes; none if no rows are known.
        chains: for each chain the indices of its passes; a pass of whole rows is a chain by itself.
        forward_s: seconds of the forward of each pass on each stage, `[P, S]`.
        stage_s: seconds of each pass on each stage, forward and backward, `[P, S]`.
        tokens: tokens of each pass.
    """

    loads: Sequence[TaskLoad]
    passes: Sequence[Sequence[Member]]
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
    forward_s, stage_s = cost.pass_times(loads, passes)
    tokens = [sum(member.num_computed for member in members) for members in passes]
    return CutHTask(loads, passes, chains_of_passes(rows, passes), forward_s, stage_s, tokens)


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
    found = []
    for number, htask in enumerate(htasks):
        own = [by_name[name] for name in htask.tasks]
        tokens, planned = sum(load.tokens for load in own), htask.micro_batches * htask.tokens_per_micro_batch
        has_shared = any(load.trie is not None for load in own)
        meant = passes_meant(tokens, planned, htask.micro_batches, has_shared=has_shared)
        for members in cut_into_passes([task_rows(load) for load in own], rules, bound=max_tokens, num_passes=meant):
            names = tuple(dict.fromkeys(htask.tasks[member.task] for member in members))
            found.append(PlannedPass(number, names, sum(member.num_computed for member in members)))
    return tuple(found)
