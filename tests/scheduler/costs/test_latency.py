"""The cost model is Eq. 3 and 4 written out task by task, and its matrix is the same for every range of tasks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peft_mux.data.packing.passes import Member
from peft_mux.scheduler.costs.curves import AdapterTable, Curve
from peft_mux.scheduler.costs.hardware import DEVICES, Link, Overlap
from peft_mux.scheduler.costs.latency import CostModel
from peft_mux.scheduler.costs.loads import AdapterLoad, TaskLoad
from peft_mux.scheduler.costs.model_shape import FrozenParts
from peft_mux.scheduler.costs.profile import Profile, analytic_profile
from peft_mux.scheduler.planner.fusion import fuse
from tests.scheduler.plan_cases import SHAPE as SMALL

SHAPE = replace(SMALL, num_layers=8)
PROFILE = Profile(
    device="invented",
    dtype="float32",
    model="small",
    layer=Curve((16.0, 256.0), (0.002, 0.02)),
    attention=Curve((16.0, 256.0), (0.0001, 0.004)),
    adapter=AdapterTable((4.0, 64.0), (100.0, 300.0), (16.0, 256.0), (((1e-4, 9e-4), (2e-4, 3e-3)),) * 2),
    utilization=AdapterTable((1.0,), (1.0,), (16.0, 256.0), (((0.1, 0.9),),)),
    head=Curve((16.0, 256.0), (0.001, 0.01)),
    embedding=Curve((16.0, 256.0), (0.0003, 0.001)),
    optimizer=Curve((1e3, 1e6), (1e-4, 1e-2)),
    pass_overhead_s=0.005,
    step_overhead_s=0.007,
    attention_call_s=0.0002,
    forward_fraction=0.4,
)

LINK = Link(latency_s=0.0007, bytes_per_s=2e6)

adapters = st.lists(
    st.builds(
        AdapterLoad,
        rank=st.sampled_from([4, 8, 64]),
        width=st.sampled_from([128, 224]),
        cut_width=st.sampled_from([0, 64, 100]),
    ),
    max_size=5,
).map(tuple)
loads = st.builds(
    TaskLoad,
    name=st.just("task"),
    lengths=st.lists(st.integers(1, 250), min_size=1, max_size=6).map(tuple),
    num_targets=st.integers(0, 300),
    adapters=adapters,
    trainable_parameters=st.integers(0, 2_000_000),
)


with_lowest = st.tuples(loads, st.integers(0, 7), st.sampled_from([0.3, 1.0])).map(
    lambda drawn: replace(drawn[0], lowest_layer=drawn[1], unmet_share=drawn[2])
)


def equation_3(tasks: Sequence[TaskLoad], count: int, layers: int, *, first: bool, last: bool, devices: int) -> float:
    """M Eq. 3 task by task and adapter by adapter, and what Eq. 3 leaves whole or out."""
    tokens = sum(task.tokens for task in tasks) / count
    base_s = layers * PROFILE.layer_s(tokens)
    lengths = [length for task in tasks for length in task.lengths]
    base_s += layers * sum(PROFILE.attention_s(length) for length in lengths) / count
    groups = min(len({math.ceil(length / 16) for length in lengths}), len(lengths) / count)
    whole_s = layers * groups * PROFILE.attention_call_s
    if first:
        whole_s += PROFILE.embedding_s(tokens)
    targets = sum(task.num_targets for task in tasks) / count

    def sum_s(num_bytes: float) -> float:
        return 2 * (devices - 1) * (LINK.latency_s + num_bytes / devices / LINK.bytes_per_s)

    if devices > 1:
        whole_s += layers * 4 * sum_s(tokens * 64 * 4)
    if last:
        base_s += PROFILE.head_s(targets)
        if devices > 1 and targets:
            blocks = math.ceil(targets / (2**26 // math.ceil(500 / devices) // 128 * 128))
            assert blocks == 1, "a micro-batch here fits one block of logits"
            whole_s += sum_s(targets * 3 * devices * 4) + sum_s(targets * 64 * 4)
    adapters_s = whole_s

    def on_device(adapter: AdapterLoad) -> float:
        return adapter.width - adapter.cut_width * (devices - 1) / devices

    for width in sorted({on_device(adapter) for task in tasks for adapter in task.adapters}):
        weighted_s, longest_s = 0.0, 0.0
        for task in tasks:
            n = task.tokens / count
            own = [adapter for adapter in task.adapters if on_device(adapter) == width]
            alone_s = [PROFILE.adapter_s(adapter.rank, width, n) for adapter in own]
            weighted_s += sum(
                PROFILE.adapter_utilization(adapter.rank, width, n) * t for adapter, t in zip(own, alone_s, strict=True)
            )
            longest_s = max(longest_s, sum(alone_s))
        adapters_s += layers * max(weighted_s, longest_s)
    return PROFILE.forward_fraction * (base_s / devices + adapters_s)


@settings(max_examples=40)
@given(st.lists(loads, min_size=1, max_size=5), st.integers(1, 4), st.sampled_from([1, 2, 4]), st.integers(1, 2))
def test_stage_latency_is_equation_3(tasks: list[TaskLoad], count: int, num_stages: int, devices: int) -> None:
    cost = CostModel(PROFILE, SHAPE, num_stages=num_stages, devices_per_stage=devices, tensor_link=LINK)
    for stage in range(num_stages):
        expected = equation_3(
            tasks, count, 8 // num_stages, first=stage == 0, last=stage == num_stages - 1, devices=devices
        )
        assert cost.stage_latency_s(tasks, num_micro_batches=count, stage=stage) == pytest.approx(expected)


@settings(max_examples=25)
@given(st.lists(loads, min_size=1, max_size=3), st.integers(1, 8), st.integers(1, 8))
def test_latency_is_equation_4_with_the_measured_ratio_in_place_of_two(
    tasks: list[TaskLoad], count: int, num_stages: int
) -> None:
    cost = CostModel(PROFILE, SHAPE, num_stages=num_stages)
    stages = [cost.stage_latency_s(tasks, num_micro_batches=count, stage=stage) for stage in range(num_stages)]
    ratio = 1 / PROFILE.forward_fraction
    assert cost.latency_s(tasks, count) == pytest.approx(ratio * sum(stages[:-1]) + ratio * count * max(stages))


def test_equation_4_has_its_two_where_forward_and_backward_take_the_same() -> None:
    cost = CostModel(replace(PROFILE, forward_fraction=0.5), SHAPE)
    task = TaskLoad("a", (100, 50), 140, (), 0)
    assert cost.latency_s([task], 3) == pytest.approx(2 * 3 * cost.stage_latency_s([task], num_micro_batches=3))


SIZES = st.sampled_from(
    [{}, {"num_stages": 3}, {"num_stages": 2, "devices_per_stage": 4, "tensor_link": LINK}, {"backbone_shards": 3}]
)


@settings(max_examples=25)
@given(st.lists(with_lowest, min_size=1, max_size=7), st.integers(1, 4), SIZES)
def test_the_matrix_holds_the_latency_of_every_range(tasks: list[TaskLoad], count: int, size: dict[str, Any]) -> None:
    cost = CostModel(replace(PROFILE, link=LINK), SHAPE, **size)
    matrix = cost.latency_matrix(tasks, count)
    for i in range(len(tasks)):
        for j in range(len(tasks)):
            expected = cost.latency_s(tasks[i : j + 1], count) if j >= i else math.inf
            assert matrix[i, j] == pytest.approx(expected)


def test_a_range_that_does_not_fit_is_infinite_and_is_judged_by_tokens_or_its_longest_sequence() -> None:
    tasks = [TaskLoad("a", (10,), 9, (), 0), TaskLoad("b", (60, 60), 100, (), 0), TaskLoad("c", (200,), 100, (), 0)]
    seen = []

    def fits(tokens: np.ndarray) -> np.ndarray:
        seen.append(tokens)
        return tokens <= 100

    matrix = CostModel(PROFILE, SHAPE).latency_matrix(tasks, 2, fits=fits)
    assert seen[0].tolist() == [[10, 65, 200], [0, 60, 200], [0, 0, 200]]
    assert np.isfinite(matrix).tolist() == [[True, True, False], [False, True, False], [False, False, False]]


def test_a_verdict_of_another_shape_is_refused() -> None:
    tasks = [TaskLoad("a", (10,), 9, (), 0)] * 2
    with pytest.raises(ValueError, match=r"fits returned shape \(2,\); allowed: \(2, 2\)"):
        CostModel(PROFILE, SHAPE).latency_matrix(tasks, 1, fits=lambda tokens: np.ones(2, dtype=bool))


@settings(max_examples=25)
@given(st.lists(loads, min_size=1, max_size=4), loads, st.integers(1, 4))
def test_one_more_task_never_makes_an_htask_faster(tasks: list[TaskLoad], more: TaskLoad, count: int) -> None:
    cost = CostModel(PROFILE, SHAPE, num_stages=2)
    assert cost.latency_s([*tasks, more], count) >= cost.latency_s(tasks, count) * (1 - 1e-12)


@settings(max_examples=25)
@given(st.lists(loads, min_size=2, max_size=4))
def test_adapters_of_full_utilisation_add_up_and_of_none_take_as_long_as_the_longest(tasks: list[TaskLoad]) -> None:
    def adapters_s(utilization: float, members: Sequence[TaskLoad]) -> float:
        profile = replace(PROFILE, utilization=AdapterTable.constant(utilization))
        bare = [replace(task, adapters=()) for task in members]
        cost = CostModel(profile, SHAPE)
        return cost.pass_s(members, 1) - cost.pass_s(bare, 1)

    alone = [adapters_s(1.0, [task]) for task in tasks]
    assert adapters_s(1.0, tasks) == pytest.approx(sum(alone), abs=1e-12)
    assert max(alone) - 1e-12 <= adapters_s(0.0, tasks) <= sum(alone) + 1e-12


def test_a_pass_adds_its_overhead_and_a_step_its_own_and_all_updates() -> None:
    cost = CostModel(PROFILE, SHAPE)
    a, b = (TaskLoad(name, (100, 40), 130, (AdapterLoad(8, 128),), 500_000) for name in "ab")
    ratio = 1 / PROFILE.forward_fraction
    pass_s = ratio * cost.stage_latency_s([a], num_micro_batches=2) + 0.005
    assert cost.pass_s([a], 2) == pytest.approx(pass_s)
    assert cost.optimizer_s([a, b]) == pytest.approx(2 * PROFILE.optimizer_s(500_000))
    assert cost.step_s([([a], 2), ([b], 1)]) == pytest.approx(
        2 * pass_s + cost.pass_s([b], 1) + cost.optimizer_s([a, b]) + 0.007
    )


@pytest.mark.parametrize(("field", "adapters_count"), [("has_reference_forward", False), ("has_batch_forward", True)])
def test_a_step_takes_longer_by_the_forwards_that_losses_need_before_it(field: str, adapters_count: bool) -> None:
    cost = CostModel(PROFILE, SHAPE)
    adapters = (AdapterLoad(8, 128),)
    other, plain = (TaskLoad(name, (100, 40), 130, adapters, 500_000) for name in "ab")
    more = cost.step_s([([other, replace(plain, **{field: True})], 2)]) - cost.step_s([([other, plain], 2)])
    alone = replace(plain, adapters=adapters if adapters_count else ())
    assert more == pytest.approx(cost.stage_latency_s([alone], num_micro_batches=1) + 0.005)


def test_the_terms_of_a_stage_are_what_its_latency_is_made_of() -> None:
    task = TaskLoad("a", (100, 60), 150, (AdapterLoad(8, 128, 64),), 1000)
    deep = [replace(task, lowest_layer=3), replace(task, name="b", lowest_layer=5, unmet_share=0.5)]
    for layers in ((1, 5, 2), (4, 3, 1)):
        cost = CostModel(PROFILE, SHAPE, num_stages=3, devices_per_stage=2, layers_per_stage=layers, tensor_link=LINK)
        whole, terms = cost.stage_terms([task], 2), cost.stage_terms(deep, 1)
        rows = [Member(number, row, 0, length) for number in (0, 1) for row, length in enumerate(task.lengths)]
        below_s = cost.passes_s(deep, [rows])[0] - PROFILE.pass_overhead_s
        for stage, first in enumerate((0, layers[0], layers[0] + layers[1])):
            expected = cost.stage_latency_s([task], num_micro_batches=2, stage=stage) / PROFILE.forward_fraction
            assert whole.stage_s(first, layers[stage]) == pytest.approx(expected)
            assert terms.stage_s(first, layers[stage]) == pytest.approx(below_s[stage])


def test_sums_that_no_link_carries_take_no_time_and_a_profiles_own_link_carries_them() -> None:
    task = TaskLoad("a", (100,), 0, (), 0)
    linked = replace(PROFILE, link=LINK)
    none, own, given_link = (
        CostModel(profile, SHAPE, devices_per_stage=2, tensor_link=link).pass_s([task], 1)
        for profile, link in ((PROFILE, None), (linked, None), (PROFILE, LINK))
    )
    assert own == given_link
    assert own - none == pytest.approx(8 * 4 * 2 * LINK.transfer_s(100 * 64 * 4 / 2))


def test_what_the_host_takes_of_divided_layers_is_added_and_counts_as_fixed() -> None:
    task = TaskLoad("a", (100,), 90, (AdapterLoad(8, 128, 64),), 0)
    known = replace(PROFILE, overlap=Overlap(skew=0.2, host_s=0.003))
    without, divided = (CostModel(one, SHAPE, devices_per_stage=2, tensor_link=LINK) for one in (PROFILE, known))
    added_s = SHAPE.num_layers * 4 * 0.003
    assert divided.pass_s([task], 1) - without.pass_s([task], 1) == pytest.approx(added_s)
    whole = CostModel(known, SHAPE)
    assert whole.pass_s([task], 1) == CostModel(PROFILE, SHAPE).pass_s([task], 1), "nothing is divided"
    before, after = (cost.parts_of_pass([task]) for cost in (without, divided))
    assert after.fixed - before.fixed == pytest.approx(added_s)
    assert after[1:] == pytest.approx(before[1:])
    sides = [cost.pass_parts([task], 1) for cost in (without, divided)]
    between = [one.attention_s + one.mlp_s for one in sides]
    assert SHAPE.num_layers * (between[1] - between[0]) == pytest.approx(added_s)


def test_a_backbone_that_replicas_divide_is_gathered_unit_by_unit_in_every_pass() -> None:
    parts = FrozenParts(before_bytes=128_000, layer_bytes=90_000, cut_bytes=0, after_bytes=256, head_bytes=64_000)
    shape = replace(SHAPE, parts=parts)
    task = TaskLoad("a", (100,), 90, (), 0)
    whole, divided = (CostModel(PROFILE, shape, backbone_shards=n, tensor_link=LINK) for n in (1, 4))
    units = [*[90_000] * 16, 128_000, 64_000, 256, 256]
    expected = sum(3 * LINK.transfer_s(num_bytes / 4) for num_bytes in units)
    assert divided.pass_s([task], 1) - whole.pass_s([task], 1) == pytest.approx(expected)
    assert sum(num_bytes * times for num_bytes, times in parts.units(8)) == sum(units)


def test_the_updates_are_those_of_the_parameters_that_lie_on_a_device() -> None:
    task = TaskLoad("a", (10,), 9, (), 500_000, cut_parameters=400_000)
    cost = CostModel(PROFILE, SHAPE, devices_per_stage=4)
    assert cost.optimizer_s([task]) == pytest.approx(PROFILE.optimizer_s(200_000))


def test_unequal_stages_are_timed_by_their_own_layers() -> None:
    cost = CostModel(PROFILE, SHAPE, num_stages=3, layers_per_stage=(1, 5, 2))
    task = TaskLoad("a", (100,), 99, (), 0)
    middle, first = (cost.stage_latency_s([task], num_micro_batches=1, stage=stage) for stage in (1, 0))
    assert middle > 4 * first
    assert middle == pytest.approx(5 * 0.4 * (PROFILE.layer_s(100) + PROFILE.attention_s(100) + 0.0002))


def test_the_matrix_is_what_fusion_takes() -> None:
    shape = replace(SHAPE, num_layers=32, hidden_size=4096, intermediate_size=11008, attention_size=4096)
    cost = CostModel(analytic_profile(DEVICES["A40"], shape), shape, num_stages=4)
    tasks = [TaskLoad(f"t{n}", (16 + 8 * n,) * 4, 64, (AdapterLoad(8, 8192),) * 4, 10_000) for n in range(6)]
    fusion = fuse(cost.latency_matrix(tasks, 4), 4, num_micro_batches=4)
    assert [start for start, _ in fusion.intervals] == [0, *(end for _, end in fusion.intervals[:-1])]
    assert fusion.intervals[-1][1] == len(tasks)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_stages": 0}, "num_stages is 0; allowed: 1 to 8"),
        ({"num_stages": 9}, "num_stages is 9; allowed: 1 to 8"),
        ({"devices_per_stage": 0}, "devices_per_stage is 0; allowed: 1 or more"),
        ({"num_stages": 2, "layers_per_stage": (4, 5)}, "allowed: 2 numbers of 1 or more that add up to 8"),
    ],
)
def test_impossible_stages_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CostModel(PROFILE, SHAPE, **arguments)  # type: ignore[arg-type]


def test_a_stage_or_a_number_of_micro_batches_that_is_not_there_is_refused() -> None:
    cost = CostModel(PROFILE, SHAPE, num_stages=2)
    with pytest.raises(ValueError, match="stage is 2; allowed: 0 to 1"):
        cost.stage_latency_s([], num_micro_batches=1, stage=2)
    with pytest.raises(ValueError, match="num_micro_batches is 0; allowed: 1 or more"):
        cost.pass_s([], 0)


def test_loads_out_of_range_are_refused_by_field() -> None:
    with pytest.raises(ValueError, match="rank is 0; allowed: 1 or more"):
        AdapterLoad(0, 128)
    with pytest.raises(ValueError, match="cut_width is 129; allowed: 0 to 128"):
        AdapterLoad(4, 128, 129)
    with pytest.raises(ValueError, match="cut_parameters of task 'a' is 6; allowed: up to its 5 trainable"):
        TaskLoad("a", (5,), 1, (), 5, cut_parameters=6)
    with pytest.raises(ValueError, match="lengths of task 'a' include 0; allowed: 1 token or more"):
        TaskLoad("a", (5, 0), 1, (), 0)
    with pytest.raises(ValueError, match="num_targets of task 'a' is -1; allowed: 0 or more"):
        TaskLoad("a", (5,), -1, (), 0)


def test_a_load_tells_its_tokens_squares_and_longest_sequence() -> None:
    load = TaskLoad("a", (3, 4), 5, (), 0)
    assert (load.tokens, load.longest) == (7, 4)
