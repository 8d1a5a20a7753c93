"""Whole passes as rows of subgraphs: the cut is that of layers as graphs, and turns hide what they can of the sums."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from benchmarks.planner.subgraphs.graph import segment
from benchmarks.planner.subgraphs.layers import LayerLatency, layer_graph
from peft_mux.scheduler.costs.hardware import Overlap
from peft_mux.scheduler.plan import PassParts
from peft_mux.scheduler.subgraphs import (
    LaunchQueue,
    Stretch,
    neighbour_groups,
    pass_times,
    turn_groups,
    turn_order,
    turns_timeline,
)

PARTS = PassParts(
    tokens=64.0,
    targets=10.0,
    attention_s=2.0,
    mlp_s=3.0,
    first_s=0.5,
    head_s=4.0,
    overhead_s=0.25,
    sum_s=1.0,
    head_sum_s=0.1,
    head_gradient_sum_s=0.2,
    head_block_rows=4,
    forward_fraction=0.4,
)


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_layers_are_cut_where_the_graph_of_their_operators_is(direction: str) -> None:
    share = PARTS.forward_fraction if direction == "forward" else 1 - PARTS.forward_fraction
    latency = LayerLatency(
        qkv_s=0.25 * share * PARTS.attention_s,
        attention_s=0.5 * share * PARTS.attention_s,
        output_s=0.25 * share * PARTS.attention_s,
        gate_up_s=0.6 * share * PARTS.mlp_s,
        down_s=0.4 * share * PARTS.mlp_s,
        all_reduce_s=PARTS.sum_s,
    )
    graph = layer_graph("one", latency, direction=direction, num_layers=3)
    planned = [(item.compute_s, item.communication_s) for item in segment(graph)]
    stretch = Stretch(3, is_first=False, is_last=False, direction=direction)  # type: ignore[arg-type]
    found = pass_times(replace(PARTS, overhead_s=0.0), stretch)
    assert found[-1] == (0.0, 0.0), "what ends is nothing but the wait for the last sum"
    assert [tuple(one) for one in found[:-1]] == [pytest.approx(one) for one in planned]


@pytest.mark.parametrize("recomputes", [False, True])
def test_a_pass_computes_what_its_parts_say_whatever_stretch_it_is_cut_into(recomputes: bool) -> None:
    whole = pass_times(PARTS, Stretch(4, recomputes=recomputes))
    halves = [
        pass_times(PARTS, Stretch(2, is_first=first, is_last=not first, recomputes=recomputes, direction=way))
        for first in (True, False)
        for way in ("forward", "backward")
    ]
    again_s = 4 * PARTS.forward_fraction * (PARTS.attention_s + PARTS.mlp_s) if recomputes else 0.0
    expected_s = 4 * (PARTS.attention_s + PARTS.mlp_s) + PARTS.first_s + PARTS.head_s + again_s
    assert sum(one.compute_s for one in whole) == pytest.approx(expected_s + PARTS.overhead_s)
    assert sum(one.compute_s for half in halves for one in half) == pytest.approx(expected_s + 2 * PARTS.overhead_s)
    sums_s = sum(one.sum_s for one in whole)
    assert sum(one.sum_s for half in halves for one in half) == pytest.approx(sums_s)
    # The gradient of a frozen embedding is not summed.
    assert sum(one.sum_s == PARTS.sum_s for one in whole) == 4 * (5 if recomputes else 4) - 1
    assert sum(one.sum_s == PARTS.head_sum_s for one in whole) == PARTS.num_head_blocks == 3


def test_turns_hide_sums_and_never_take_longer_than_one_after_another() -> None:
    draw = random.Random(0)
    for _ in range(20):
        sizes = [draw.uniform(16, 256) for _ in range(draw.randint(2, 4))]
        passes = [pass_times(PARTS.of_size(size, size / 2), Stretch(2)) for size in sizes]
        together, apart = turns_timeline(passes), turns_timeline(passes, in_turns=False)
        assert together.makespan_s < apart.makespan_s
        compute_s, sums_s = map(sum, zip(*(one for times in passes for one in times), strict=True))
        assert together.makespan_s >= max(compute_s, sums_s) * (1 - 1e-9)
        assert len(turn_order(passes)) == sum(map(len, passes))


def test_what_a_profile_knows_of_turns_is_charged() -> None:
    passes = [pass_times(PARTS, Stretch(2))] * 2

    def seconds(in_turns: bool = True, **known: float) -> float:
        return turns_timeline(passes, Overlap(**known), in_turns=in_turns).makespan_s

    assert seconds(slowdown=0.99) > seconds(slowdown=0.5) > seconds()
    assert seconds(turn_s=0.1) == pytest.approx(seconds() + 0.1 * sum(map(len, passes)), rel=0.05)
    assert seconds(in_turns=False, turn_s=0.1) == seconds(in_turns=False)
    # Ranks that wait for one another at every sum do so longer one after another than in turns.
    apart_s = seconds(in_turns=False, skew=0.2) - seconds(in_turns=False)
    assert 0 <= seconds(skew=0.2) - seconds() < apart_s
    # Sums that stop all computing leave turns nothing but their cost.
    assert seconds(slowdown=0.99, turn_s=0.05) > seconds(in_turns=False)


@pytest.mark.parametrize("known", [{"slowdown": 1.0}, {"skew": -0.1}, {"turn_s": float("inf")}])
def test_what_no_device_does_is_refused(known: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(known))} must be "):
        Overlap(**known)


def test_the_queue_gives_least_depth_then_the_longest_then_the_first_group() -> None:
    queue: LaunchQueue[str] = LaunchQueue()
    for key, depth, latency_s, owner in [("d", 1, 9.0, 0), ("c", 0, 1.0, 2), ("b", 0, 1.0, 1), ("a", 0, 2.0, 3)]:
        queue.enqueue(key, depth=depth, latency_s=latency_s, group=owner)
    assert queue.launch() == "a"
    queue.enqueue("a2", depth=0, latency_s=0.5, group=3)
    assert [queue.launch() for _ in range(len(queue))] == ["b", "c", "a2", "d"]
    with pytest.raises(IndexError):
        queue.launch()


# --------------------------------------------------------------------- groups


def drawn_passes(seed: int) -> list[tuple[int, tuple[str, ...]]]:
    draw = random.Random(seed)
    htasks = [
        (draw.randrange(2), tuple(f"t{index}{letter}" for letter in "ab"[: draw.randint(1, 2)])) for index in "0123"
    ]
    return [htask for htask in htasks for _ in range(draw.randint(1, 4))]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("may_repeat", [True, False])
@pytest.mark.parametrize("width", [1, 3])
def test_groups_hold_every_pass_once_of_one_bucket_and_keep_the_order_of_a_task(
    width: int, may_repeat: bool, seed: int
) -> None:
    passes = drawn_passes(seed)
    tasks_of = [tasks for _, tasks in passes]
    for divides_buckets in (True, False):
        buckets = [bucket if divides_buckets else 0 for bucket, _ in passes]
        if divides_buckets:
            groups = turn_groups(tasks_of, buckets, width, may_repeat=may_repeat)
        else:
            groups = neighbour_groups(tasks_of, width, may_repeat=may_repeat)
        order = [index for group in groups for index in group]
        assert sorted(order) == list(range(len(passes)))
        assert all(1 <= len(group) <= width for group in groups)
        assert all(len({buckets[index] for index in group}) == 1 for group in groups)
        for task in {task for own in tasks_of for task in own}:
            mine = [index for index in order if task in tasks_of[index]]
            assert mine == sorted(mine), task
        if not may_repeat:
            names = [[task for index in group for task in tasks_of[index]] for group in groups]
            assert all(len(set(group)) == len(group) for group in names)
    assert [i for group in neighbour_groups(tasks_of, width) for i in group] == list(range(len(passes)))


def test_groups_are_full_as_long_as_a_bucket_has_passes_left_and_mix_its_tasks_first() -> None:
    tasks, buckets = ["a"] * 3 + ["b"] * 2 + ["c"], [0] * 5 + [1]
    assert turn_groups(tasks, buckets, 2) == [(0, 3), (1, 4), (2,), (5,)]
    assert turn_groups(tasks, buckets, 4) == [(0, 3, 1, 2), (4,), (5,)]
