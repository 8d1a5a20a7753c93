"""The memory model follows M Eq. 5 stage by stage, and its limit in tokens is exact."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from peft_mux.scheduler.costs.loads import AdapterLoad, FrozenParts, TaskLoad, weight_gradient_bytes
from peft_mux.scheduler.costs.memory import MemoryModel, activation_bytes_per_token
from tests.scheduler.plan_cases import SHAPE as SMALL
from tests.scheduler.planner.cases import LLAMA_7B

SHAPE = replace(SMALL, num_layers=8)


def a_task(parameters: int = 1000, name: str = "a") -> TaskLoad:
    return TaskLoad(name, (10,), 9, (), parameters)


def test_an_fp32_adapter_costs_twenty_bytes_a_parameter_and_its_bf16_copy_two_more() -> None:
    for shape, expected in ((SHAPE, 20), (replace(SHAPE, activation_bytes=2), 22)):
        model = MemoryModel(shape)
        assert model.static_bytes([a_task(1000)]) - model.static_bytes([]) == 1000 * expected


def test_updates_need_buffers_of_the_largest_task_or_on_a_gpu_of_all_tasks() -> None:
    tasks = [a_task(10**8, name) for name in "abc"]
    of_updates = [MemoryModel(SHAPE, device_type=kind, allocator_margin=0.0) for kind in ("cpu", "cuda")]
    assert [model.estimate(tasks, 1).workspace_bytes // 10**7 for model in of_updates] == [79, 119]


def test_activations_are_those_counted_times_tokens_micro_batches_and_the_share_of_layers() -> None:
    model = MemoryModel(SHAPE, num_stages=2, layers_per_stage=(6, 2), activation_bytes_per_token=1000.0)
    assert model.activation_bytes(50, 0) == 37_500
    assert model.activation_bytes(50, 1) == 12_500
    estimates = [model.estimate_stage([], 50, in_flight, 0) for in_flight in (1, 3)]
    assert [estimate.activation_bytes for estimate in estimates] == [37_500, 112_500]


def test_the_loss_is_on_the_last_stage_in_bf16_on_cuda_and_next_to_its_fp32_copy_elsewhere() -> None:
    cuda, cpu = (MemoryModel(LLAMA_7B, num_stages=2, device_type=kind) for kind in ("cuda", "cpu"))
    assert cuda.loss_bytes(10**6) == (2**26 // 32000) // 128 * 128 * 32000 * 2
    assert cpu.loss_bytes(10**6) == 384 * 32000 * (2 + 4)
    in_fp32 = MemoryModel(replace(LLAMA_7B, activation_bytes=4), device_type="cpu")
    assert in_fp32.loss_bytes(10**6) == 384 * 32000 * 4
    assert cuda.loss_bytes(10) == 10 * 32000 * 2
    two = MemoryModel(LLAMA_7B, devices_per_stage=2)
    assert two.loss_bytes(10**6) == (2**26 // 16_000) // 128 * 128 * 16_000 * (2 + 4), "devices share the words"
    # The slope of bounded logits is held next to them where the loss is not fused.
    capped = replace(LLAMA_7B, caps_logits=True)
    assert MemoryModel(capped, device_type="cpu").loss_bytes(10) == 10 * 32000 * (2 + 4 + 4)
    assert MemoryModel(capped, device_type="cuda").loss_bytes(10) == 10 * 32000 * 2
    assert MemoryModel(capped, device_type="cuda", devices_per_stage=2).loss_bytes(10) == 10 * 16000 * (2 + 4 + 4)


def test_a_7b_backbone_of_one_lora_task_comes_near_the_papers_breakdown() -> None:
    # M §2.3: batch size 8, length 128: 13.4 GB of backbone, 4.3 GB of activations, 18.1 GB in all. The paper's kernels
    # keep less (element-wise operators are fused there), so that activations are allowed a quarter more.
    estimate = MemoryModel(LLAMA_7B).estimate([a_task(20_000_000)], 8 * 128)
    assert estimate.backbone_bytes == pytest.approx(13.4e9, rel=0.02)
    assert estimate.activation_bytes == pytest.approx(4.3e9, rel=0.25)
    assert estimate.peak_bytes == pytest.approx(18.1e9, rel=0.1)
    staged = MemoryModel(LLAMA_7B, num_stages=3)
    stages = [staged.peak_bytes([a_task()], 500, 2, stage) for stage in range(3)]
    assert staged.estimate([a_task()], 500, 2).peak_bytes == max(stages), "of the fullest stage"


@given(
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(0, 50_000),
    st.integers(0, 40_000_000),
    st.booleans(),
    st.sampled_from(["cpu", "cuda"]),
)
def test_the_most_tokens_fit_and_one_more_does_not(
    num_stages: int, in_flight: int, parameters: int, limit_bytes: int, checkpointing: bool, device_type: str
) -> None:
    model = MemoryModel(SHAPE, num_stages=num_stages, checkpointing=checkpointing, device_type=device_type)
    tasks = [a_task(parameters)]
    for stage in range(num_stages):
        most = model.max_tokens(tasks, limit_bytes, in_flight, stage)
        if most:
            assert model.peak_bytes(tasks, most, in_flight, stage) <= limit_bytes
        assert model.peak_bytes(tasks, most + 1, in_flight, stage) > limit_bytes


PARTS = FrozenParts(
    before_bytes=128_000, layer_bytes=100_000, cut_bytes=90_000, after_bytes=256, head_bytes=128_000, is_tied=False
)
WITH_PARTS = replace(SHAPE, backbone_bytes=8 * 100_000 + 2 * 128_000 + 256, parts=PARTS)


@given(st.sampled_from([1, 2, 4]), st.integers(0, 50_000), st.integers(0, 50_000))
def test_devices_of_a_stage_share_what_tensor_parallelism_cuts_of_weights_and_adapters(
    devices: int, whole: int, cut: int
) -> None:
    task = replace(a_task(whole + cut), cut_parameters=cut)
    model = MemoryModel(WITH_PARTS, devices_per_stage=devices)
    frozen = 128_000 + 256 + 8 * 10_000 + (8 * 90_000 + 128_000) / devices
    assert model.static_bytes([]) == math.ceil(frozen)
    assert model.static_bytes([task]) - model.static_bytes([]) == math.ceil(20 * (whole + cut / devices))


def test_devices_of_a_stage_share_heads_and_neurons_but_not_the_residual_stream() -> None:
    one, two = (MemoryModel(SHAPE, devices_per_stage=count) for count in (1, 2))
    layer_elements = {1: 5 * 64 + 2 * 64 + 2 * 32 + 4 * 160, 2: 5 * 64 + 64 + 32 + 2 * 160}
    assert one.activation_bytes(100) == 100 * 8 * 4 * layer_elements[1]
    assert two.activation_bytes(100) == 100 * 8 * 4 * layer_elements[2]
    counted = replace(two, activation_bytes_per_token=36_864 * 1.5)  # 1.5 times the formula's for one device
    assert counted.activation_bytes(100) == pytest.approx(1.5 * two.activation_bytes(100), abs=1)
    # Transients are as wide as a device's part of the MLP, or else as the residual stream.
    for devices, width in ((1, 160), (2, 80), (4, 64)):
        model = MemoryModel(SHAPE, num_stages=2, devices_per_stage=devices)
        assert model.workspace_bytes(1000, 0) == 4 * 1000 * width * 4


def test_checkpointing_keeps_one_row_a_layer_and_one_layer_at_a_time() -> None:
    layer = activation_bytes_per_token(SMALL, checkpointing=False) // SMALL.num_layers
    kept = activation_bytes_per_token(SMALL, checkpointing=True)
    assert kept == SMALL.num_layers * SMALL.hidden_size * 4 + layer


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_the_embedding_is_on_the_first_and_the_head_on_the_last_stage(num_stages: int, is_tied: bool) -> None:
    shape = replace(WITH_PARTS, parts=replace(PARTS, is_tied=is_tied))
    layers = {1: (8,), 2: (5, 3), 3: (4, 2, 2)}[num_stages]
    model = MemoryModel(shape, num_stages=num_stages, layers_per_stage=layers)
    expected = [100_000 * count for count in layers]
    expected[0] += 128_000
    expected[-1] += 256 + (0 if is_tied and num_stages == 1 else 128_000)
    assert [model.static_bytes([], stage) for stage in range(num_stages)] == expected


@pytest.mark.parametrize(("stage", "largest"), [(0, 128_000), (1, 100_000), (2, 128_000)])
def test_replicas_that_divide_each_stage_hold_the_largest_unit_of_theirs_twice(stage: int, largest: int) -> None:
    whole, divided = (MemoryModel(WITH_PARTS, num_stages=3, backbone_shards=count) for count in (1, 4))
    own = whole.static_bytes([], stage) / 4 + 2 * largest
    assert divided.static_bytes([], stage) == math.ceil(own)
    assert divided.activation_bytes(77, stage) == whole.activation_bytes(77, stage)
    # A backbone of which nothing is known but its bytes is gathered layer by layer.
    assert MemoryModel(SHAPE, backbone_shards=4).static_bytes([]) == 1_000_000 // 4 + 2 * 1_000_000 // 8


def test_frozen_weights_in_another_precision_take_that_part_of_the_bytes_everywhere() -> None:
    half = WITH_PARTS.in_precision(0.5)
    assert half.backbone_bytes == WITH_PARTS.backbone_bytes // 2
    for stage in range(3):
        bytes_of = [MemoryModel(shape, num_stages=3).static_bytes([], stage) for shape in (half, WITH_PARTS)]
        assert bytes_of[0] == bytes_of[1] // 2


def adapted(rank: int, *widths: int, name: str = "a") -> TaskLoad:
    return replace(a_task(name=name), adapters=tuple(AdapterLoad(rank, width) for width in widths))


LLAMA_8B_WIDTHS = (8192, 5120, 5120, 8192, 18432, 18432, 18432)  # q, k, v, o, gate, up, down


def test_sums_of_weight_gradients_are_workspace_on_cuda_alone_and_add_to_the_gradients_of_a_layer() -> None:
    tasks = [adapted(40, *LLAMA_8B_WIDTHS[:3])]
    for device_type, expected in (("cuda", weight_gradient_bytes(tasks, 2**17, 4096)), ("cpu", 0)):
        model = MemoryModel(LLAMA_7B, num_stages=2, device_type=device_type)
        without = model.workspace_bytes(2**17, 0)
        assert model.workspace_bytes(2**17, 0, tasks) - without == expected
        margin = 1 + model.margin
        estimates = [model.estimate_stage(own, 2**17, 1, 0).workspace_bytes for own in ([a_task()], tasks)]
        assert estimates[1] - estimates[0] == pytest.approx(margin * expected, abs=2)
