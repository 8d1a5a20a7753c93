"""`TaskTimes`: for how long each task has taken steps, in this process, and what share of their time was its own."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Any, Protocol


class ShownTask(Protocol):
    """What is read of a task; a `TaskRun` is one."""

    step: int
    num_steps: int
    status: Any
    reason: str
    last_loss: float
    num_tokens: int
    state: Any

    @property
    def name(self) -> str:
        """Name of the task."""
        ...


class TaskTimes:
    """Adds up the seconds of the steps that each task took part in, with all that lay between them.

    Tasks of a step share its passes, which have no times of their own; so its seconds are divided by the tokens that
    each of them has trained in it. These parts are what shares are made of: those of all tasks add up to 1.

    Args:
        clock: returns seconds; another one for tests.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        """Have seen no step."""
        self._clock, self._last_s = clock, clock()
        self._steps: dict[str, int] = {}
        self._first: dict[str, int] = {}
        self._tokens: dict[str, int] = {}
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._own_seconds: defaultdict[str, float] = defaultdict(float)

    def begin(self, tasks: Iterable[ShownTask]) -> None:
        """Count from here on."""
        tasks = tuple(tasks)
        self._last_s = self._clock()
        self._steps = {task.name: task.step for task in tasks}
        self._tokens = {task.name: task.num_tokens for task in tasks}
        # Where a task was put back to a saved state, it stands elsewhere than it ended.
        self._first = dict(self._steps)
        self._seconds.clear()
        self._own_seconds.clear()

    def advance(self, tasks: Iterable[ShownTask]) -> None:
        """Count a step, or several, for the tasks that have taken it."""
        now, tokens = self._clock(), {}
        for task in tasks:
            if task.step > self._steps.setdefault(task.name, 0):
                self._seconds[task.name] += now - self._last_s
                self._first.setdefault(task.name, 0)
                tokens[task.name] = max(task.num_tokens - self._tokens.get(task.name, 0), 0)
            self._steps[task.name], self._tokens[task.name] = task.step, task.num_tokens
        total = sum(tokens.values())
        for name, own in tokens.items():
            self._own_seconds[name] += (now - self._last_s) * (own / total if total else 1 / len(tokens))
        self._last_s = now

    def seconds(self, name: str) -> float:
        """Return the seconds of a task since its training began here."""
        return self._seconds.get(name, 0.0)

    def share(self, name: str) -> float | None:
        """Return a task's share of the seconds of all steps since training began here; `None` before the first."""
        total_s = sum(self._own_seconds.values())
        return self._own_seconds.get(name, 0.0) / total_s if total_s else None

    def num_steps(self, task: ShownTask) -> int:
        """Return how many steps a task has taken since its training began here."""
        return max(0, task.step - self._first.get(task.name, 0))
