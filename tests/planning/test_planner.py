"""Plans of a run: for its processes and for other devices, with replicas, stages and shards; what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peft_mux import ConfigError, MultiTaskTrainer, MultiTaskTrainingArguments, Task
from peft_mux.cli.main import main
from peft_mux.data.packing.passes import even_shares
from peft_mux.errors import UnsupportedModelError
from peft_mux.modeling.objectives.objective import OWN
from peft_mux.parallel.pipeline.stage import StageLayout, StageModel
from peft_mux.parallel.tensor.parallel import TensorParallelModel
from peft_mux.planning.model_shape import cut_layers, frozen_parts
from peft_mux.planning.planner import Planner, is_drained
from peft_mux.planning.targets import Target
from peft_mux.planning.task_loads import typical_lengths
from peft_mux.scheduler.plan import Plan
from peft_mux.trainer.inputs import make_collator
from tests.engine import lab
from tests.invariants.mux_lab import make_trainer, small_task
from tests.planning.cases import described, llama
from tests.scheduler.planner.cases import load, models

FP32 = torch.float32


class SilentLinks:
    """Links to shards that are not there."""

    def __init__(self, index: int, size: int) -> None:
        self.index, self.size = index, size

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        raise AssertionError("shards were to be cut, not run")


def three() -> list[Task]:
    return [
        small_task("a", data_seed=1, length=9),
        small_task("b", data_seed=2, length=24, rank=8),
        small_task("c", data_seed=3, length=5, target_modules=["q_proj"]),
    ]


def planner_of(trainer: MultiTaskTrainer, num_replicas: int = 1) -> Planner:
    collator = make_collator(trainer.args)
    return Planner(trainer.model, trainer._placement.source, trainer.args, collator, num_replicas)


def held_bytes(backbone: Any) -> int:
    """Return the bytes of frozen weights, storages once: a shard's head may be a view of the embedding."""
    frozen = [item for name, item in backbone.named_parameters() if ".lora_" not in name]
    return sum({item.untyped_storage().data_ptr(): item.untyped_storage().nbytes() for item in frozen}.values())


# ------------------------------------------------------- bytes, against the engine


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_shards_and_stages_hold_the_weights_and_adapters_that_the_planner_counts(kind: str, tmp_path: Path) -> None:
    for part in ("2 shards", "stage 0", "stage 1", "stage 2"):
        backbone = lab.backbone(kind, vocab_size=98, num_hidden_layers=3)  # words and heads that two shards can halve
        targets = ["c_attn", "c_proj"] if kind == "gpt2" else ["q_proj", "o_proj", "down_proj"]
        tasks = [
            small_task("a", data_seed=1, length=9, target_modules=targets),
            small_task("b", data_seed=2, length=24, rank=8, target_modules="all-linear"),
        ]
        trainer = make_trainer(tasks, tmp_path / part, model=backbone)
        planner, parts = planner_of(trainer), planner_of(trainer).shape.parts
        assert parts is not None
        loads = [planner.load_of(run) for run in trainer.table]
        if part.startswith("stage"):
            stage = int(part[-1])
            expected = parts.device_bytes(1, is_first=stage == 0, is_last=stage == 2)
            StageModel(trainer.model, StageLayout.of(3, 3, layers_per_stage=(1, 1, 1)), stage)
        else:
            expected = parts.device_bytes(3, is_first=True, is_last=True, devices=2)
            TensorParallelModel(trainer.model, SilentLinks(0, 2))
            for own in loads:
                held = sum(parameter.numel() for parameter in trainer.model.task_parameters(own.name).values())
                assert held == own.device_parameters(2)
                assert all(0 < adapter.cut_width < adapter.width for adapter in own.adapters)
                assert own.adapters
        assert held_bytes(trainer.model.backbone) == pytest.approx(expected, abs=3), part


def test_a_backbone_that_cannot_be_cut_has_no_cut_layers_but_layers() -> None:
    from transformers import BertConfig, BertForSequenceClassification

    config = BertConfig(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, vocab_size=50)
    backbone = BertForSequenceClassification(config)
    assert dict(cut_layers(backbone)) == {}
    parts = frozen_parts(backbone, 2, FP32)
    assert parts is not None
    assert (parts.cut_bytes, parts.head_bytes, parts.before_bytes) == (0, 0, 50 * 16 * 4)
    assert parts.layer_bytes == sum(p.nbytes for p in backbone.bert.encoder.layer[0].parameters())
    assert frozen_parts(backbone, 7, FP32) is None


# ------------------------------------------------------------------- own devices


def test_replicas_divide_each_global_batch_and_the_plan_is_that_of_the_busiest(tmp_path: Path) -> None:
    trainer = make_trainer(three(), tmp_path, planner="interleaved")
    runs = list(trainer.table)
    alone, divided = (planner_of(trainer, number).plan(runs) for number in (1, 3))
    lengths = [typical_lengths(run.loader.sample_lengths, run.hyper.train_batch_size) for run in runs]
    tokens = [
        [sum(lengths[task][row] for row in rows) for task, rows in enumerate(share)]
        for share in even_shares(lengths, 3)
    ]
    busiest = max(tokens, key=sum)
    for task, run in enumerate(runs):
        (htask,) = [htask for htask in divided.htasks if htask.tasks == (run.name,)]
        assert htask.micro_batches * htask.tokens_per_micro_batch == pytest.approx(busiest[task])
        for replica, own in enumerate(divided.passes):
            assert sum(one.tokens for one in own if one.tasks == (run.name,)) == tokens[replica][task]
    assert divided.step_s < alone.step_s
    assert divided.shares == alone.shares, "what a task brings into a step of all replicas stays the same"
    assert "divided among 3 replicas" in str(divided)
    assert Plan.from_json(divided.to_json()) == divided


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


def test_a_divided_backbone_counts_a_share_and_the_largest_unit_that_is_gathered(tmp_path: Path) -> None:
    plans = []
    for flag in (False, True):
        trainer = make_trainer(three(), tmp_path / str(flag), model=llama(4), shard_backbone=flag, planner="together")
        planner = planner_of(trainer)
        plans.append(planner.plan(list(trainer.table), devices="4xA40", num_stages=2))
    (whole, divided), parts = plans, planner.shape.parts
    assert parts is not None
    assert (divided.num_stages, divided.num_replicas) == (2, 2)
    largest = max(parts.layer_bytes, parts.before_bytes, parts.head_bytes)
    assert divided.memory.backbone_bytes == pytest.approx(whole.memory.backbone_bytes / 2 + 2 * largest, abs=4)
    assert ", over 2 stages) are divided among 2 replicas: memory is that of one of them with the" in str(divided)
    assert "every all-gather in full" in str(divided)
    assert "all-gather" not in str(whole)


def test_a_plan_for_the_own_pipeline_says_how_the_backbone_is_cut_and_a_model_that_is_cut_is_planned_as_before(
    tmp_path: Path,
) -> None:
    trainer = make_trainer(three(), tmp_path, model=llama(5), memory_limit_gib=1.0)
    planner = planner_of(trainer)
    plan = planner.plan(list(trainer.table), num_stages=2)
    assert (plan.num_stages, plan.layers_per_stage, plan.device) == (2, (3, 2), "2 x cpu")
    assert plan.limit_bytes == 2**30
    assert plan.template is not None
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.memory.peak_bytes == max(plan.peak_bytes)
    StageModel(trainer.model, StageLayout.of(5, 2, layers_per_stage=(3, 2)), stage=1)
    assert planner.plan(list(trainer.table), num_stages=2) == plan


def test_a_run_keeps_the_cut_that_was_planned_first_and_other_devices_neither_read_nor_set_it(tmp_path: Path) -> None:
    narrow = small_task("narrow", data_seed=1, length=2, train_batch_size=1)
    tasks = [narrow, small_task("long", data_seed=2, length=120, train_batch_size=8)]
    # Its head costs as much as several of its layers.
    backbone = described("llama", num_hidden_layers=8, vocab_size=20_000, max_position_embeddings=256)
    trainer = make_trainer(tasks, tmp_path, model=backbone)
    first, second = trainer.table
    planner = planner_of(trainer)
    planner.plan([], num_stages=2)
    planner.plan([first, second], devices="2xA40")
    assert planner.cuts == {}
    alone = planner_of(trainer).plan([first], num_stages=2).layers_per_stage
    plan = planner.plan([second], num_stages=2)
    cut = plan.layers_per_stage
    assert alone != cut, "the tasks would be cut the same way; the case is too easy"
    assert cut[-1] < 4
    assert f"stages have {cut[0]}, {cut[1]} layers: balanced by predicted cost" in str(plan)
    assert planner.plan([first, second], num_stages=2, schedule="1f1b").layers_per_stage == cut
    assert planner.plan([first], num_stages=4).num_stages == 4
    assert planner.cuts[2] == cut
    planner.cuts.clear()
    assert planner.plan([first], num_stages=2).layers_per_stage == alone


# ----------------------------------------------------------------- measured times


# ------------------------------------------------------------------- other devices


def test_devices_are_shared_as_they_were_asked_to_be(tmp_path: Path) -> None:
    trainer = make_trainer(three(), tmp_path, model=llama(4), planner="together")
    planner, runs = planner_of(trainer), list(trainer.table)
    shown = {}
    for sizes in ((2, None), (2, 2), (1, 4)):
        plan = planner.plan(runs, devices="8xA100-80GB", num_stages=sizes[1], devices_per_stage=sizes[0])
        shown[sizes] = (plan.num_stages, plan.devices_per_stage, plan.num_replicas, plan.device)
    assert shown == {
        (2, None): (4, 2, 1, "8 x A100-80GB"),
        (2, 2): (2, 2, 2, "4 x A100-80GB"),
        (1, 4): (4, 1, 2, "4 x A100-80GB"),
    }
    # Nodes of 2: every other stage sends to another node. Of nodes of 3, the second replica is on two.
    for devices, speeds in (("2x2xA100-80GB", [250, 25, 250, 25]), ("2x3xA100-80GB", [25, 25])):
        plan = planner.plan(runs, devices=devices, num_stages=len(speeds))
        assert [link.bytes_per_s / 1e9 for link in plan.links] == speeds
    sharded = make_trainer(three(), tmp_path / "shards", model=llama(4), shard_backbone=True)
    # Rings over nodes of 4, with 25 GB/s a port: over all devices of both nodes, or over every other one.
    for one, stages, shards, speed in ((sharded, None, 1, 100), (sharded, 2, 1, 50), (trainer, 1, 2, 250)):
        plan = planner_of(one).plan(runs, devices="2x4xA100-80GB", num_stages=stages, devices_per_stage=shards)
        assert f"at {speed} GB/s and" in str(plan)


def test_a_plan_for_a_gpu_has_no_host_time_for_passes_that_are_replayed_as_graphs(tmp_path: Path) -> None:
    def step_s(name: str, loss_type: str = "nll", **arguments: Any) -> float:
        tasks = [replace(small_task("a", data_seed=1), loss_type=loss_type)]
        return make_trainer(tasks, tmp_path / name, **arguments).plan(devices="H100-80GB").step_s

    eager_s, auto_s = step_s("eager", cuda_graphs=False), step_s("auto")
    assert auto_s < eager_s / 4
    assert step_s("dft", "dft") == eager_s


def test_devices_that_cannot_share_a_backbone_so_are_refused_with_what_can(tmp_path: Path) -> None:
    trainer = make_trainer(three(), tmp_path, model=llama(4))
    several = r"the number of devices must be a multiple of 2, got 3 x A40 with tensor_parallel_size=2\. Plan for 4xA40"
    both = r"multiple of 4, got 6 x A40 with tensor_parallel_size=2 and pipeline_parallel_size=2\. Plan for 8xA40"
    sharded = make_trainer(three(), tmp_path / "shards", model=llama(4), shard_backbone=True)
    virtual = make_trainer(three(), tmp_path / "chunks", pipeline_schedule="interleaved_1f1b")
    for one, devices, shards, stages, said in (
        (trainer, "3xA40", 2, None, several),
        (trainer, "6xA40", 2, 2, both),
        (trainer, "4xA40", 4, None, "tensor_parallel_size must divide .*num_key_value_heads=2"),
        (trainer, "8xA40", 1, None, "plan: devices must be 1 to 4 stages, .*, got 8.*fewer stages"),
        (trainer, None, 1, 5, "plan: pipeline_parallel_size must be 1 to 4 stages, .*, got 5"),
        (sharded, "4xA40", 2, None, "plan: tensor_parallel_size must be 1 with shard_backbone=True, got 2.*Leave one"),
        (virtual, "4xA40", 1, None, "plan: devices must be.*, got 4.*or another pipe"),
    ):
        with pytest.raises((ConfigError, UnsupportedModelError), match=said):
            planner_of(one).plan(list(one.table), devices=devices, devices_per_stage=shards, num_stages=stages)


def test_a_plan_says_why_kernels_will_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer(three(), tmp_path)
    for is_here, has_triton, reason, words in (
        (True, True, None, None),
        (True, True, "a trial kernel cannot be launched", "a trial kernel cannot be launched"),
        (False, True, "not asked", None),  # a plan of a GPU that is not here
        (False, False, "not asked", "Triton is not installed"),
    ):
        monkeypatch.setattr(torch.cuda, "is_available", lambda is_here=is_here: is_here)
        monkeypatch.setattr("peft_mux.planning.planner.has_triton", lambda has_triton=has_triton: has_triton)
        monkeypatch.setattr("peft_mux.planning.planner.reason_against_kernels", lambda _, reason=reason: reason)
        notes = planner_of(trainer).plan(list(trainer.table), devices="1xA40").notes
        wanted = [] if words is None else [f"adapters are computed task by task with torch, as {words}"]
        assert [note for note in notes if "adapters are computed" in note] == wanted


def test_what_no_pipeline_can_hold_is_refused_with_a_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing_fits(*_: object, **__: object) -> None:
        raise ValueError("bucket 'bucket 1' on stage 0: one micro-batch must take at most 5 bytes, got 9.")

    monkeypatch.setattr("peft_mux.planning.planner.plan_tasks", nothing_fits)
    with pytest.raises(ConfigError, match=r"plan: bucket 'bucket 1' on stage 0.* Raise memory_limit_gib, take more"):
        make_trainer(three(), tmp_path).plan(devices="2xA40")


def test_the_command_plans_stages_of_several_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    shared = ["plan", str(path), "--set", "run.tensor_parallel_size=2", "--devices"]
    assert main([*shared, "4xA100-80GB", "--json"]) == 0
    plan = Plan.from_json(capsys.readouterr().out)
    assert (plan.num_stages, plan.devices_per_stage, plan.device) == (2, 2, "4 x A100-80GB")
    assert main([*shared, "3xA100-80GB"]) == 2
    assert "Plan for 4xA100-80GB" in capsys.readouterr().err


# ------------------------------------------------------------------------ draining

TARGET = Target(
    device="2 devices",
    device_type="cpu",
    num_stages=2,
    devices_per_stage=1,
    num_replicas=1,
    backbone_shards=1,
    limit_bytes=None,
    profile=models(2)[0].profile,
    tensor_link=None,
    stage_links=(),
    notes=(),
    is_own=True,
)


def test_a_pipeline_is_drained_if_something_makes_all_stages_meet_after_most_steps(tmp_path: Path) -> None:
    def drains(
        arguments: dict[str, Any] | None = None,
        target: dict[str, Any] | None = None,
        load_: dict[str, Any] | None = None,
        objective: str = "sft",
        num_steps: int = 100,
        steps_per_epoch: int | None = 3,
    ) -> bool:
        own = {"logging_steps": 10, "report_to": "none", **(arguments or {})}
        run: Any = SimpleNamespace(
            resolved=SimpleNamespace(objective=SimpleNamespace(name=objective)),
            num_steps=num_steps,
            loader=SimpleNamespace(steps_per_epoch=steps_per_epoch),
        )
        args = MultiTaskTrainingArguments(str(tmp_path), **own)
        return is_drained(args, replace(TARGET, **(target or {})), [run], [replace(load("a"), **(load_ or {}))])

    assert not drains()
    assert not drains({"logging_strategy": "no", "logging_steps": 1})
    assert not drains({"logging_strategy": "epoch", "logging_steps": 1})
    assert not drains({"logging_steps": 0.1})
    assert drains({"logging_steps": 0.1}, num_steps=20)
    assert drains({"pipeline_flush": "every_step"})
    assert drains({"logging_steps": 1})
    assert all(
        drains(target={field: n}) for field, n in (("num_stages", 1), ("num_replicas", 2), ("devices_per_stage", 2))
    )
    assert drains(steps_per_epoch=None)
    assert drains(load_={"has_reference_forward": True})
    assert drains(load_={"has_batch_forward": True})
    assert drains(objective=OWN)
