"""Cluster replay: against an independent event loop, closed forms, and what must hold of every replay."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planner.cluster.instance import SYSTEMS, InstanceModel, InstanceSpec
from benchmarks.planner.cluster.replay import Replay, replay
from benchmarks.planner.cluster.trace import TaskKind, TracedTask
from peft_mux.scheduler.costs.hardware import parse_devices
from peft_mux.scheduler.costs.memory import ModelShape

SHAPE = ModelShape(8, 1024, 2816, 1024, 1024, 32000, 2 * 130_000_000, 2)
SPEC = InstanceSpec(parse_devices("2xA40"), SHAPE, max_tasks=3, micro_batch_counts=(4,))
SHORT, LONG = TaskKind(64, 8, 8), TaskKind(256, 16, 16)
MODELS = {system: InstanceModel(system, SPEC) for system in SYSTEMS}
REFERENCE = MODELS["nemo"]


def run(tasks: Sequence[TracedTask], system: str = "muxtune", num_instances: int = 2, **options: int) -> Replay:
    return replay(tasks, MODELS[system], REFERENCE, num_instances, **options)


def task(submit_s: float, duration_s: float, kind: TaskKind = SHORT) -> TracedTask:
    return TracedTask(submit_s, duration_s, kind)


def work_steps(one: TracedTask) -> float:
    return one.duration_s / REFERENCE.speed([one.kind]).step_s


def event_loop(tasks: Sequence[TracedTask], model: InstanceModel, num_instances: int) -> list[tuple[float, float]]:
    """Return start and end of every task by the rules of `cluster` without its code."""
    left = [work_steps(one) for one in tasks]
    start, end = [math.nan] * len(tasks), [math.nan] * len(tasks)
    instances: list[list[int]] = []
    queue: list[int] = []
    now, coming = 0.0, 0
    while coming < len(tasks) or queue or instances:
        step_s = [model.speed([tasks[i].kind for i in members]).step_s for members in instances]
        ends = [now + min(left[i] for i in m) * s for m, s in zip(instances, step_s, strict=True)]
        arrival = tasks[coming].submit_s if coming < len(tasks) else math.inf
        then = min([arrival, *ends])
        for members, seconds in zip(instances, step_s, strict=True):
            for i in members:
                left[i] -= (then - now) / seconds
        for number, members in enumerate(instances):
            if ends[number] == then:
                for i in [i for i in members if left[i] < 1e-6 * work_steps(tasks[i])]:
                    end[i] = then
                    members.remove(i)
        instances = [members for members in instances if members]
        now = then
        if arrival == then:
            queue.append(coming)
            coming += 1
        while queue:
            open_ones = [m for m in instances if len(m) < model.max_tasks]
            if len(instances) < num_instances:
                instances.append([queue[0]])
            elif open_ones:
                min(open_ones, key=len).append(queue[0])
            else:
                break
            start[queue.pop(0)] = now
    return list(zip(start, end, strict=True))


Drawn = list[tuple[float, float, TaskKind]]
random_tasks = st.lists(
    st.tuples(st.floats(0.5, 300), st.floats(1, 2000), st.sampled_from((SHORT, LONG))), min_size=1, max_size=14
)


def in_order(drawn: Drawn) -> list[TracedTask]:
    now, tasks = 0.0, []
    for gap_s, duration_s, kind in drawn:
        now += gap_s
        tasks.append(task(now, duration_s, kind))
    return tasks


@given(random_tasks, st.sampled_from(("nemo", "muxtune")))
def test_every_start_and_end_is_that_of_an_independent_event_loop(drawn: Drawn, system: str) -> None:
    tasks = in_order(drawn)
    expected = event_loop(tasks, MODELS[system], num_instances=2)
    result = run(tasks, system)
    assert result.start_s == pytest.approx([start_s for start_s, _ in expected], rel=1e-6)
    assert result.end_s == pytest.approx([end_s for _, end_s in expected], rel=1e-6)


@given(random_tasks, st.sampled_from(SYSTEMS))
def test_tasks_start_in_the_order_in_which_they_came_and_all_work_is_done(drawn: Drawn, system: str) -> None:
    tasks = in_order(drawn)
    result = run(tasks, system)
    assert None not in result.start_s
    assert result.start_s == sorted(result.start_s)  # type: ignore[type-var]
    for start_s, end_s, one in zip(result.start_s, result.end_s, tasks, strict=True):
        assert one.submit_s <= start_s < end_s  # type: ignore[operator]
    expected = sum(work_steps(one) * one.kind.tokens_per_step for one in tasks)
    assert result.trained_tokens == pytest.approx(expected, rel=1e-6)
    assert 0 < result.busy_s < 2 * result.elapsed_s


def test_a_full_queue_turns_tasks_away() -> None:
    result = run([task(index, 1000) for index in range(5)], "nemo", num_instances=1, queue_limit=1)
    assert [end_s is None for end_s in result.end_s] == [False, False, True, True, True]
    assert result.num_rejected == 3
