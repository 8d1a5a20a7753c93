"""Steps of a contender, timed: what is counted, and what comes out."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from benchmarks.harness import CLOCKS

T = TypeVar("T")


class _Clock:
    now_s: Callable[[], float] = staticmethod(time.perf_counter)


def use_clock(name: str) -> None:
    """Let all contenders of this process be timed by a clock of `CLOCKS`."""
    _Clock.now_s = staticmethod(CLOCKS[name])


def now_s() -> float:
    """Return the seconds of the clock that was chosen."""
    return _Clock.now_s()


@dataclass(frozen=True, slots=True)
class Run:
    """What one run of a contender did.

    Attributes:
        train_s: seconds of training, from the call that starts it to its return.
        num_processed_tokens: tokens that went through the backbone in `steps_s`, padding included.
        losses: loss of each task at each of its steps, before the update; empty unless it was asked for.
        steps_s: seconds of all steps but the first of each task, which pays for what a run does once (memory
            that is touched for the first time, optimizer state, the start of `train()`); of all steps where
            there is only one.
    """

    train_s: float
    num_processed_tokens: int
    steps_s: float
    losses: dict[str, list[float]] = field(default_factory=dict)


def timed(per_step: Sequence[T]) -> Sequence[T]:
    """Return what belongs to the timed steps: all but the first, or all where there is only one."""
    return per_step[1:] if len(per_step) > 1 else per_step
