"""The two recorders of a run on one process: `RunTimes` adds up seconds, `PassReport` passes and tokens.

Times of the single passes of a step come from `peft_mux.engine.work.PassClock`, which is part of the executor.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # commands that only read metrics import this module, and need neither transformers nor PEFT
    from peft_mux.data.batch import MuxBatch
    from peft_mux.engine.work import StepTimes
    from peft_mux.scheduler.plan import Plan, PlannedPass

CALL_LIMIT_S = 1.0
"""Seconds that one call of a task's own code may take before it is reported."""
SHARE_LIMIT = 0.1
"""Share of the run's time that all calls of one task may take before they are reported, once they have taken 1 s."""


class RunTimes:
    """Adds up the seconds of steps, of each task in them, and of the tasks' own code.

    Tasks of a step share its passes, so no task has its own pass times. So the seconds of a step are divided by
    the tokens that each task has trained in it, which makes the shares of all tasks add up to 1.

    Args:
        clock: returns seconds; tests pass another one.

    Attributes:
        followed: of the plans with the most tasks, the one that was followed for most steps (`None` if there was no
            plan), and the pass times of its last step on this process; `None` before the first step.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock, self._began_s = clock, clock()
        self._last_s = self._began_s
        # Steps and tokens of each task at the last step, and its steps when training began here.
        self._steps: dict[str, int] = {}
        self._tokens: dict[str, int] = {}
        self._first: dict[str, int] = {}
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._share_s: defaultdict[str, float] = defaultdict(float)
        # Seconds and number of the first steps under a plan, and of the later ones.
        self._first_steps = self._later_steps = (0.0, 0)
        self._plan: Plan | None = None
        self._num_plan_steps, self._most_followed = 0, (0, 0)
        self.followed: tuple[Plan | None, StepTimes] | None = None
        # Seconds of each task's own code by kind, and the total at which its user was last warned.
        self._user_code_s: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._warned_s: dict[str, float] = {}

    # ------------------------------------------------------------------ tasks

    def begin(self, tasks: Iterable[Any]) -> None:
        """Count the seconds of tasks (`ActiveTask`) from here on."""
        tasks = tuple(tasks)
        self._last_s = self._clock()
        self._steps = {task.name: task.step for task in tasks}
        self._tokens = {task.name: task.num_tokens for task in tasks}
        self._first = dict(self._steps)
        self._seconds.clear()
        self._share_s.clear()

    def advance(self, tasks: Iterable[Any]) -> None:
        """Count a step, or several, with everything since the last one, for the tasks that have taken it."""
        now, tokens = self._clock(), {}
        for task in tasks:
            if task.step > self._steps.setdefault(task.name, 0):
                self._seconds[task.name] += now - self._last_s
                self._first.setdefault(task.name, 0)
                tokens[task.name] = max(task.num_tokens - self._tokens.get(task.name, 0), 0)
            self._steps[task.name], self._tokens[task.name] = task.step, task.num_tokens
        total = sum(tokens.values())
        for name, task_tokens in tokens.items():
            self._share_s[name] += (now - self._last_s) * (task_tokens / total if total else 1 / len(tokens))
        self._last_s = now

    def seconds(self, name: str) -> float:
        """Return the seconds of the steps that a task took part in since its training began here."""
        return self._seconds.get(name, 0.0)

    def seconds_now(self, task: Any) -> float:
        """Like `seconds`, for a task (`ActiveTask`) whose last step `advance` may not have counted yet."""
        has_stepped = task.step > self._steps.get(task.name, 0)
        return self.seconds(task.name) + (self._clock() - self._last_s if has_stepped else 0.0)

    def share(self, name: str) -> float | None:
        """Return a task's share of the seconds of all steps since training began here; `None` before the first."""
        total_s = sum(self._share_s.values())
        return self._share_s.get(name, 0.0) / total_s if total_s else None

    def num_steps(self, task: Any) -> int:
        """Return how many steps a task has taken since its training began here."""
        return max(0, task.step - self._first.get(task.name, 0))

    # ------------------------------------------------------------------ steps

    def add_steps(self, plan: Plan | None, seconds: float, num_steps: int, times: StepTimes) -> None:
        """Count steps by the seconds of their passes and updates.

        Args:
            plan: the plan that they followed.
            seconds: duration of each of them.
            num_steps: number of steps that took this time.
            times: the passes of the last of them.
        """
        is_first = plan is not self._plan or not self._num_plan_steps
        before_s, before = self._first_steps if is_first else self._later_steps
        total = before_s + seconds * num_steps, before + num_steps
        self._first_steps, self._later_steps = (total, self._later_steps) if is_first else (self._first_steps, total)
        self._num_plan_steps = num_steps if is_first else self._num_plan_steps + num_steps
        self._plan = plan
        # Tasks end at different steps, and a step of the last ones alone would not show the others.
        extent = (0 if plan is None else len(plan.shares), self._num_plan_steps)
        if extent >= self._most_followed:
            self._most_followed, self.followed = extent, (plan, times)

    @property
    def settled_s(self) -> float:
        """Seconds of all steps, where the first ones under a plan count as the mean of the others.

        The first step touches memory and makes the optimizers' state, once for however many steps follow, and
        predictions do not include that.
        """
        (first_s, num_first), (later_s, num_later) = self._first_steps, self._later_steps
        return later_s / num_later * (num_first + num_later) if num_later else first_s

    # ------------------------------------------------------------------ own code of tasks

    def add_user_code(self, task: str, what: str, seconds: float) -> float | None:
        """Count a call of a task's own code: its callbacks, its metrics, its loss, or waiting for its rows.

        Returns:
            The seconds of all calls of the task if they should be reported now: one call took longer than
            `CALL_LIMIT_S`, or all of them more than `SHARE_LIMIT` of the run; then again each time the total has
            doubled. Otherwise `None`.
        """
        self._user_code_s[task][what] += seconds  # type: ignore[assignment]
        total_s = sum(self._user_code_s[task].values())
        # First, because it avoids reading the clock at nearly every call.
        if total_s < max(CALL_LIMIT_S, 2 * self._warned_s.get(task, 0.0)):
            return None
        if seconds < CALL_LIMIT_S and total_s < SHARE_LIMIT * (self._clock() - self._began_s):
            return None
        self._warned_s[task] = total_s
        return total_s

    def user_code_s(self) -> dict[str, dict[str, float]]:
        """Return the seconds of each task's own code by kind, for tasks whose own code took `CALL_LIMIT_S` or more."""
        return {
            task: dict(seconds) for task, seconds in self._user_code_s.items() if sum(seconds.values()) >= CALL_LIMIT_S
        }

    def forget_user_code(self, task: str) -> None:
        """Drop what was counted for a task that leaves."""
        self._user_code_s.pop(task, None)
        self._warned_s.pop(task, None)


@dataclass(frozen=True, slots=True)
class PassReport:
    """Planned and executed passes of one replica, and tokens of its tasks, over all steps of a run.

    Plans are of a typical step. If all rows of a task have the same length and every batch is full, each step equals
    it; otherwise batches are random, and tokens differ.

    Attributes:
        replica: the replica, counted from 0.
        num_steps: steps that were taken.
        planned_passes: passes that the plans had in these steps.
        passes: passes that were run.
        planned_tokens: tokens that the plans had in these steps, without padding, shared ones counted once.
        tokens: tokens that were run, without padding, shared ones counted once.
        same_number: steps that had as many passes as planned.
        same_tasks: steps whose passes held the planned tasks, in the planned order.
        same_tokens: steps whose passes also held exactly the planned tokens.
        asked_tokens: tokens of the rows of each task.
        computed_tokens: tokens of each task that went through the backbone; the others were shared with another row.
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
    asked_tokens: Mapping[str, int] = field(default_factory=dict)
    computed_tokens: Mapping[str, int] = field(default_factory=dict)

    @property
    def is_as_planned(self) -> bool:
        """Whether every step had the planned passes: number, tasks and order."""
        return self.same_tasks == self.num_steps

    def after(self, planned: Sequence[PlannedPass] | None, micro_batches: Sequence[MuxBatch]) -> PassReport:
        """Return the report after one more step.

        Args:
            planned: the passes of the plan that the step followed; `None` if it has none for this replica.
            micro_batches: what this replica ran, in order.
        """
        asked, computed = Counter(self.asked_tokens), Counter(self.computed_tokens)
        for batch in micro_batches:
            for counts, offsets in ((asked, batch.task_offsets), (computed, batch.computed_offsets)):
                for name, (start, end) in zip(batch.task_names, pairwise(offsets), strict=True):
                    counts[name] += end - start
        report = replace(self, asked_tokens=dict(asked), computed_tokens=dict(computed))
        if planned is None:
            return report
        tasks = [each.tasks for each in planned] == [batch.task_names for batch in micro_batches]
        pass_tokens = [batch.num_computed - batch.num_padding_tokens for batch in micro_batches]
        expected = [each.tokens for each in planned]
        return replace(
            report,
            num_steps=self.num_steps + 1,
            planned_passes=self.planned_passes + len(planned),
            passes=self.passes + len(micro_batches),
            planned_tokens=self.planned_tokens + sum(expected),
            tokens=self.tokens + sum(pass_tokens),
            same_number=self.same_number + (len(planned) == len(micro_batches)),
            same_tasks=self.same_tasks + tasks,
            same_tokens=self.same_tokens + (tasks and pass_tokens == expected),
        )

    def __str__(self) -> str:
        """Return one line, which mentions differences from the plan only if there are any."""
        steps = max(self.num_steps, 1)
        line = (
            f"micro-batches per step: planned {self.planned_passes / steps:,.1f}"
            f" ({self.planned_tokens / max(self.planned_passes, 1):,.1f} tokens),"
            f" actual {self.passes / steps:,.1f} ({self.tokens / max(self.passes, 1):,.1f} tokens)"
        )
        if self.is_as_planned:
            return f"{line}; same tasks in the same order" + (f" in all {steps} steps" if steps > 1 else "")
        return (
            f"{line}; same number in {self.same_number} of {self.num_steps} steps, same tasks in the same order in"
            f" {self.same_tasks}"
        )


def pass_lines(reports: Sequence[PassReport]) -> list[str]:
    """Return what a run prints at its end: a line, and one more for each replica that differs from its plan.

    Args:
        reports: the report of each replica, by its number; those without steps are left out.
    """
    with_steps = [report for report in reports if report.num_steps]
    if len(reports) < 2:
        return [str(report) for report in with_steps]
    if all(report.is_as_planned for report in with_steps):
        return [f"{report} (replica 1 of {len(reports)}; the others too)" for report in with_steps[:1]]
    different = [report for report in with_steps if not report.is_as_planned]
    return [f"{report} (replica {report.replica + 1} of {len(reports)})" for report in different]


def shared_tokens(reports: Iterable[PassReport]) -> dict[str, tuple[int, int]]:
    """Return computed and total tokens over all replicas, for each task that shared some."""
    asked, computed = Counter(), Counter()
    for report in reports:
        asked.update(report.asked_tokens)
        computed.update(report.computed_tokens)
    return {name: (computed[name], tokens) for name, tokens in asked.items() if computed[name] < tokens}
