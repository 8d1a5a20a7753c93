"""Replay of a trace of tasks on a cluster of GPUs, first come first served (M §5.4, Figure 21b).

Assumptions, which `assumptions` puts into sentences for the reader of a `Replay`:

* The cluster is cut into instances of equal size, one backbone each (`benchmarks.planner.cluster.instance`).
* First come, first served: only the oldest waiting task is ever placed. It opens a new instance while GPUs are free
  ("spread"), or joins the fullest instance with room first ("fill"); otherwise the instance with fewest tasks that has
  room for it; otherwise it waits, and all behind it too. Placing costs no time; no task is moved or preempted.
* The work of a task is the tokens that it trains in its duration when it runs alone on an instance of the reference
  system. All systems get the same work.
* While an instance holds a set of tasks, each takes one optimizer step in every step of the instance, whose time the
  planner predicts for that set. When a task comes or ends, all progress is settled and times are predicted again
  (processor sharing by events). Steps in flight are cut and continue in proportion.
* An instance that runs empty gives its GPUs back at once.
* Tasks that find the queue full are turned away, where it has a limit. At the horizon everything stops: tokens trained
  by then count, tasks that have not ended count neither as ended nor as waiting.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import simpy

from benchmarks.planner.cluster.instance import InstanceModel, Speed
from benchmarks.planner.cluster.result import Replay, TaskRecord
from benchmarks.planner.cluster.trace import TaskKind, TracedTask

Placement = Literal["spread", "fill"]

_DONE_TOKENS = 1e-6
"""Part of a task's work below which what is left is rounding."""


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """How a trace is replayed.

    Attributes:
        num_gpus: GPUs of the whole cluster; those that make no whole instance stay idle.
        placement: whether a task opens a new instance first ("spread"), or joins the fullest with room ("fill").
        horizon_s: seconds since the start of the trace at which the replay stops; inf runs until all tasks have ended.
        queue_limit: most tasks that may wait; `None` for any number.

    Raises:
        ValueError: for numbers out of range or an unknown placement.
    """

    num_gpus: int
    placement: Placement = "spread"
    horizon_s: float = math.inf
    queue_limit: int | None = None

    def __post_init__(self) -> None:
        if self.num_gpus < 1:
            raise ValueError(f"num_gpus must be 1 or more, got {self.num_gpus}. Count the GPUs of the cluster.")
        if self.placement not in ("spread", "fill"):
            raise ValueError(f"placement must be 'spread', 'fill', got {self.placement!r}.")
        if not self.horizon_s > 0:
            raise ValueError(
                f"horizon_s must be more than 0, or inf to run until all have ended, got {self.horizon_s}."
            )
        if self.queue_limit is not None and self.queue_limit < 0:
            raise ValueError(f"queue_limit must be 0 or more, or None for no limit, got {self.queue_limit}.")


def replay(
    tasks: Sequence[TracedTask], model: InstanceModel, reference: InstanceModel, settings: ReplaySettings
) -> Replay:
    """Replay a trace on a cluster of one system, and return what became of its tasks.

    Args:
        tasks: the tasks of the trace, by time of submission.
        model: predicts the instances of the system that is replayed.
        reference: predicts the instances of the system on which the trace's durations were taken.
        settings: size of the cluster, and the rules of its queue.

    Raises:
        ValueError: for tasks out of order, a cluster smaller than one instance, or a task that fits no empty instance.
    """
    gpus = model.spec.devices.num_devices
    if settings.num_gpus < gpus:
        raise ValueError(f"num_gpus must be {gpus} or more, the GPUs of one instance, got {settings.num_gpus}.")
    if any(later.submit_s < earlier.submit_s for earlier, later in zip(tasks, tasks[1:], strict=False)):
        raise ValueError("tasks must be sorted by submit_s.")
    for kind in sorted({task.kind for task in tasks}):
        if not model.fits([kind]):
            raise ValueError(
                f"a task of {kind} does not fit an empty instance of {model.system}. Leave such tasks out."
            )
    environment = simpy.Environment()
    run = _ReplayState(environment, tasks, model, reference, settings)
    environment.process(run.arrivals())
    if math.isinf(settings.horizon_s):
        environment.run()
    else:
        environment.run(until=settings.horizon_s)
    return run.result()


@dataclass(slots=True, eq=False)
class _Instance:
    """One backbone and the tasks on it.

    Attributes:
        speed: how the present tasks train together.
        booked_until_s: time up to which what the instance did is counted.
        members: indices of the tasks on it, in the order of placement.
        version: counts the changes of its tasks, so that a wait for an end that no longer comes is known as such.
    """

    speed: Speed
    booked_until_s: float
    members: list[int] = field(default_factory=list)
    version: int = 0


class _ReplayState:
    """The state of one replay: the queue, the instances, and what was done so far."""

    def __init__(
        self,
        environment: simpy.Environment,
        tasks: Sequence[TracedTask],
        model: InstanceModel,
        reference: InstanceModel,
        settings: ReplaySettings,
    ) -> None:
        self._environment = environment
        self._tasks = tasks
        self._model = model
        self._settings = settings
        self._reference = reference
        self._work = [_work_tokens(task, reference) for task in tasks]
        self._left = list(self._work)
        self._start: list[float | None] = [None] * len(tasks)
        self._end: list[float | None] = [None] * len(tasks)
        self._rejected = [False] * len(tasks)
        self._queue: deque[int] = deque()
        self._instances: list[_Instance] = []
        self._max_instances = settings.num_gpus // model.spec.devices.num_devices
        self._allocated_s = 0.0
        self._busy_s = 0.0
        self._computed_tokens = 0.0
        self._timeline: list[tuple[float, int, int, float]] = []

    # ----------------------------------------------------------------- events

    def arrivals(self) -> Generator[Any, Any, None]:
        """Submit every task at its time."""
        for index, task in enumerate(self._tasks):
            if task.submit_s > self._environment.now:
                yield self._environment.timeout(task.submit_s - self._environment.now)
            self._queue.append(index)
            self._place_waiting_tasks()
            limit = self._settings.queue_limit
            # The one that came last is turned away, never one that waits already.
            if limit is not None and len(self._queue) > limit:
                self._rejected[self._queue.pop()] = True
            else:
                self._extend_timeline()

    def _wait_for_end(self, instance: _Instance, version: int, delay_s: float) -> Generator[Any, Any, None]:
        """Wait for the first end on an instance, unless its tasks change before."""
        yield self._environment.timeout(delay_s)
        # Its tasks have changed since, and another wait stands for its next end.
        if version != instance.version:
            return
        self._book_progress(instance)
        for index in list(instance.members):
            # Of several tasks that end together, rounding leaves some a little to do.
            if self._left[index] <= _DONE_TOKENS * self._work[index]:
                self._left[index] = 0.0
                self._end[index] = self._environment.now
                instance.members.remove(index)
        if not instance.members:
            instance.version += 1
            self._instances.remove(instance)
        changed = self._place_waiting_tasks(refilled=instance if instance.members else None)
        if instance.members and not changed:
            self._predict_next_end(instance)
        self._extend_timeline()

    # -------------------------------------------------------------- placement

    def _place_waiting_tasks(self, refilled: _Instance | None = None) -> bool:
        """Place tasks in order while there is room; return whether the refilled instance got one of them."""
        touched: dict[int, _Instance] = {}
        while self._queue:
            index = self._queue[0]
            instance = self._choose_instance(self._tasks[index].kind)
            if instance is None:
                break
            self._queue.popleft()
            self._book_progress(instance)
            instance.members.append(index)
            self._start[index] = self._environment.now
            touched[id(instance)] = instance
        for instance in touched.values():
            self._predict_next_end(instance)
        return refilled is not None and id(refilled) in touched

    def _choose_instance(self, kind: TaskKind) -> _Instance | None:
        """Return the instance for a task; a new one is opened if that is its place."""
        if self._settings.placement == "spread" and len(self._instances) < self._max_instances:
            return self._open_instance(kind)
        # The sort is stable: of instances with as many tasks the one that was opened first is taken.
        sign = 1 if self._settings.placement == "spread" else -1
        order = sorted(range(len(self._instances)), key=lambda number: sign * len(self._instances[number].members))
        for number in order:
            instance = self._instances[number]
            if len(instance.members) < self._model.max_tasks and self._model.fits([*self._kinds(instance), kind]):
                return instance
        return self._open_instance(kind) if len(self._instances) < self._max_instances else None

    def _open_instance(self, kind: TaskKind) -> _Instance:
        """Open an instance for a task of this kind, which is placed on it next."""
        instance = _Instance(self._model.speed([kind]), booked_until_s=self._environment.now)
        self._instances.append(instance)
        return instance

    # --------------------------------------------------------------- progress

    def _kinds(self, instance: _Instance) -> list[TaskKind]:
        return [self._tasks[index].kind for index in instance.members]

    def _book_progress(self, instance: _Instance) -> None:
        """Count what an instance did since this was last called; comes before every change of its tasks."""
        elapsed_s = self._environment.now - instance.booked_until_s
        instance.booked_until_s = self._environment.now
        if elapsed_s <= 0:
            return
        gpu_s = elapsed_s * self._model.spec.devices.num_devices
        self._allocated_s += gpu_s
        self._busy_s += gpu_s * instance.speed.utilization
        steps = elapsed_s / instance.speed.step_s
        self._computed_tokens += steps * instance.speed.computed_tokens
        for index in instance.members:
            trained = steps * self._tasks[index].kind.tokens_per_step
            self._left[index] = max(0.0, self._left[index] - trained)

    def _predict_next_end(self, instance: _Instance) -> None:
        """Predict the speed of an instance whose tasks have changed, and wait for the first of them to end."""
        speed = instance.speed = self._model.speed(self._kinds(instance))
        instance.version += 1
        delay_s = min(self._left[i] / self._tasks[i].kind.tokens_per_step for i in instance.members) * speed.step_s
        self._environment.process(self._wait_for_end(instance, instance.version, delay_s))

    def _extend_timeline(self) -> None:
        """Record what runs and waits from now on."""
        running = sum(len(instance.members) for instance in self._instances)
        rate = math.fsum(
            sum(kind.tokens_per_step for kind in self._kinds(instance)) / instance.speed.step_s
            for instance in self._instances
        )
        self._timeline.append((self._environment.now, running, len(self._queue), rate))

    # ----------------------------------------------------------------- result

    def result(self) -> Replay:
        """Count what all instances did up to now, and return what became of the tasks."""
        for instance in self._instances:
            self._book_progress(instance)
        records = tuple(
            TaskRecord(
                index,
                task.submit_s,
                self._start[index],
                self._end[index],
                self._rejected[index],
                self._work[index] - self._left[index],
            )
            for index, task in enumerate(self._tasks)
        )
        horizon_s = self._settings.horizon_s
        return Replay(
            system=self._model.system,
            num_gpus=self._settings.num_gpus,
            gpus_per_instance=self._model.spec.devices.num_devices,
            # Not the clock, which advances to instants that were given up when an instance's tasks changed.
            elapsed_s=max((end for end in self._end if end is not None), default=0.0)
            if math.isinf(horizon_s)
            else horizon_s,
            records=records,
            allocated_gpu_s=self._allocated_s,
            busy_gpu_s=self._busy_s,
            computed_tokens=self._computed_tokens,
            timeline=tuple(self._timeline),
            assumptions=assumptions(self._model, self._reference, self._settings),
        )


def assumptions(model: InstanceModel, reference: InstanceModel, settings: ReplaySettings) -> tuple[str, ...]:
    """Return in sentences what a replay takes for granted.

    Args:
        model: predicts the instances of the system that is replayed.
        reference: predicts the instances of the system on which the trace's durations were taken.
        settings: size of the cluster, and the rules of its queue.
    """
    spec = model.spec
    gpus = spec.devices.num_devices
    device = spec.devices.device.name
    stop = "until all tasks have ended"
    if math.isfinite(settings.horizon_s):
        stop = f"for {settings.horizon_s / 3600:g} hours"
    queue = "any number of tasks may wait"
    if settings.queue_limit is not None:
        queue = f"{settings.queue_limit} tasks may wait, others are turned away"
    return (
        f"{settings.num_gpus} {device} GPUs in instances of {gpus}, each a pipeline of {gpus} stages.",
        f"Step times come from the analytic profile of the {device} data sheet, not from measurement.",
        f"First come, first served, placement {settings.placement!r}; up to {model.max_tasks} tasks an instance, as "
        f"memory allows; {queue}; runs {stop}.",
        f"A task's work is the tokens that {reference.system} trains in its duration, alone on an instance.",
        "Each task of an instance takes one optimizer step in every step of the instance; progress is settled at every "
        "arrival and end.",
        "Placing, starting, loading, saving and failing take no time; no task is moved or preempted.",
    )


def _work_tokens(task: TracedTask, reference: InstanceModel) -> float:
    """Return the effective tokens that a task trains in its duration on the reference system."""
    return task.duration_s * task.kind.tokens_per_step / reference.speed([task.kind]).step_s
