"""The cost model is Eq. 3 and 4 written out layer by layer and task by task, for passes and for ranges of tasks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peft_mux.data.packing.passes import Member
from peft_mux.scheduler.costs.hardware import Overlap
from peft_mux.scheduler.costs.latency import CostModel, all_reduce_s, whole_pass
from peft_mux.scheduler.costs.loads import AdapterLoad, FrozenParts, TaskLoad
from peft_mux.scheduler.costs.profile import AdapterTable, Curve, Profile
from peft_mux.scheduler.plan import Link
from tests.scheduler.plan_cases import SHAPE as SMALL

LAYERS = 8
SHAPE = replace(SMALL, num_layers=LAYERS)
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
    lowest_layer=st.sampled_from([0, 0, 2, 5]),
)
TASK = TaskLoad("a", (100, 40), 130, (AdapterLoad(8, 128),), 500_000)


def pass_s(cost: CostModel, tasks: Sequence[TaskLoad]) -> float:
    """Return the seconds of one pass of all rows, through all stages."""
    return float(cost.passes_s(tasks, [whole_pass(tasks)]).sum())


def stage_by_hand(tasks: Sequence[TaskLoad], layers: range, devices: int) -> tuple[float, float]:
    """Return forward and backward seconds of a pass on a stage: M Eq. 3 layer by layer, and what it leaves out."""
    tokens = sum(task.tokens for task in tasks)
    lengths = [length for task in tasks for length in task.lengths]
    targets = sum(task.num_targets for task in tasks)
    hidden_bytes = 64 * 4  # of a token, in fp32

    def sum_s(num_bytes: float) -> float:
        return 2 * (devices - 1) * LINK.transfer_s(num_bytes / devices)

    products_s = PROFILE.layer(tokens) / devices + sum(map(PROFILE.attention, lengths)) / devices
    products_s += len({math.ceil(length / 16) for length in lengths}) * PROFILE.attention_call_s
    both_s = PROFILE.pass_overhead_s
    if layers[0] == 0:
        both_s += PROFILE.embedding(tokens)
    if layers[-1] == LAYERS - 1:
        both_s += PROFILE.head(targets) / devices
        if devices > 1 and targets:
            both_s += sum_s(targets * 3 * devices * 4) + sum_s(targets * hidden_bytes)
    left_out_s = 0.0
    for layer in layers:
        both_s += products_s + (4 * sum_s(tokens * hidden_bytes) if devices > 1 else 0.0)
        if layer < min(task.lowest_layer for task in tasks):
            left_out_s += 0.6 * products_s + (2 * sum_s(tokens * hidden_bytes) if devices > 1 else 0.0)
        here = [(task, one) for task in tasks if task.lowest_layer <= layer for one in task.adapters]
        for width in {one.device_width(devices) for _, one in here}:
            alone_s = [
                (id(task), PROFILE.adapter(one.rank, width, task.tokens), task.tokens)
                for task, one in here
                if one.device_width(devices) == width
            ]
            weighted_s = sum(PROFILE.utilization(1, 1, count, grows=False) * seconds for _, seconds, count in alone_s)
            longest_s = max(sum(s for own, s, _ in alone_s if own == key) for key, _, _ in alone_s)
            both_s += max(weighted_s, longest_s)
    forward_s = min(PROFILE.forward_fraction * both_s, both_s - left_out_s)
    return forward_s, both_s - left_out_s - forward_s


@given(st.lists(loads, min_size=1, max_size=5), st.sampled_from([1, 2, 4]), st.integers(1, 2))
def test_a_pass_takes_what_equation_3_says_on_each_stage(tasks: list[TaskLoad], num_stages: int, devices: int) -> None:
    cost = CostModel(PROFILE, SHAPE, num_stages=num_stages, devices_per_stage=devices, tensor_link=LINK)
    forward_s, seconds = cost.pass_times(tasks, [whole_pass(tasks)])
    each = LAYERS // num_stages
    for stage in range(num_stages):
        expected = stage_by_hand(tasks, range(stage * each, (stage + 1) * each), devices)
        found = forward_s[0, stage], seconds[0, stage] - forward_s[0, stage]
        assert found == pytest.approx(expected, abs=1e-12)


def test_a_part_of_a_row_and_one_that_shares_its_beginning_take_the_attention_that_they_add() -> None:
    cost, task = CostModel(PROFILE, SHAPE), replace(TASK, lengths=(200,))
    added_s = PROFILE.attention(200) - PROFILE.attention(120)
    for member in (Member(0, 0, 120, 200), Member(0, 0, 0, 200, shared=120)):
        work = cost.pass_work([task], [[member]])
        assert work.tokens == 80
        assert work.attention_s == pytest.approx(added_s)


SIZES = st.sampled_from([{}, {"num_stages": 3}, {"num_stages": 2, "devices_per_stage": 4}, {"backbone_shards": 3}])


@given(st.lists(loads, min_size=1, max_size=6), st.integers(1, 3), SIZES)
def test_the_matrix_holds_equation_4_of_every_range_of_tasks(
    tasks: list[TaskLoad], count: int, size: dict[str, Any]
) -> None:
    cost = CostModel(replace(PROFILE, link=LINK), SHAPE, **size)
    # Rows that divide evenly: the mean of C micro-batches is then each of them.
    several = [replace(one, lengths=one.lengths * count, num_targets=one.num_targets * count) for one in tasks]
    matrix = cost.latency_matrix(several, count)
    for i in range(len(tasks)):
        for j in range(len(tasks)):
            expected = math.inf
            if j >= i:
                (stages_s,) = cost.passes_s(tasks[i : j + 1], [whole_pass(tasks[i : j + 1])])
                expected = sum(stages_s[:-1]) + count * max(stages_s)
            assert matrix[i, j] == pytest.approx(expected)


def test_outside_of_its_passes_a_step_has_updates_its_overhead_and_the_forwards_of_references() -> None:
    cost, other = CostModel(PROFILE, SHAPE), replace(TASK, name="b")
    updates_s = 2 * PROFILE.optimizer(500_000)
    assert cost.outside_s([TASK, other]) == pytest.approx(updates_s + PROFILE.step_overhead_s)
    compared, estimated = replace(other, has_reference_forward=True), replace(other, has_batch_forward=True)
    plain = replace(other, adapters=())
    for load, rows in ((compared, plain), (estimated, other)):
        (forward_s,) = cost.pass_times([rows], [whole_pass([rows])])[0]
        assert cost.outside_s([TASK, load]) == pytest.approx(updates_s + PROFILE.step_overhead_s + sum(forward_s))


def test_what_the_host_takes_of_divided_layers_is_added() -> None:
    known = replace(PROFILE, overlap=Overlap(skew=0.2, host_s=0.003))
    alone_s, divided_s = (
        [pass_s(CostModel(one, SHAPE, devices_per_stage=n, tensor_link=LINK), [TASK]) for one in (PROFILE, known)]
        for n in (1, 2)
    )
    assert alone_s[1] == alone_s[0]
    assert divided_s[1] - divided_s[0] == pytest.approx(LAYERS * 4 * 0.003)


def test_the_updates_are_those_of_the_parameters_that_are_on_a_device_of_the_deepest_stage() -> None:
    task = replace(TASK, cut_parameters=400_000)
    cost = CostModel(PROFILE, SHAPE, num_stages=2, layers_per_stage=(6, 2), devices_per_stage=4)
    assert cost.optimizer_s([task]) == pytest.approx(PROFILE.optimizer(0.75 * 200_000))


def test_stages_that_gather_their_weights_gather_each_unit_and_are_run_backward_below_all_adapters_too() -> None:
    parts = FrozenParts(before_bytes=128_000, layer_bytes=90_000, cut_bytes=0, after_bytes=256, head_bytes=64_000)
    shape = replace(SHAPE, parts=parts)
    whole, divided = (CostModel(PROFILE, shape, backbone_shards=n, tensor_link=LINK) for n in (1, 4))
    units = [*[90_000] * 16, 128_000, 64_000, 256, 256]
    expected = sum(3 * LINK.transfer_s(num_bytes / 4) for num_bytes in units)
    assert pass_s(divided, [TASK]) - pass_s(whole, [TASK]) == pytest.approx(expected)
    deep = [replace(TASK, adapters=(), lowest_layer=6)]
    own, sharded = (CostModel(PROFILE, SHAPE, num_stages=2, backbone_shards=n) for n in (1, 2))
    assert sharded.passes_s(deep, [whole_pass(deep)])[0, 0] > own.passes_s(deep, [whole_pass(deep)])[0, 0]


# -------------------------------------------------------------------- collectives


def test_one_device_and_an_unknown_link_take_no_time_and_a_profiles_own_link_carries_sums() -> None:
    assert all_reduce_s(LINK, 1, 500) == 0.0
    assert all_reduce_s(None, 4, 500) == 0.0
    own, given_link = (
        pass_s(CostModel(profile, SHAPE, devices_per_stage=2, tensor_link=link), [TASK])
        for profile, link in ((replace(PROFILE, link=LINK), None), (PROFILE, LINK))
    )
    assert own == given_link


def test_a_loss_sums_three_numbers_a_target_and_shard_for_each_block_and_one_gradient() -> None:
    shape = replace(SHAPE, vocab_size=100_000)
    rows = 384  # of a block on a CPU, with half of the words on each device
    targets = 3 * rows + 1
    cost = CostModel(replace(PROFILE, device="cpu"), shape, devices_per_stage=2, tensor_link=LINK)
    parts = cost.pass_parts(0, cost.pass_work([replace(TASK, num_targets=targets)], [whole_pass([TASK])]))
    assert (parts.head_block_rows, parts.num_head_blocks) == (rows, 4)
    assert parts.head_sum_s == pytest.approx(2 * LINK.transfer_s(targets / 4 * 3 * 2 * 4 / 2))
    assert parts.head_gradient_sum_s == pytest.approx(2 * LINK.transfer_s(targets * 64 * 4 / 2))


# ------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_stages": 9}, "num_stages must be 1 to 8, the layers of the backbone, got 9"),
        ({"num_stages": 2, "layers_per_stage": (4, 5)}, r"layers_per_stage must be 2 numbers of 1 or more that add"),
    ],
)
def test_impossible_stages_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CostModel(PROFILE, SHAPE, **arguments)
