"""Successive halving: at a few steps of its training each task stays only if it is among the better half.

A task is held against those that have come to the same step, before it or with it, so that tasks which had to wait for
memory are judged like the others (asynchronous successive halving, Li et al. 2020). What stays is not touched: a task
that ends early changes nothing for those that go on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping


def rungs(num_steps: int, num_tasks: int) -> tuple[int, ...]:
    """Return the steps at which tasks are compared: doubling, so that one of `num_tasks` goes on to the end.

    Args:
        num_steps: steps of the whole training.
        num_tasks: tasks that begin.
    """
    halvings = math.ceil(math.log2(max(num_tasks, 1)))
    steps = {num_steps // 2 ** (halvings - number) for number in range(halvings)}
    return tuple(sorted(step for step in steps if 0 < step < num_steps))


def losers(values: Mapping[str, float], alive: set[str], *, maximise: bool) -> list[str]:
    """Return which tasks end at a rung: those that are not among the better half of all that have come to it.

    Args:
        values: the metric at this rung of each task that has come to it, ended ones too.
        alive: the tasks among these that have come to it now.
        maximise: whether a greater metric is the better one.
    """
    # Of equals the first one stays; what is no number is the worst.
    ranked = sorted(values, key=lambda name: _cost(values[name], maximise=maximise))
    better = set(ranked[: math.ceil(len(ranked) / 2)])
    return [name for name in ranked if name in alive and name not in better]


def _cost(value: float, *, maximise: bool) -> float:
    if not math.isfinite(value):
        return math.inf
    return -value if maximise else value
