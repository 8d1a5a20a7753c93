"""Times functions on a device: warm-up, repetitions within a budget, medians."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

_LEAST_REPEATS = 2
_MOST_REPEATS = 25


class Stopwatch:
    """Times functions, and keeps a budget of seconds for doing so.

    Args:
        device: the device on which the functions run; on CUDA they are timed by events.
        budget_s: seconds for all measurements together.
        timer: the clock that times functions on a CPU, in seconds.
        wall: the clock by which the budget is kept, in seconds.

    Attributes:
        device: the device on which the functions run.
        budget_s: seconds for all measurements together.
        least_s: seconds that all measurements so far would have taken at the fewest repetitions.
    """

    def __init__(
        self,
        device: torch.device,
        budget_s: float,
        timer: Callable[[], float] = time.perf_counter,
        wall: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Start the budget now."""
        self._timer = timer
        self._wall = wall
        self.device = device
        self.budget_s = budget_s
        self.least_s = 0.0
        self._start_s = wall()

    @property
    def remaining_s(self) -> float:
        """Seconds that are left of the budget."""
        return self.budget_s - (self._wall() - self._start_s)

    def measure(self, run: Callable[[], Any], *, share: float) -> float:
        """Return the median seconds of a function.

        Args:
            run: called once to warm up, at least twice to measure, and more often while its share lasts.
            share: part of the budget that may be spent, in (0, 1].
        """
        return self.measure_all([run], share=share)[0]

    def measure_all(self, runs: list[Callable[[], Any]], *, share: float) -> list[float]:
        """Return the median seconds of functions that are taken in turns, so that noise meets all alike.

        Args:
            runs: each is called once to warm up, at least twice to measure, and more often while the share lasts.
            share: part of the budget that may be spent on all of them, in (0, 1].
        """
        start_s = self._wall()
        taken: list[list[float]] = [[] for _ in runs]
        for run in runs:
            self._time_once(run)
        for count in range(_MOST_REPEATS):
            if count == _LEAST_REPEATS:
                self.least_s += self._wall() - start_s
            if count >= _LEAST_REPEATS and self._wall() - start_s > share * self.budget_s:
                break
            for seconds, run in zip(taken, runs, strict=True):
                seconds.append(self._time_once(run))
        # Not the mean: other programs on the machine make single runs several times as long.
        return [statistics.median(seconds) for seconds in taken]

    def _time_once(self, run: Callable[[], Any]) -> float:
        """Return the seconds of one call."""
        if self.device.type != "cuda":
            start_s = self._timer()
            run()
            return self._timer() - start_s
        # Events stand in the stream itself, so that the host's own time between launches is not counted.
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(self.device)
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize(self.device)
        return begin.elapsed_time(end) / 1000
