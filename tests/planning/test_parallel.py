"""Plans for shards of layers, for a divided backbone, for stages cut by cost: bytes are those that the engine holds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from peft_mux import ConfigError, MultiTaskTrainer, Task
from peft_mux.cli.main import main
from peft_mux.engine.pipeline.stage import StageLayout, StageModel
from peft_mux.engine.tensor.parallel import cut_model
from peft_mux.errors import UnsupportedModelError
from peft_mux.planning.loads import task_load
from peft_mux.planning.planner import Planner
from peft_mux.planning.shapes import cut_layers, frozen_parts
from peft_mux.scheduler.plan import Plan
from peft_mux.trainer.inputs import make_collator
from tests.invariants.mux_lab import make_trainer, small_task
from tests.planning.cases import llama


class SilentLinks:
    """Links to shards that are not there."""

    def __init__(self, index: int, size: int) -> None:
        """Remember the place."""
        self.index, self.size = index, size

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        """Not called: nothing is computed here."""
        raise AssertionError("shards were to be cut, not run")


def gpt2() -> GPT2LMHeadModel:
    return GPT2LMHeadModel(GPT2Config(vocab_size=98, n_embd=32, n_layer=3, n_head=4, n_positions=64, attn_pdrop=0.0))


def qwen2(*, tied: bool) -> Qwen2ForCausalLM:
    config = Qwen2Config(
        vocab_size=98,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=tied,
    )
    return Qwen2ForCausalLM(config)


def even_llama() -> LlamaForCausalLM:
    """Return a backbone whose words two shards can halve."""
    config = LlamaConfig(
        vocab_size=98,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    return LlamaForCausalLM(config)


BACKBONES = {
    "llama": even_llama,
    "gpt2, tied": gpt2,
    "qwen2": lambda: qwen2(tied=False),
    "qwen2, tied": lambda: qwen2(tied=True),
}


def tasks_for(backbone: Any) -> list[Task]:
    targets = ["c_attn", "c_proj"] if isinstance(backbone, GPT2LMHeadModel) else ["q_proj", "o_proj", "down_proj"]
    return [
        small_task("a", data_seed=1, length=9, target_modules=targets),
        small_task("b", data_seed=2, length=24, rank=8, target_modules="all-linear"),
    ]


def planner_of(trainer: MultiTaskTrainer, num_replicas: int = 1) -> Planner:
    return Planner(
        trainer.model,
        trainer._placement.source,
        trainer.args,
        make_collator(trainer.args, trainer.processing_class),
        num_replicas,
    )


def held_bytes(backbone: Any) -> int:
    """Return the bytes of frozen weights, storages once: a shard's head may be a view of the embedding."""
    frozen = [item for name, item in backbone.named_parameters() if ".lora_" not in name]
    return sum({item.untyped_storage().data_ptr(): item.untyped_storage().nbytes() for item in frozen}.values())


# ------------------------------------------------------- bytes, against the engine


@pytest.mark.parametrize("tp_size", [1, 2])
@pytest.mark.parametrize("kind", BACKBONES)
def test_shards_hold_the_frozen_weights_and_adapters_that_the_planner_counts(
    kind: str, tp_size: int, tmp_path: Path
) -> None:
    backbone = BACKBONES[kind]()
    trainer = make_trainer(tasks_for(backbone), tmp_path, model=backbone)
    planner, model = planner_of(trainer), trainer.model
    runs = list(trainer.table)
    num_layers = planner.shape.num_layers
    loads = [task_load(run, planner.shapes_of(run.name), num_layers, cut=planner.cut_layers) for run in runs]
    parts = planner.shape.parts
    assert parts is not None
    expected = parts.device_bytes(num_layers, is_first=True, is_last=True, devices=tp_size)
    cut_model(model, SilentLinks(0, tp_size))
    assert held_bytes(model.backbone) == pytest.approx(expected, abs=num_layers)
    for load in loads:
        own = sum(parameter.numel() for parameter in model.task_parameters(load.name).values())
        assert own == load.device_parameters(tp_size)
        assert len(load.adapters) > 0
        assert all(0 < adapter.cut_width < adapter.width for adapter in load.adapters)


@pytest.mark.parametrize("stage", [0, 1, 2])
@pytest.mark.parametrize("kind", BACKBONES)
def test_stages_hold_the_frozen_weights_that_the_planner_counts(kind: str, stage: int, tmp_path: Path) -> None:
    backbone = BACKBONES[kind]()
    trainer = make_trainer(tasks_for(backbone), tmp_path, model=backbone)
    planner = planner_of(trainer)
    layers = (1, 1, planner.shape.num_layers - 2)
    assert planner.shape.parts is not None
    expected = planner.shape.parts.device_bytes(layers[stage], is_first=stage == 0, is_last=stage == 2)
    layout = StageLayout.of(planner.shape.num_layers, 3, layers_per_stage=layers)
    StageModel(trainer.model, layout, stage)
    assert held_bytes(trainer.model.backbone) == pytest.approx(expected, abs=planner.shape.num_layers)


@pytest.mark.parametrize("kind", BACKBONES)
def test_the_parts_of_a_backbone_add_up_to_its_bytes(kind: str) -> None:
    backbone = BACKBONES[kind]()
    for dtype in (torch.float32, torch.bfloat16):
        parts = frozen_parts(backbone, backbone.config.num_hidden_layers, dtype)
        assert parts is not None
        one = parts.device_bytes(backbone.config.num_hidden_layers, is_first=True, is_last=True)
        assert one == sum(p.numel() for p in backbone.parameters()) * dtype.itemsize
        assert parts.is_tied == ("tied" in kind)


def test_a_backbone_that_cannot_be_cut_has_no_cut_layers_but_layers() -> None:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=50)
    backbone = BertForSequenceClassification(config)
    assert dict(cut_layers(backbone)) == {}
    parts = frozen_parts(backbone, 2, torch.float32)
    assert parts is not None
    assert (parts.cut_bytes, parts.head_bytes, parts.before_bytes) == (0, 0, 50 * 16 * 4)
    assert parts.layer_bytes == sum(p.nbytes for p in backbone.bert.encoder.layer[0].parameters())
    assert frozen_parts(backbone, 7, torch.float32) is None


# ------------------------------------------------------------------- own devices


def three() -> list[Task]:
    return [
        small_task("a", data_seed=1, length=9),
        small_task("b", data_seed=2, length=24, rank=8),
        small_task("c", data_seed=3, length=5, target_modules=["q_proj"]),
    ]


def test_a_plan_for_shards_is_that_of_one_of_them_and_says_so(tmp_path: Path) -> None:
    trainer = make_trainer(three(), tmp_path, model=llama(4), planner="together")
    runs = list(trainer.table)
    one, two = (planner_of(trainer).plan(runs, num_stages=2, devices_per_stage=count) for count in (1, 2))
    assert (one.devices_per_stage, two.devices_per_stage) == (1, 2)
    assert (one.device, two.device) == ("2 x cpu", "4 x cpu")
    assert two.memory.backbone_bytes < one.memory.backbone_bytes
    assert two.memory.peak_bytes == max(two.peak_bytes) < max(one.peak_bytes)
    assert "2 devices share every layer (tensor parallelism): memory is that of one of them" in str(two)
    assert "at 2 GB/s and 50 us a message" in str(two)
    assert "tensor parallelism" not in str(one)
    assert Plan.from_json(two.to_json()) == two
    assert json.loads(two.to_json())["devices_per_stage"] == 2


def test_a_plan_with_a_divided_backbone_counts_a_share_and_the_unit_that_is_gathered(tmp_path: Path) -> None:
    planners, plans = [], []
    for flag in (False, True):
        trainer = make_trainer(three(), tmp_path / str(flag), model=llama(4), shard_backbone=flag, planner="together")
        planners.append(planner_of(trainer, 4))
        plans.append(planners[-1].plan(list(trainer.table)))
    whole, divided = plans
    parts = planners[0].shape.parts
    assert parts is not None
    gathered = 2 * max(parts.layer_bytes, parts.before_bytes, parts.head_bytes)
    total = planners[0].shape.backbone_bytes
    assert whole.memory.backbone_bytes == total
    assert divided.memory.backbone_bytes == pytest.approx(total / 4 + gathered, abs=4)
    assert divided.step_s > whole.step_s
    said = str(divided)
    assert "are divided among 4 replicas: memory is that of one of them with the layer that it has gathered" in said
    assert "every gathering in full" in said
    assert "gathering" not in str(whole)


# --------------------------------------------------------------------- own stages


def wide_vocabulary(num_layers: int) -> LlamaForCausalLM:
    """Return a backbone whose head costs as much as several of its layers."""
    config = LlamaConfig(
        vocab_size=20_000,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config)


def test_the_last_stage_has_fewer_layers_where_the_head_costs_some_of_them(tmp_path: Path) -> None:
    long = [small_task("long", data_seed=2, length=120, train_batch_size=8)]
    plans = []
    for name, model in (("narrow", llama(12)), ("wide", wide_vocabulary(12))):
        trainer = make_trainer(long, tmp_path / name, model=model)
        plans.append(planner_of(trainer).plan(list(trainer.table), num_stages=3))
    narrow, plan = plans
    assert narrow.layers_per_stage == (4, 4, 4)
    assert "balanced by predicted cost" not in str(narrow)
    assert sum(plan.layers_per_stage) == 12
    assert plan.layers_per_stage[-1] < 4
    assert plan.template is not None
    listed = ", ".join(map(str, plan.layers_per_stage))
    assert f"stages have {listed} layers: balanced by predicted cost" in str(plan)


def test_a_run_keeps_the_cut_that_was_planned_first_while_tasks_come_and_go(tmp_path: Path) -> None:
    narrow = small_task("narrow", data_seed=1, length=2, train_batch_size=1)
    tasks = [narrow, small_task("long", data_seed=2, length=120, train_batch_size=8)]
    trainer = make_trainer(tasks, tmp_path, model=wide_vocabulary(8))
    first, second = trainer.table
    planner = planner_of(trainer)
    alone = planner_of(trainer).plan([first], num_stages=2).layers_per_stage
    cut = planner.plan([second], num_stages=2).layers_per_stage
    assert alone != cut, "the tasks would be cut alike; the case is too easy"
    assert planner.plan([first], num_stages=2).layers_per_stage == cut
    assert planner.plan([first, second], num_stages=2, schedule="1f1b").layers_per_stage == cut
    assert planner.plan([first], num_stages=4).num_stages == 4
    assert planner.cuts[2] == cut
    planner.cuts.clear()
    assert planner.plan([first], num_stages=2).layers_per_stage == alone


def test_a_plan_for_other_devices_neither_reads_nor_sets_the_cut_of_the_run(tmp_path: Path) -> None:
    trainer = make_trainer(three(), tmp_path, model=wide_vocabulary(8))
    planner = planner_of(trainer)
    planner.plan(list(trainer.table), devices="2xA40")
    assert planner.cuts == {}
    planner.cuts[2] = (1, 7)
    assert planner.plan(list(trainer.table), num_stages=2).layers_per_stage == (1, 7)
    assert planner.plan(list(trainer.table), devices="2xA40").layers_per_stage != (1, 7)


def test_a_plan_of_no_tasks_leaves_the_cut_open(tmp_path: Path) -> None:
    trainer = make_trainer(three(), tmp_path, model=llama(4))
    planner = planner_of(trainer)
    assert planner.plan([], num_stages=2).layers_per_stage == (2, 2)
    assert planner.cuts == {}


# ------------------------------------------------------------------- other devices


def test_devices_are_shared_as_they_were_asked_to_be(tmp_path: Path) -> None:
    trainer = make_trainer(three(), tmp_path, model=llama(4), planner="together")
    planner, runs = planner_of(trainer), list(trainer.table)
    found = {
        sizes: planner.plan(runs, devices="8xA100-80GB", num_stages=sizes[1], devices_per_stage=sizes[0])
        for sizes in ((2, None), (2, 2), (1, 4))
    }
    shown = {
        sizes: (plan.num_stages, plan.devices_per_stage, plan.num_replicas, plan.device)
        for sizes, plan in found.items()
    }
    assert shown == {
        (2, None): (4, 2, 1, "8 x A100-80GB"),
        (2, 2): (2, 2, 2, "4 x A100-80GB"),
        (1, 4): (4, 1, 2, "4 x A100-80GB"),
    }


def test_devices_that_divide_the_backbone_are_replicas(tmp_path: Path) -> None:
    trainer = make_trainer(three(), tmp_path, model=llama(4), shard_backbone=True)
    plan = trainer.plan(devices="4xA40")
    assert (plan.num_stages, plan.num_replicas, plan.layers_per_stage) == (1, 4, (4,))
    assert "are divided among 4 replicas" in str(plan)
    with pytest.raises(ConfigError, match=r"got shard_backbone=True beside tensor_parallel_size=2; .*Leave one of the"):
        planner_of(trainer).plan(list(trainer.table), devices="4xA40", devices_per_stage=2)


def test_a_plan_of_stages_that_replicas_divide_counts_a_share_of_the_stage_and_its_largest_unit(tmp_path: Path) -> None:
    plans = []
    for flag in (False, True):
        trainer = make_trainer(three(), tmp_path / str(flag), model=llama(4), shard_backbone=flag, planner="together")
        planner = planner_of(trainer)
        plans.append(planner.plan(list(trainer.table), devices="4xA40", num_stages=2))
    whole, divided = plans
    parts = planner.shape.parts
    assert parts is not None
    assert [(plan.num_stages, plan.num_replicas) for plan in plans] == [(2, 2)] * 2
    largest = max(parts.layer_bytes, parts.before_bytes, parts.head_bytes)
    expected = whole.memory.backbone_bytes / 2 + 2 * largest
    assert divided.memory.backbone_bytes == pytest.approx(expected, abs=4)
    assert divided.step_s > whole.step_s, "nothing is charged for gathering"
    assert ", over 2 stages) are divided among 2 replicas" in str(divided)


@pytest.mark.parametrize(
    ("devices", "sizes", "said"),
    [
        ("3xA40", (2, None), r"devices are 3 x A40 with tensor_parallel_size=2; .* a multiple of 2\. Plan for 4xA40"),
        ("6xA40", (2, 2), r"tensor_parallel_size=2 and pipeline_parallel_size=2; .* multiple of 4\. Plan for 8xA40"),
        ("5xA40", (1, 4), r"5 x A40 with pipeline_parallel_size=4; .* a multiple of 4"),
    ],
)
def test_a_number_of_devices_that_does_not_divide_is_refused_with_one_that_does(
    devices: str, sizes: tuple[int, int | None], said: str, tmp_path: Path
) -> None:
    trainer = make_trainer(three(), tmp_path, model=llama(4))
    with pytest.raises(ConfigError, match=said):
        planner_of(trainer).plan(list(trainer.table), devices=devices, devices_per_stage=sizes[0], num_stages=sizes[1])


def test_heads_that_devices_cannot_share_are_refused(tmp_path: Path) -> None:
    trainer = make_trainer(three(), tmp_path, model=llama(4))
    with pytest.raises(UnsupportedModelError, match=r"tensor_parallel_size is 4, and .* num_key_value_heads=2"):
        planner_of(trainer).plan(list(trainer.table), devices="4xA40", devices_per_stage=4)


# ---------------------------------------------------------------------- command line


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return a file of one task over a small backbone and plain token ids."""
    llama(4).save_pretrained(tmp_path / "backbone")
    lines = [json.dumps({"input_ids": [5 + place % 3 for place in range(12)]}) + "\n" for _ in range(8)]
    (tmp_path / "rows.jsonl").write_text("".join(lines), encoding="utf-8")
    path = tmp_path / "tasks.yaml"
    path.write_text(
        f"model: backbone\noutput_dir: {tmp_path / 'out'}\n"
        "run: {use_cpu: true, report_to: none, max_steps: 3}\n"
        "tasks:\n  own: {dataset: rows.jsonl, train_batch_size: 4, peft: {r: 4, target_modules: all-linear}}\n",
        encoding="utf-8",
    )
    return path


def test_the_command_plans_stages_of_several_devices(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    shared = ["plan", str(file), "--set", "run.tensor_parallel_size=2", "--devices"]
    assert main([*shared, "4xA100-80GB", "--json"]) == 0
    plan = Plan.from_json(capsys.readouterr().out)
    assert (plan.num_stages, plan.devices_per_stage, plan.device) == (2, 2, "4 x A100-80GB")
    assert main([*shared, "3xA100-80GB"]) == 2
    assert "Plan for 4xA100-80GB" in capsys.readouterr().err
