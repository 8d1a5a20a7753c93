"""`TaskTimes`: for how long each task has taken steps, in this process."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable

from peft_mux.reporting.views import ShownTask


class TaskTimes:
    """Adds up the seconds of the steps that each task took part in, with all that lay between them.

    Args:
        clock: returns seconds; another one for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Have seen no step."""
        self._clock, self._last_s = clock, clock()
        self._steps: dict[str, int] = {}
        self._first: dict[str, int] = {}
        self._seconds: defaultdict[str, float] = defaultdict(float)

    def begin(self, tasks: Iterable[ShownTask]) -> None:
        """Count from here on."""
        self._last_s = self._clock()
        self._steps = {task.name: task.step for task in tasks}
        # Where a task was put back to a saved state, it stands elsewhere than it ended.
        self._first = dict(self._steps)
        self._seconds.clear()

    def advance(self, tasks: Iterable[ShownTask]) -> None:
        """Count a step, or several, for the tasks that have taken it."""
        now = self._clock()
        for task in tasks:
            if task.step > self._steps.setdefault(task.name, 0):
                self._seconds[task.name] += now - self._last_s
                self._first.setdefault(task.name, 0)
            self._steps[task.name] = task.step
        self._last_s = now

    def seconds(self, name: str) -> float:
        """Return the seconds of a task since its training began here."""
        return self._seconds.get(name, 0.0)

    def num_steps(self, task: ShownTask) -> int:
        """Return how many steps a task has taken since its training began here."""
        return max(0, task.step - self._first.get(task.name, 0))
