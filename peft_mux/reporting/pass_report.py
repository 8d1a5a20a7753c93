"""`StepSeconds`: how long the steps of a run take when they are under way."""

# MERGED: Computed against asked tokens: what tasks spare whose rows begin alike.
# MERGED: What was planned against what ran: passes of a step, the tasks in each, their order and their tokens.

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from peft_mux.data.batch import MuxBatch
from peft_mux.scheduler.planner.values import PlannedPass


class StepSeconds:
    """Adds up what steps take; the first ones under a plan count as the mean of the others.

    The first touches memory and makes the optimizers' state, once for however many steps follow. In a run of few steps
    that would outweigh what is told of them, and a prediction knows nothing of it.
    """

    def __init__(self) -> None:
        """Have seen no step."""
        self._first = self._later = (0.0, 0)

    def add(self, seconds: float, num_steps: int, *, is_first: bool) -> None:
        """Count steps.

        Args:
            seconds: what each of them took.
            num_steps: so many took this time.
            is_first: whether they are the first under their plan.
        """
        before_s, before = self._first if is_first else self._later
        total = before_s + seconds * num_steps, before + num_steps
        self._first, self._later = (total, self._later) if is_first else (self._first, total)

    @property
    def settled_s(self) -> float:
        """Seconds of all steps; where there were none but first ones, as they were taken."""
        (first_s, num_first), (later_s, num_later) = self._first, self._later
        return later_s / num_later * (num_first + num_later) if num_later else first_s


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """Tokens of the passes of a run, by task.

    Attributes:
        asked: tokens of the rows of each task.
        computed: those of them that went through the backbone; the others stood in a row that was computed already.
    """

    asked: Mapping[str, int] = field(default_factory=dict)
    computed: Mapping[str, int] = field(default_factory=dict)

    @property
    def sharing(self) -> dict[str, tuple[int, int]]:
        """Computed and asked tokens of each task that shared some."""
        return {name: (self.computed[name], asked) for name, asked in self.asked.items() if self.computed[name] < asked}

    def after(self, micro_batches: Iterable[MuxBatch]) -> TokenCounts:
        """Return the counts after more passes.

        Args:
            micro_batches: what one process of a replica ran.
        """
        asked, computed = dict(self.asked), dict(self.computed)
        for batch in micro_batches:
            for counts, offsets in ((asked, batch.task_offsets), (computed, batch.computed_offsets)):
                for name, (start, end) in zip(batch.task_names, pairwise(offsets), strict=True):
                    counts[name] = counts.get(name, 0) + end - start
        return TokenCounts(asked, computed)

    def __str__(self) -> str:
        """Return one line; "" where nothing was shared."""
        told = [f"{name} {own:,} of {asked:,} ({own / asked:.0%})" for name, (own, asked) in self.sharing.items()]
        return (
            f"computed / asked tokens  {', '.join(told)}; what rows begin with alike is computed once" if told else ""
        )


def summed_counts(counts: Iterable[TokenCounts]) -> TokenCounts:
    """Return the counts of all replicas together.

    Args:
        counts: those of one process of each replica.
    """
    asked: dict[str, int] = {}
    computed: dict[str, int] = {}
    for one in counts:
        for total, own in ((asked, one.asked), (computed, one.computed)):
            for name, tokens in own.items():
                total[name] = total.get(name, 0) + tokens
    return TokenCounts(asked, computed)


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
