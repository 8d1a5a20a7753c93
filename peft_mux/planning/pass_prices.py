"""`PassPrices`: what a profile says that passes which have run should have taken, part by part."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from peft_mux.engine.pass_clock import PassTime, TaskInPass
from peft_mux.scheduler.costs.latency import CostModel
from peft_mux.scheduler.costs.loads import TaskLoad
from peft_mux.scheduler.costs.measured.parts import Parts, summed


class PassPrices:
    """Prices the passes of this process.

    Args:
        cost: predicts seconds from the profile as it was measured or read off a data sheet.
        loads: what each task brings into a step, by its name; its adapters count here, and not its rows.
        stage: stage of the pipeline that lies in this process.
    """

    def __init__(self, cost: CostModel, loads: Mapping[str, TaskLoad], stage: int) -> None:
        """Remember the models."""
        self.cost, self.loads, self.stage = cost, loads, min(stage, cost.num_stages - 1)

    def of(self, timed: PassTime) -> Parts:
        """Return the predicted seconds of passes that were timed together.

        Args:
            timed: the passes, with the rows of each.
        """
        return summed(self.cost.parts_of_pass(self._rows(rows), stage=self.stage) for rows in timed.passes)

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
