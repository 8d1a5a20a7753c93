"""Replay of a trace of tasks on a cluster of GPUs, first come first served (M §5.4, Figure 21b).

* The cluster is cut into instances of equal size, one backbone each (`benchmarks.planner.cluster.instance`).
* First come, first served: only the oldest waiting task is ever placed. It opens a new instance while GPUs are free,
  otherwise it joins the instance with fewest tasks that has room for it; otherwise it waits, and all behind it too.
  Placing costs no time; no task is moved or preempted.
* The work of a task is the tokens that it trains in its duration when it runs alone on an instance of the reference
  system. All systems get the same work.
* While an instance holds a set of tasks, each takes one optimizer step in every step of the instance, whose time the
  planner predicts for that set. When a task comes or ends, the progress of its instance is settled and times are
  predicted again (processor sharing by events). Steps in flight are cut and continue in proportion.
* An instance that runs empty gives its GPUs back at once.
* Tasks that find the queue full are turned away. At the horizon everything stops: tokens trained by then count.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.planner.cluster.instance import InstanceModel, Speed
from benchmarks.planner.cluster.trace import TracedTask

_DONE_TOKENS = 1e-6
"""Part of a task's work below which what is left is rounding."""


@dataclass(slots=True)
class Replay:
    """One system on one trace.

    Attributes:
        system: name of the system, one of `SYSTEMS` in `instance.py`.
        elapsed_s: seconds from the start of the trace to the horizon or the last end.
        start_s: when each task was placed; `None` if never.
        end_s: when the work of each task was done; `None` if not before the horizon.
        trained_tokens: effective tokens of all tasks: those that users asked for.
        computed_tokens: tokens that all instances computed, padding included.
        busy_s: seconds in which a stage of an instance computed, in units of an instance.
        num_rejected: tasks that found the queue full.
    """

    system: str
    elapsed_s: float
    start_s: list[float | None]
    end_s: list[float | None]
    trained_tokens: float = 0.0
    computed_tokens: float = 0.0
    busy_s: float = 0.0
    num_rejected: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Effective throughput of the cluster."""
        return self.trained_tokens / self.elapsed_s


@dataclass(slots=True)
class _Instance:
    """One backbone, the tasks on it by index, and when the first of them ends."""

    speed: Speed
    settled_s: float
    members: list[int] = field(default_factory=list)
    end_s: float = math.inf


def replay(
    tasks: Sequence[TracedTask],
    model: InstanceModel,
    reference: InstanceModel,
    num_instances: int,
    *,
    horizon_s: float = math.inf,
    queue_limit: int | None = None,
) -> Replay:
    """Replay a trace on a cluster of one system, and return what became of its tasks.

    Args:
        tasks: the tasks of the trace, by time of submission.
        model: predicts the instances of the system that is replayed.
        reference: predicts the instances of the system on which the trace's durations were taken.
        num_instances: how many instances the cluster has room for.
        horizon_s: seconds since the start of the trace at which the replay stops.
        queue_limit: most tasks that may wait; `None` for any number.
    """
    steps = [task.duration_s / reference.speed([task.kind]).step_s for task in tasks]
    left = list(steps)
    outcome = Replay(model.system, horizon_s, [None] * len(tasks), [None] * len(tasks))
    instances: list[_Instance] = []
    queue: deque[int] = deque()

    def settle(instance: _Instance, now_s: float) -> None:
        """Count what an instance did up to now; comes before every change of its tasks."""
        taken = (now_s - instance.settled_s) / instance.speed.step_s
        outcome.busy_s += (now_s - instance.settled_s) * instance.speed.utilization
        outcome.computed_tokens += taken * instance.speed.computed_tokens
        for index in instance.members:
            outcome.trained_tokens += min(taken, left[index]) * tasks[index].kind.tokens_per_step
            left[index] = max(0.0, left[index] - taken)
        instance.settled_s = now_s

    def place(index: int, now_s: float) -> _Instance | None:
        """Return the instance that a task is placed on, if there is room for it."""
        kind = tasks[index].kind
        if len(instances) < num_instances:
            instances.append(_Instance(model.speed([kind]), now_s))
            return instances[-1]
        # The sort is stable: of instances with as many tasks the one that was opened first is taken.
        for instance in sorted(instances, key=lambda candidate: len(candidate.members)):
            if model.fits([*(tasks[member].kind for member in instance.members), kind]):
                return instance
        return None

    coming, now_s = 0, 0.0
    while coming < len(tasks) or instances:
        arrival_s = tasks[coming].submit_s if coming < len(tasks) else math.inf
        ending = min(instances, key=lambda candidate: candidate.end_s, default=None)
        changed: list[_Instance] = []
        now_s = min(arrival_s, ending.end_s) if ending else arrival_s
        if now_s >= horizon_s:
            break
        if ending is not None and ending.end_s <= arrival_s:
            settle(ending, now_s)
            for index in [job for job in ending.members if left[job] <= _DONE_TOKENS * steps[job]]:
                outcome.end_s[index] = now_s
                ending.members.remove(index)
            if ending.members:
                changed.append(ending)
            else:
                instances.remove(ending)
        else:
            queue.append(coming)
            coming += 1
        while queue and (instance := place(queue[0], now_s)) is not None:
            settle(instance, now_s)
            outcome.start_s[queue[0]] = now_s
            instance.members.append(queue.popleft())
            changed.append(instance)
        for instance in changed:
            instance.speed = model.speed([tasks[index].kind for index in instance.members])
            instance.end_s = now_s + min(left[index] for index in instance.members) * instance.speed.step_s
        # The one that came last is turned away, never one that waits already.
        if queue_limit is not None and len(queue) > queue_limit:
            queue.pop()
            outcome.num_rejected += 1
    if math.isinf(horizon_s):
        outcome.elapsed_s = now_s
    for instance in instances:
        settle(instance, horizon_s)
    return outcome
