"""`Delays`: for how long the own code of each task made the others wait, told aloud where that is much."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, Protocol

CALL_LIMIT_S = 1.0
"""Seconds that one call of a task's own code may take without being told of."""
SHARE_LIMIT = 0.1
"""Share of the run's time that all calls of one task may take without being told of, once they have taken a second."""


class Record(Protocol):
    """Writes a record of the run."""

    def __call__(self, event: str, **facts: Any) -> None:
        """Write it."""
        ...


class Delays:
    """Adds up what the own code of tasks takes: their callbacks, their metrics, and waiting for their rows.

    A task is told of when one of its calls takes longer than `CALL_LIMIT_S`, or all of them together more than
    `SHARE_LIMIT` of the run; then again each time that its total has doubled, and with its total in the end.

    Args:
        warn: prints a line that nobody may miss.
        record: writes a record of the run.
        clock: returns seconds; another one for tests.
    """

    def __init__(
        self, warn: Callable[[str], None], record: Record, *, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        """Begin to count the time of the run."""
        self._warn, self._record, self._clock = warn, record, clock
        self._began_s = clock()
        self._seconds: defaultdict[str, Counter[str]] = defaultdict(Counter)
        self._told_s: dict[str, float] = {}

    def note(self, task: str, what: str, seconds: float) -> None:
        """Take note of a call; this is the `Listener` of the tasks' own code.

        Args:
            task: name of the task.
            what: what of it has run.
            seconds: seconds that it took.
        """
        self._seconds[task][what] += seconds  # type: ignore[assignment]
        total_s = self.total_s(task)
        # First, as it spares the clock at nearly every call.
        if total_s < max(CALL_LIMIT_S, 2 * self._told_s.get(task, 0.0)):
            return
        if seconds < CALL_LIMIT_S and total_s < SHARE_LIMIT * (self._clock() - self._began_s):
            return
        self._told_s[task] = total_s
        self._record("delay", task=task, what=what, seconds=seconds, total_s=total_s)
        self._warn(f"{task}: its {what} made the other tasks wait for {seconds:.1f} s ({total_s:.1f} s in all)")

    def total_s(self, task: str) -> float:
        """Return the seconds that a task's own code took so far."""
        return sum(self._seconds[task].values())

    def record_totals(self) -> None:
        """Write one record for each task that took a second or more, with the seconds of each kind of its code."""
        for task in self._seconds:
            self._record_total(task)

    def forget(self, task: str) -> None:
        """Write the total of a task that leaves, and keep nothing of it."""
        self._record_total(task)
        self._seconds.pop(task, None)
        self._told_s.pop(task, None)

    def _record_total(self, task: str) -> None:
        seconds = self._seconds.get(task, {})
        total_s = sum(seconds.values())
        if total_s >= CALL_LIMIT_S:
            self._record("delay_total", task=task, total_s=total_s, **{f"{kind}_s": s for kind, s in seconds.items()})
