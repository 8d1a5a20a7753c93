"""What was planned against what ran: passes of a step, the tasks in each, their order and their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peft_mux.data.batch import MuxBatch
from peft_mux.scheduler.planner.values import PlannedPass


@dataclass(frozen=True, slots=True)
class PassReport:
    """Planned against executed passes of one replica, over all steps of a run.

    Plans are of a typical step. Where all rows of a task are as long as each other and every batch is whole, each step
    is that one; otherwise batches are drawn, and tokens differ.

    Attributes:
        replica: the replica, counted from 0.
        num_steps: steps that were taken.
        planned_passes: passes that the plans had in these steps.
        passes: passes that were run.
        planned_tokens: tokens that the plans had in these steps, without padding, each shared one once.
        tokens: tokens that were run, without padding, each shared one once.
        same_number: steps that had as many passes as planned.
        same_tasks: steps whose passes held the planned tasks, in the planned order.
        same_tokens: steps whose passes also held exactly the planned tokens.
    """

    replica: int = 0
    num_steps: int = 0
    planned_passes: int = 0
    passes: int = 0
    planned_tokens: int = 0
    tokens: int = 0
    same_number: int = 0
    same_tasks: int = 0
    same_tokens: int = 0

    @property
    def is_as_planned(self) -> bool:
        """Whether every step had the planned passes: number, tasks and order."""
        return self.same_tasks == self.num_steps

    def after(self, planned: Sequence[PlannedPass], micro_batches: Sequence[MuxBatch]) -> PassReport:
        """Return the report after one more step.

        Args:
            planned: the passes of the plan that the step followed.
            micro_batches: what this replica ran, in order.
        """
        tasks = [one.tasks for one in planned] == [batch.task_names for batch in micro_batches]
        own = [batch.num_computed - batch.num_padding_tokens for batch in micro_batches]
        expected = [one.tokens for one in planned]
        return PassReport(
            replica=self.replica,
            num_steps=self.num_steps + 1,
            planned_passes=self.planned_passes + len(planned),
            passes=self.passes + len(micro_batches),
            planned_tokens=self.planned_tokens + sum(expected),
            tokens=self.tokens + sum(own),
            same_number=self.same_number + (len(planned) == len(micro_batches)),
            same_tasks=self.same_tasks + tasks,
            same_tokens=self.same_tokens + (tasks and own == expected),
        )

    def __str__(self) -> str:
        """Return one line; what differs from the plan is in it only where something does."""
        steps = max(self.num_steps, 1)
        line = (
            f"passes  planned {self.planned_passes / steps:,.1f} a step of"
            f" {self.planned_tokens / max(self.planned_passes, 1):,.1f} tokens,"
            f" run {self.passes / steps:,.1f} of {self.tokens / max(self.passes, 1):,.1f}"
        )
        if self.is_as_planned:
            return f"{line}; the same tasks in the same order" + (f" in all {steps} steps" if steps > 1 else "")
        return (
            f"{line}; as many in {self.same_number} of {self.num_steps} steps, the same tasks in the same order in"
            f" {self.same_tasks}"
        )


def pass_lines(reports: Sequence[PassReport]) -> list[str]:
    """Return what a run prints at its end: a line, and one more for each replica that differs from its plan.

    Args:
        reports: the report of each replica, by its number; those without steps say nothing.
    """
    told = [report for report in reports if report.num_steps]
    if len(reports) < 2:
        return [str(report) for report in told]
    if all(report.is_as_planned for report in told):
        return [f"{report} (replica 1 of {len(reports)}; the others too)" for report in told[:1]]
    return [f"{report} (replica {report.replica + 1} of {len(reports)})" for report in told if not report.is_as_planned]
