"""`PassPrices`: what a profile says that passes which have run should have taken, part by part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from peft_mux.engine.pass_clock import PassTime, TaskInPass
from peft_mux.scheduler.costs.latency import CostModel
from peft_mux.scheduler.costs.loads import TaskLoad
from peft_mux.scheduler.costs.measured.parts import Parts, summed
from peft_mux.scheduler.planner.turn_times import TurnTimes
from peft_mux.scheduler.subgraphs.passes import Direction

_LEAST_SUMMED = 0.1
"""Part of the waiting for sums that the sums take themselves, however far ranks were apart by the profile."""


class PassPrices:
    """Prices the passes of this process.

    Args:
        cost: predicts seconds from the profile as it was measured or read off a data sheet.
        loads: what each task brings into a step, by its name; its adapters count here, and not its rows.
        stage: stage of the pipeline that lies in this process.
        learnt: returns what passes in turns take by all that was learnt so far, and the factor of communication among
            that; `None` where sums are charged in full.
        width: the most passes of a micro-batch of a pipeline that took turns.
    """

    def __init__(
        self,
        cost: CostModel,
        loads: Mapping[str, TaskLoad],
        stage: int,
        learnt: Callable[[], tuple[TurnTimes, float]] | None = None,
        *,
        width: int = 1,
    ) -> None:
        """Remember the models."""
        self.cost, self.loads, self.stage = cost, loads, min(stage, cost.num_stages - 1)
        self._learnt, self._width = learnt, width

    def of(self, timed: PassTime) -> Parts:
        """Return the predicted seconds of passes that were timed together.

        Args:
            timed: the passes, with the rows of each.
        """
        parts = summed(self.cost.parts_of_pass(self._rows(rows), stage=self.stage) for rows in timed.passes)
        # On one stage a pass by itself waits for its sums in full, which is timed apart where it can be.
        if self._learnt is None or (self.cost.num_stages == 1 and len(timed.passes) < 2):
            return parts
        turns, factor = self._learnt()
        return parts._replace(communication=self._shown_s(timed, turns) / factor)

    def _shown_s(self, timed: PassTime, turns: TurnTimes) -> float:
        """Return the seconds that passes in turns take beyond their computing: sums that show, and the turns' own.

        How much of them shows depends on how long they are, so that it is taken from what was learnt of that so far.
        """
        rows, stage, cost = [self._rows(own) for own in timed.passes], self.stage, turns.cost
        computed = summed(cost.parts_of_pass(own, stage=stage) for own in rows)._replace(communication=0.0)
        parts = [cost.pass_parts(own, 1, stage=stage) for own in rows]
        if cost.num_stages == 1:
            return max(0.0, turns.group_s(parts) - computed.total)
        tasks = [[one.task for one in own] for own in timed.passes]
        ways: tuple[Direction, ...] = ("forward", "backward")
        taken_s = sum(turns.action_s(tasks, parts, self._width, stage, way) for way in ways)
        return max(0.0, taken_s - computed.total)

    def summed_s(self, timed: PassTime) -> float:
        """Return the seconds that the sums of a pass took, of those in which it waited for them.

        Args:
            timed: a pass of which waiting was timed. Beside the sums themselves it has waited for ranks that came to
                them later, in the mean as long as the profile says, which plans count as such.
        """
        waited_s = timed.waited_s or 0.0
        skew = 0.0 if self.cost.profile.overlap is None else self.cost.profile.overlap.skew
        return max(waited_s - skew * (timed.seconds - waited_s), _LEAST_SUMMED * waited_s)

    def between(self, tasks: Iterable[str]) -> Parts:
        """Return the predicted seconds of a step outside of its passes.

        Args:
            tasks: names of the tasks that take the step.
        """
        return self.cost.update_parts([self.loads[name] for name in tasks if name in self.loads])

    def _rows(self, rows: Sequence[TaskInPass]) -> list[TaskLoad]:
        return [replace(self.loads[one.task], **self._seen(one)) for one in rows if one.task in self.loads]

    @staticmethod
    def _seen(one: TaskInPass) -> dict[str, Any]:
        """Return the fields of a load that a pass tells."""
        seen: dict[str, Any] = {"lengths": one.lengths, "shared": one.shared, "num_targets": one.num_targets}
        return {**seen, "longest_row_tokens": 0, "trie": None}
