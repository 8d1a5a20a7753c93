"""`RunTimes`: what all steps of some tasks take one task after another, and together as they are planned."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from peft_mux.scheduler.units import seconds_text


class RunTimes(NamedTuple):
    """Predicted times of the same steps, taken in two ways.

    Attributes:
        in_turn_s: seconds of the steps of one task after another.
        together_s: seconds of the same steps as they are planned, until the last task has ended.
    """

    in_turn_s: float
    together_s: float

    @property
    def ratio(self) -> float:
        """Times that the steps together are faster."""
        return self.in_turn_s / self.together_s

    def __str__(self) -> str:
        """Return both times and their ratio in one line."""
        return (
            f"one after another {seconds_text(self.in_turn_s)}   together {seconds_text(self.together_s)}   "
            f"{self.ratio:.2g}x (estimate)"
        )


def run_times(num_steps: Sequence[int], alone_s: Sequence[float], step_s: float) -> RunTimes | None:
    """Return both times; `None` for a single task, and where a time is not known.

    Tasks end at different steps, and nothing is planned for what is left of them then. What a step of all saves over
    theirs alone is taken to fall in even parts with each task that ends, to nothing for the last one: so it is of time
    that passes take whatever they hold.

    Args:
        num_steps: steps of each task.
        alone_s: predicted seconds of a step of each task by itself; 0 where that is not known.
        step_s: predicted seconds of a step of all tasks.
    """
    if len(alone_s) < 2 or not all(alone_s) or not any(num_steps) or not step_s:
        return None
    saved_s = (sum(alone_s) - step_s) / (len(alone_s) - 1)
    together_s = running_s = longest_s = 0.0
    # From the task that ends last back to the step in which all run.
    tasks = sorted(zip(num_steps, alone_s, strict=True), reverse=True)
    ends = [*(steps for steps, _ in tasks[1:]), 0]
    for others, ((steps, own_s), end) in enumerate(zip(tasks, ends, strict=True)):
        running_s, longest_s = running_s + own_s, max(longest_s, own_s)
        # No company makes a step faster than its longest task is by itself.
        together_s += (steps - end) * max(running_s - others * saved_s, min(longest_s, step_s))
    return RunTimes(sum(steps * own_s for steps, own_s in tasks), together_s)
