"""Plans count the rows that the last layer leaves out, and the gradients that no adapter below needs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig
from torch.utils.flop_counter import FlopCounterMode

from peft_mux import Task
from peft_mux.data.batch import MuxBatch
from peft_mux.data.collator import ChunkPackingCollator
from peft_mux.data.packing.passes import Member
from peft_mux.engine.work import PassTime, rows_of
from peft_mux.modeling.adapters.lora.layer import lowest_layer
from peft_mux.modeling.backbone.shape import model_shape
from peft_mux.modeling.last_layer import has_own_queries
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.stream import Stream
from peft_mux.planning.learning import PassPrices
from peft_mux.planning.loads import _unmet_share, task_load, whole_shapes
from peft_mux.planning.profiling.subject import Subject
from peft_mux.planning.shapes import sums_before_attention
from peft_mux.scheduler.costs.curves import AdapterTable, Curve
from peft_mux.scheduler.costs.fit import PartFit
from peft_mux.scheduler.costs.hardware import Link
from peft_mux.scheduler.costs.latency import CostModel
from peft_mux.scheduler.costs.loads import AdapterLoad, TaskLoad
from peft_mux.scheduler.costs.model_shape import ModelShape
from peft_mux.scheduler.costs.profile import Profile
from tests.engine.families.family_cases import backbone
from tests.invariants import mux_lab as lab
from tests.modeling.test_architectures import LANGUAGE_MODELS
from tests.planning.cases import llama

LINEAR = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
WIDTH = 256  # of products beside which adapters of rank 1 are next to nothing
PROFILE = Profile(
    device="cpu that takes a second for a token and layer",
    dtype="float32",
    model="small",
    layer=Curve.proportional(1.0),
    attention=Curve.proportional(0.0),
    adapter=AdapterTable.constant(0.0),
    head=Curve.proportional(0.0),
    embedding=Curve.proportional(0.0),
    optimizer=Curve.proportional(0.0),
)


def shape_of(backbone: Any) -> ModelShape:
    return model_shape(backbone, backbone.config, dtype=torch.float32, activation_dtype=torch.float32)


def batch_of(names: tuple[str, ...], read: int) -> MuxBatch:
    """Return two rows of 40 tokens of each task, the last `read` of which are predicted."""
    rng, rows = np.random.default_rng(0), []
    for name in names:
        for _ in range(2):
            ids = rng.integers(1, 90, size=40).tolist()
            rows.append({"task": name, "input_ids": ids, "labels": [-100] * (40 - read) + ids[40 - read :]})
    return ChunkPackingCollator()(rows)


def added_product(own: Any, left: Any, right: Any, **others: Any) -> int:
    """Return the operations of a product that is added in place, of which PyTorch knows none."""
    return 2 * left[0] * left[1] * right[1]


def model_of(num_layers: int, lowest: dict[str, int], targets: list[str]) -> MultiTaskPeftModel:
    """Return a model of tasks with these lowest layers."""
    configs = {
        name: LoraConfig(r=1, target_modules=targets, layers_to_transform=list(range(layer, num_layers)))
        for name, layer in lowest.items()
    }
    return MultiTaskPeftModel(llama(num_layers, WIDTH), configs).train()


def operations(
    num_layers: int, lowest: dict[str, int], read: int, *, narrow: bool = False, targets: list[str] = LINEAR
) -> int:
    """Return the operations of the products of a pass, forward and backward, of tasks with these lowest layers."""
    model = model_of(num_layers, lowest, targets)
    model.last_layer.is_wanted = narrow
    counter = FlopCounterMode(display=False, custom_mapping={torch.ops.aten.addmm_: added_product})
    with counter:
        model(batch_of(tuple(lowest), read)).losses.sum().backward()
    return counter.get_total_flops()


def load_of(batch: MuxBatch, lowest: dict[str, int]) -> list[TaskLoad]:
    return [
        TaskLoad(one.task, one.lengths, one.num_targets, (), 1, lowest_layer=lowest[one.task]) for one in rows_of(batch)
    ]


@pytest.mark.parametrize("read", [1, 4, 10, 25])
def test_the_last_layer_at_targets_is_predicted_to_spare_the_operations_that_it_spares(read: int) -> None:
    lowest = {"a": 0, "b": 0}
    of_layer = operations(3, lowest, read) - operations(2, lowest, read)
    spared = (operations(2, lowest, read) - operations(2, lowest, read, narrow=True)) / of_layer
    loads, shape = load_of(batch_of(("a", "b"), read), lowest), shape_of(llama(2, WIDTH))
    predicted = CostModel(PROFILE, shape).pass_s(loads, 1) - CostModel(PROFILE, shape.at_targets()).pass_s(loads, 1)
    assert predicted / 160 == pytest.approx(spared, rel=0.03), "160 tokens take as many seconds a layer"
    assert spared > 0.2


def test_where_most_rows_are_read_nothing_is_spared() -> None:
    loads, shape = load_of(batch_of(("a",), 35), {"a": 0}), shape_of(llama(2))
    assert CostModel(PROFILE, shape).pass_s(loads, 1) == CostModel(PROFILE, shape.at_targets()).pass_s(loads, 1)


@pytest.mark.parametrize(
    ("lowest", "targets"),
    [
        ({"a": 0, "b": 2}, LINEAR),
        ({"a": 0, "b": 1, "c": 3}, LINEAR),
        ({"a": 0, "b": 2}, ["q_proj", "v_proj"]),
        ({"a": 0, "b": 3}, ["gate_proj", "up_proj", "down_proj"]),
        ({"a": 2, "b": 3}, LINEAR),
        ({"a": 2, "b": 2}, ["q_proj", "v_proj"]),
        ({"a": 1, "b": 3}, ["q_proj", "v_proj"]),
    ],
    ids=str,
)
def test_a_backward_that_stops_early_is_predicted_to_spare_the_operations_that_it_spares(
    lowest: dict[str, int], targets: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stops, everywhere = operations(4, lowest, 39, targets=targets), dict.fromkeys(lowest, 0)
    monkeypatch.setattr(Stream, "begin_at_the_bottom", lambda stream: None)
    goes_down = operations(4, everywhere, 39, targets=targets)
    of_layer = operations(4, everywhere, 39) - operations(3, everywhere, 39)
    batch, shape, model = batch_of(tuple(lowest), 39), shape_of(llama(4, WIDTH)), model_of(4, lowest, targets)
    loads = load_of(batch, lowest)
    shares = [_unmet_share(whole_shapes(model, name), shape.layer_elements) for name in lowest]
    stopping = [replace(load, unmet_share=one) for load, one in zip(loads, shares, strict=True)]
    cost = CostModel(PROFILE, shape)
    predicted = cost.pass_s(load_of(batch, everywhere), 1) - cost.pass_s(stopping, 1)
    assert predicted / batch.num_tokens == pytest.approx((goes_down - stops) / of_layer, rel=0.03)


@pytest.mark.parametrize(
    ("layers", "spared"),
    [
        # Of 40 tokens each, "b" needs no gradient in layer 0 and "c" none in layers 0 to 2.
        ((4,), (1 + 3,)),
        ((2, 2), (1 + 2, 0 + 1)),
        ((1, 3), (1 + 1, 0 + 2)),
        ((3, 1), (1 + 3, 0)),
        ((1, 1, 1, 1), (1 + 1, 0 + 1, 0 + 1, 0)),
    ],
)
@pytest.mark.parametrize("share", [1.0, 0.25])
def test_each_stage_is_spared_its_own_layers_below_the_lowest_adapter(
    layers: tuple[int, ...], spared: tuple[int, ...], share: float
) -> None:
    deep = [TaskLoad(name, (40,), 39, (), 1) for name in "abc"]
    loads = [replace(load, lowest_layer=own, unmet_share=share) for load, own in zip(deep, (0, 1, 3), strict=True)]
    cost = CostModel(PROFILE, shape_of(llama(4)), num_stages=len(layers), layers_per_stage=layers)
    # A second for a token and layer, half of it in the backward.
    wanted = [0.5 * 40 * share * own for own in spared]
    whole = [[Member(task, 0, 0, 40) for task in range(3)]]
    assert (cost.passes_s(deep, whole) - cost.passes_s(loads, whole))[0] == pytest.approx(wanted)
    for stage, num_layers in enumerate(layers):
        parts = [cost.parts_of_pass(own, stage=stage) for own in (deep, loads)]
        assert parts[0].tokens - parts[1].tokens == pytest.approx(wanted[stage])
        between = [cost.pass_parts(own, 1, stage=stage) for own in (deep, loads)]
        layer_s = [one.attention_s + one.mlp_s for one in between]
        assert num_layers * (layer_s[0] - layer_s[1]) == pytest.approx(wanted[stage])
        fraction = cost.forward_fractions(loads, 1)[stage]
        forward_s = PROFILE.forward_fraction * cost.passes_s(deep, whole)[0][stage]
        assert fraction * cost.passes_s(loads, whole)[0][stage] == pytest.approx(forward_s), "spared backwards alone"
        forwards = [cost.stage_latency_s(own, num_micro_batches=1, stage=stage) for own in (deep, loads)]
        assert forwards[0] == forwards[1], "a forward goes through all layers"
    assert cost.pass_s(deep, 1) - cost.pass_s(loads, 1) == pytest.approx(sum(wanted))


@pytest.mark.parametrize("devices", [1, 2])
def test_a_stage_below_all_adapters_has_no_backward_nor_its_sums(devices: int) -> None:
    profile = replace(PROFILE, attention=Curve.proportional(0.5), link=Link(latency_s=0.1, bytes_per_s=1e4))
    sizes: dict[str, Any] = {"num_stages": 2, "devices_per_stage": devices, "layers_per_stage": (2, 2)}
    cost = CostModel(profile, shape_of(llama(4)), **sizes)
    whole = [TaskLoad(name, (40,), 39, (), 1) for name in "ab"]
    deep = [replace(load, lowest_layer=own, unmet_share=0.25) for load, own in zip(whole, (2, 3), strict=True)]
    rows = [[Member(task, 0, 0, 40) for task in range(2)]]
    (first_s, second_s), (whole_s, whole_second_s) = cost.passes_s(deep, rows)[0], cost.passes_s(whole, rows)[0]
    assert first_s == pytest.approx(whole_s / 2)
    assert cost.forward_fractions(deep, 1)[0] == pytest.approx(1.0)
    assert whole_second_s - second_s == pytest.approx(0.5 * 40 * 0.25 / devices)
    communication = [cost.parts_of_pass(own, stage=0).communication for own in (whole, deep)]
    assert communication[1] == pytest.approx(communication[0] / 2)
    assert (communication[0] > 0) is (devices > 1)


def test_stages_that_gather_their_weights_are_run_backward_below_all_adapters_too() -> None:
    deep = [TaskLoad("a", (40,), 39, (), 1, lowest_layer=2, unmet_share=0.25)]
    whole, sizes = [replace(deep[0], lowest_layer=0)], {"layers_per_stage": (2, 2), "num_stages": 2}
    own, sharded = (CostModel(PROFILE, shape_of(llama(4)), backbone_shards=n, **sizes) for n in (1, 2))
    assert own.forward_fractions(deep, 1)[0] == pytest.approx(1.0)
    row = [[Member(0, 0, 0, 40)]]
    assert sharded.passes_s(deep, row)[0][0] == sharded.passes_s(whole, row)[0][0]


def test_the_seconds_of_adapters_lie_in_the_layers_that_have_them() -> None:
    profile = replace(PROFILE, adapter=AdapterTable.constant(1.0 / (128 * 40)), utilization=AdapterTable.constant(1.0))
    cost = CostModel(profile, shape_of(llama(4)), num_stages=2, layers_per_stage=(3, 1))
    top = TaskLoad("top", (40,), 39, (AdapterLoad(1, 128),), 100, lowest_layer=3)
    every = TaskLoad("every", (40,), 39, (AdapterLoad(1, 128),), 400)

    def adapters_s(*loads: TaskLoad) -> list[float]:
        return [cost.parts_of_pass(loads, stage=stage).adapters for stage in range(2)]

    assert adapters_s(top) == pytest.approx([0.0, 1.0])
    assert adapters_s(every) == pytest.approx([3.0, 1.0])
    assert adapters_s(top, every) == pytest.approx([3.0, 2.0])


def test_a_load_has_the_adapters_of_a_layer_that_has_them(tmp_path: Path) -> None:
    for lowest in (0, 1):
        trainer = lab.make_trainer([completions(lowest)], tmp_path / str(lowest))
        (run,) = trainer.table
        load = task_load(run, whole_shapes(trainer.model, run.name), num_layers=2)
        assert (load.lowest_layer, len(load.adapters)) == (lowest, len(LINEAR))


def test_a_profile_is_measured_with_layers_of_all_rows() -> None:
    subject = Subject(llama(2), device=torch.device("cpu"), dtype=torch.float32)
    batch = batch_of(subject.model.tasks[:1], 2)
    assert subject.model.last_layer.rows(subject.model, batch) is None, "or it would be taken off twice"
    with subject.model.packed.multiplexing(batch):
        assert not subject.model.stream.unmet


def test_measured_passes_that_leave_rows_out_tell_of_no_faster_device() -> None:
    batch = batch_of(("a", "b"), 4)
    loads = load_of(batch, {"a": 0, "b": 1})
    adapters = AdapterTable.constant(0.0)
    profile = replace(PROFILE, adapter=adapters, embedding=Curve.proportional(0.01), pass_overhead_s=2.0)
    cost = CostModel(profile, shape_of(llama(2)).at_targets())
    parts = PassPrices(cost, {load.name: load for load in loads}, 0).of(PassTime((rows_of(batch),), 1.0))
    assert parts.total == pytest.approx(cost.pass_s(loads, 1))
    fit = PartFit()
    for _ in range(20):
        fit.observe(parts, cost.pass_s(loads, 1))
    assert fit.factors().tokens == pytest.approx(1.0, rel=1e-6)


def completions(lowest: int) -> Task:
    rng = np.random.default_rng(0)
    ids = [rng.integers(1, lab.VOCABULARY, size=40).tolist() for _ in range(8)]
    rows = [{"input_ids": one, "labels": [-100] * 36 + one[36:]} for one in ids]
    config = LoraConfig(r=2, target_modules=LINEAR, layers_to_transform=list(range(lowest, 2)))
    return Task(name="one", train_dataset=rows, peft_config=config, train_batch_size=4, max_steps=2)


def test_the_plan_of_a_run_counts_both(tmp_path: Path) -> None:
    def planned_s(name: str, lowest: int, **settings: Any) -> float:
        plan = lab.make_trainer([completions(lowest)], tmp_path / name, **settings).plan()
        assert plan.step_s is not None
        return plan.step_s

    wide, narrow = planned_s("wide", 0, last_layer_at_targets=False), planned_s("narrow", 0)
    assert narrow < 0.9 * wide
    assert planned_s("high", 1) < narrow


def test_a_last_layer_that_was_refused_is_planned_whole(tmp_path: Path) -> None:
    trainer = lab.make_trainer([completions(0)], tmp_path)
    planner = trainer._plans.planner
    assert planner.shape_on("cpu").read_share > 0.5
    trainer.model.last_layer.reason = "it differs"
    assert planner.shape_on("cpu").read_share == 0.0


def test_devices_that_compute_all_rows_of_the_last_layer_are_planned_so(tmp_path: Path) -> None:
    planner = lab.make_trainer([completions(0)], tmp_path)._plans.planner
    assert planner.shape_on("cuda").read_share == 0.0, "passes may be replayed"
    assert planner.shape_on("cuda", devices_per_stage=2).read_share > 0.5
    planner._sums_before_attention = True
    assert planner.shape_on("cuda", devices_per_stage=2).read_share == 0.0
    assert planner.shape_on("cuda", num_stages=2).read_share > 0.5


@pytest.mark.parametrize(("kind", "sums"), [("olmo2", True), ("qwen3", False), ("llama", False)])
def test_norms_over_all_heads_are_known_before_anything_is_cut(kind: str, sums: bool) -> None:
    assert sums_before_attention(backbone(kind)) is sums


@pytest.mark.parametrize(("name", "has_them"), [("Llama", True), ("GPT2", False), ("DeepseekV3", True), ("OPT", True)])
def test_queries_that_come_with_keys_are_planned_for_all_rows(name: str, has_them: bool) -> None:
    backbone = LANGUAGE_MODELS[name][0]()
    assert has_own_queries(backbone) is has_them
    shape = shape_of(backbone)
    assert shape.at_targets(has_own_queries=False).read_share < shape.at_targets().read_share < 1


@pytest.mark.parametrize(
    ("names", "lowest"),
    [
        (["layers.5.self_attn.q_proj.lora_A.weight", "layers.7.mlp.up_proj.lora_B.weight"], 5),
        (["h.3.attn.c_attn.lora_A.weight", "h.3.attn.c_attn.lora_magnitude_vector.weight"], 3),
        (["layers.5.self_attn.q_proj.lora_A.weight", "embed_tokens.lora_embedding_A"], 0),
        (["layers.5.self_attn.q_proj.lora_A.weight", "lm_head.lora_A.weight"], 0),
        (["layers.5.mlp.experts.lora_A.weight"], 0),
        (["layers.5.mlp.experts.2.up_proj.lora_A.weight"], 0),
        (["layers.5.self_attn.q_proj.lora_A.weight", "score.weight"], 0),
        ([], 0),
    ],
)
def test_the_lowest_layer_is_read_off_names_and_unknown_where_weights_lie_elsewhere(
    names: list[str], lowest: int
) -> None:
    assert lowest_layer(f"base_model.model.model.{name}" for name in names) == lowest
