"""The passes that an hTask really has: its rows cut by the engine's own rules, and what each pass costs.

M splits every global batch into C equal parts. Rows are whole, so that an hTask of few rows has fewer passes than C,
and these are unequal: what is planned here is cut by `peft_mux.packing`, as every step is that runs.
"""

from __future__ import annotations

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
        passes: the members of each of its P passes.
        chains: for each chain the indices of its passes; the passes of whole rows are chains by themselves.
        stage_s: seconds of each pass on each stage, forward and backward, `[P, S]`.
        tokens: tokens of each pass.
    """

    loads: Sequence[TaskLoad]
    passes: Sequence[Sequence[Member]]
    chains: Sequence[Sequence[int]]
    stage_s: NDArray[Any]
    tokens: Sequence[int]

    @property
    def num_passes(self) -> int:
        """P; 1 where no rows are known."""
        return max(1, len(self.passes))

    @property
    def num_chains(self) -> int:
        """Micro-batches that its passes fill, as those of a chain stay together; 1 where no rows are known."""
        return max(1, len(self.chains))

    @property
    def mean_tokens(self) -> float:
        """Mean tokens of a pass."""
        return sum(self.tokens) / self.num_passes

    @property
    def held_tokens(self) -> int:
        """Tokens that memory is kept for: the largest chain, or the longest row that may come, which stays whole."""
        largest = max((sum(self.tokens[number] for number in chain) for chain in self.chains), default=0)
        return max(largest, *(load.longest for load in self.loads))

    @property
    def pass_s(self) -> float:
        """Mean seconds of a pass, forward and backward through all stages one after another."""
        return float(self.stage_s.sum()) / self.num_passes

    def slots_s(self, num_slots: int) -> NDArray[Any]:
        """Return the seconds of its passes in each micro-batch of a bucket on each stage, `[C, S]`.

        Args:
            num_slots: C, micro-batches of the bucket.
        """
        slots_s = np.zeros((num_slots, self.stage_s.shape[1]))
        for chain in self.chains:
            own = slot_of(chain[0], len(self.passes), num_slots)
            slots_s[own] += self.stage_s[list(chain)].sum(axis=0)
        return slots_s


class PassCosts:
    """Cuts hTasks of consecutive tasks into passes and predicts their seconds; remembers what it has cut.

    Args:
        loads: the loads of all tasks that run, in the order of fusion.
        cost: predicts the seconds of each stage.
        rules: whether and how long rows are cut.
        max_tokens: the most tokens of a pass.
    """

    def __init__(self, loads: Sequence[TaskLoad], cost: CostModel, rules: PassRules, max_tokens: int) -> None:
        self.loads, self.cost, self.rules, self.max_tokens = loads, cost, rules, max_tokens
        self._known: dict[tuple[int, int, int], CutHTask] = {}

    def of(self, start: int, end: int, count: int) -> CutHTask:
        """Return the hTask of tasks `start` to `end`, the last one not included, cut into about so many passes.

        Args:
            start: the first task, in the order of fusion.
            end: one past the last task.
            count: the number of passes that is meant.
        """
        num_rows = sum(len(load.lengths) for load in self.loads[start:end])
        # More passes than rows are as many as rows, unless rows are cut.
        key = start, end, count if self.rules.split_long_sequences else max(1, min(count, num_rows))
        if key not in self._known:
            self._known[key] = self._cut(self.loads[start:end], key[2])
        return self._known[key]

    def _cut(self, loads: Sequence[TaskLoad], count: int) -> CutHTask:
        rows = [task_rows(load) for load in loads]
        passes = _stable_passes(rows, self.rules, self.max_tokens, count)
        return costed(loads, passes, self.cost)


def costed(loads: Sequence[TaskLoad], passes: Sequence[Sequence[Member]], cost: CostModel) -> CutHTask:
    """Return an hTask whose rows were cut into passes, with the seconds of each.

    Args:
        loads: the loads of its tasks.
        passes: the members of each of the P passes, whose `task` counts these loads.
        cost: predicts the seconds of each stage.
    """
    stage_s = cost.passes_s(loads, passes) if passes else np.zeros((0, cost.num_stages))
    tokens = [sum(member.num_computed for member in members) for members in passes]
    chains = chains_of_passes([task_rows(load) for load in loads], passes)
    return CutHTask(loads, passes, chains, stage_s, tokens)


def task_rows(load: TaskLoad) -> TaskRows:
    """Return what cutting a task's typical global batch into passes depends on.

    Args:
        load: the load of the task.
    """
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
        rows = [task_rows(by_name[name]) for name in htask.tasks]
        tokens = sum(by_name[name].tokens for name in htask.tasks)
        planned, has_shared = (
            htask.micro_batches * htask.tokens_per_micro_batch,
            any(one.trie is not None for one in rows),
        )
        meant = passes_meant(tokens, planned, htask.micro_batches, has_shared=has_shared)
        for members in cut_into_passes(rows, rules, bound=max_tokens, num_passes=meant):
            names = tuple(dict.fromkeys(htask.tasks[member.task] for member in members))
            found.append(PlannedPass(number, names, sum(member.num_computed for member in members)))
    return tuple(found)


def slot_weights(seconds: NDArray[Any]) -> tuple[float, ...]:
    """Return the seconds of micro-batches over their mean; empty where all are equal.

    Args:
        seconds: seconds of each micro-batch, `[C]`.
    """
    mean = float(seconds.mean()) if len(seconds) else 0.0
    if not mean or np.allclose(seconds, mean, rtol=1e-9, atol=0.0):
        return ()
    return tuple(float(one) / mean for one in seconds)


def _stable_passes(rows: Sequence[TaskRows], rules: PassRules, bound: int, count: int) -> list[list[Member]]:
    """Cut into about `count` passes, such that cutting into as many as are found finds as many."""
    for _ in range(_MOST_CUTS):
        passes = cut_into_passes(rows, rules, bound=bound, num_passes=count)
        if len(passes) in (0, count):
            break
        count = len(passes)
    return passes
