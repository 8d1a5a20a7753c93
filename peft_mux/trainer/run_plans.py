"""`RunPlans`: what the steps of a run ask of the part that makes its plans and turns them into work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from peft_mux.engine.work import StepResult, StepWork
from peft_mux.scheduler.plan import Plan


class StepTime(NamedTuple):
    """What a step took on this process.

    Attributes:
        plan: the plan that the step followed; `None` if there was none.
        num_tokens: tokens of the global batches of all tasks, on all processes.
        seconds: seconds that the passes and updates took.
        passes_s: seconds of these from the first pass to the end of the last one.
    """

    plan: Plan | None
    num_tokens: int
    seconds: float
    passes_s: float


class RunPlans(Protocol):
    """Decides by plans which tasks share their passes, and turns a plan into the work of each step.

    `MultiTaskTrainer` takes `PlanFollower`, which plans with `peft_mux.planning` and learns from times.

    Attributes:
        current: the plan that is followed; `None` before the first one.
    """

    current: Plan | None

    def replan(self) -> Plan:
        """Make another plan, follow it, and start the tasks that it admits."""
        ...

    def replan_if_faster(self) -> bool:
        """Follow another plan if it is faster by measured times; every process calls this at once."""
        ...

    def plan_stages(self) -> Plan:
        """Return the plan by which a model is cut into stages, the same on every process."""
        ...

    def max_tokens(self) -> int:
        """Return the tokens that a pass may hold, as far as is known from the memory."""
        ...

    def next_works(self, num_steps: int = 1) -> list[StepWork]:
        """Return the next steps of all running tasks; fewer if rows cannot be read."""
        ...

    def smaller_work(self, work: StepWork, max_tokens: int) -> StepWork:
        """Return the same step in passes of at most `max_tokens`, and plan for such passes from now on."""
        ...

    def forget(self, task: str) -> None:
        """Forget the rows of a task that were read before their step."""
        ...

    @property
    def last_step(self) -> StepTime:
        """What the last step took on this process, until all processes have compared it; zeros before and after."""
        ...

    def record_step(self, result: StepResult, seconds: float, *, num_steps: int = 1) -> None:
        """Remember what the last step took on this process, or each of several steps between which nothing was done."""
        ...

    def compare_step(self, seconds: float, process_s: Sequence[float]) -> None:
        """Compare the last step with its plan, and the processes by the seconds of their passes."""
        ...

    def restore_times(self, saved: Mapping[str, Any]) -> None:
        """Plan like the run that is resumed, by what its state says of its plans."""
        ...
