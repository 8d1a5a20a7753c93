"""Plans of a run: for its processes and for other devices, with replicas, stages and shards; what is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peft_mux import ConfigError, MultiTaskTrainer, MultiTaskTrainingArguments, Task
from peft_mux.cli.main import main
from peft_mux.data.packing.passes import even_shares
from peft_mux.engine.pipeline.stage import StageLayout, StageModel
from peft_mux.engine.tensor.parallel import TensorParallelModel
from peft_mux.errors import UnsupportedModelError
from peft_mux.modeling.objectives.objective import OWN
from peft_mux.planning.loads import cut_layers, frozen_parts, typical_lengths
from peft_mux.planning.planner import Planner, is_drained
from peft_mux.planning.targets import Target
from peft_mux.scheduler.costs.hardware import DEVICES, Overlap
from peft_mux.scheduler.costs.profile import analytic_profile
from peft_mux.scheduler.plan import Plan
from peft_mux.scheduler.planner.policies import POLICIES, register_policy
from peft_mux.trainer.inputs import make_collator
from tests.engine import lab
from tests.invariants.mux_lab import assert_close, make_trainer, small_task, train
from tests.planning.cases import described, llama
from tests.scheduler.planner.cases import load, models
from tests.scheduler.planner.toy_policy import Pairs

FP32 = torch.float32


class SilentLinks:
    """Links to shards that are not there."""

    def __init__(self, index: int, size: int) -> None:
        self.index, self.size = index, size

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        raise AssertionError("shards were to be cut, not run")


BACKBONES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gpt2, tied": {},
    "qwen2, tied": {"tie_word_embeddings": True},
}


def small(name: str) -> Any:
    """Return a small backbone whose words and heads two shards can halve."""
    return lab.backbone(name.partition(",")[0], vocab_size=98, num_hidden_layers=3, **BACKBONES[name])


def wide_vocabulary(num_layers: int) -> Any:
    """Return a backbone whose head costs as much as several of its layers."""
    return described("llama", num_hidden_layers=num_layers, vocab_size=20_000, max_position_embeddings=256)


def three() -> list[Task]:
    return [
        small_task("a", data_seed=1, length=9),
        small_task("b", data_seed=2, length=24, rank=8),
        small_task("c", data_seed=3, length=5, target_modules=["q_proj"]),
    ]


def planner_of(trainer: MultiTaskTrainer, num_replicas: int = 1) -> Planner:
    collator = make_collator(trainer.args, trainer.processing_class)
    return Planner(trainer.model, trainer._placement.source, trainer.args, collator, num_replicas)


def held_bytes(backbone: Any) -> int:
    """Return the bytes of frozen weights, storages once: a shard's head may be a view of the embedding."""
    frozen = [item for name, item in backbone.named_parameters() if ".lora_" not in name]
    return sum({item.untyped_storage().data_ptr(): item.untyped_storage().nbytes() for item in frozen}.values())


# ------------------------------------------------------- bytes, against the engine


@pytest.mark.parametrize("kind", BACKBONES)
def test_shards_and_stages_hold_the_weights_and_adapters_that_the_planner_counts(kind: str, tmp_path: Path) -> None:
    for part in ("1 shard", "2 shards", "stage 0", "stage 1", "stage 2"):
        backbone = small(kind)
        targets = ["c_attn", "c_proj"] if "gpt2" in kind else ["q_proj", "o_proj", "down_proj"]
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
            devices = int(part[0])
            expected = parts.device_bytes(3, is_first=True, is_last=True, devices=devices)
            TensorParallelModel(trainer.model, SilentLinks(0, devices))
            for own in loads:
                held = sum(parameter.numel() for parameter in trainer.model.task_parameters(own.name).values())
                assert held == own.device_parameters(devices)
                assert all(0 < adapter.cut_width < adapter.width for adapter in own.adapters)
                assert own.adapters
        assert held_bytes(trainer.model.backbone) == pytest.approx(expected, abs=3), part


@pytest.mark.parametrize("kind", BACKBONES)
def test_the_parts_of_a_backbone_add_up_to_its_bytes(kind: str) -> None:
    backbone = small(kind)
    for dtype in (FP32, torch.bfloat16):
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


@pytest.mark.parametrize("num_stages", [1, 2])
def test_a_divided_backbone_counts_a_share_and_the_largest_unit_that_is_gathered(
    num_stages: int, tmp_path: Path
) -> None:
    plans = []
    for flag in (False, True):
        trainer = make_trainer(three(), tmp_path / str(flag), model=llama(4), shard_backbone=flag, planner="together")
        planner = planner_of(trainer)
        plans.append(planner.plan(list(trainer.table), devices="4xA40", num_stages=num_stages))
        if flag is False and num_stages == 1:  # a pipeline of all devices, unless replicas divide the backbone
            plans = [planner.plan(list(trainer.table), devices="1xA40")]
    (whole, divided), parts = plans, planner.shape.parts
    assert parts is not None
    num_shards = 4 // num_stages
    assert (divided.num_stages, divided.num_replicas) == (num_stages, num_shards)
    largest = max(parts.layer_bytes, parts.before_bytes, parts.head_bytes)
    expected = whole.memory.backbone_bytes / num_shards + 2 * largest
    assert divided.memory.backbone_bytes == pytest.approx(expected, abs=4)
    over = ", over 2 stages" if num_stages == 2 else ""
    assert f"{over}) are divided among {num_shards} replicas: memory is that of one of them with the" in str(divided)
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


@pytest.mark.parametrize(("schedule", "num_chunks"), [("1f1b", 1), ("interleaved_1f1b", 2)])
def test_a_baselines_template_is_built_over_the_same_buckets(schedule: str, num_chunks: int, tmp_path: Path) -> None:
    own = make_trainer(three(), tmp_path / "own", model=llama(4))
    other = make_trainer(three(), tmp_path / "other", model=llama(4), pipeline_schedule=schedule)
    planned, baseline = (planner_of(one).plan(list(one.table), num_stages=2) for one in (own, other))
    assert baseline.template is not None
    assert (baseline.buckets, baseline.htasks) == (planned.buckets, planned.htasks)
    assert (baseline.template.schedule, baseline.template.num_chunks) == (schedule, num_chunks)


def test_the_last_stage_has_fewer_layers_if_the_head_costs_some_of_them(tmp_path: Path) -> None:
    long = [small_task("long", data_seed=2, length=120, train_batch_size=8)]
    narrow, wide = (
        planner_of(trainer).plan(list(trainer.table), num_stages=3)
        for trainer in (
            make_trainer(long, tmp_path / name, model=model)
            for name, model in (("narrow", llama(12)), ("wide", wide_vocabulary(12)))
        )
    )
    assert narrow.layers_per_stage == (4, 4, 4)
    assert "balanced by predicted cost" not in str(narrow)
    assert sum(wide.layers_per_stage) == 12
    assert wide.layers_per_stage[-1] < 4
    assert f"stages have {', '.join(map(str, wide.layers_per_stage))} layers: balanced by predicted cost" in str(wide)


def test_a_run_keeps_the_cut_that_was_planned_first_and_other_devices_neither_read_nor_set_it(tmp_path: Path) -> None:
    narrow = small_task("narrow", data_seed=1, length=2, train_batch_size=1)
    tasks = [narrow, small_task("long", data_seed=2, length=120, train_batch_size=8)]
    trainer = make_trainer(tasks, tmp_path, model=wide_vocabulary(8))
    first, second = trainer.table
    planner = planner_of(trainer)
    planner.plan([], num_stages=2)
    planner.plan([first, second], devices="2xA40")
    assert planner.cuts == {}
    alone = planner_of(trainer).plan([first], num_stages=2).layers_per_stage
    cut = planner.plan([second], num_stages=2).layers_per_stage
    assert alone != cut, "the tasks would be cut the same way; the case is too easy"
    assert planner.plan([first, second], num_stages=2, schedule="1f1b").layers_per_stage == cut
    assert planner.plan([first], num_stages=4).num_stages == 4
    assert planner.cuts[2] == cut
    planner.cuts.clear()
    assert planner.plan([first], num_stages=2).layers_per_stage == alone


# ----------------------------------------------------------------- measured times


def test_prices_follow_what_was_learnt_of_sums_only_if_passes_may_take_turns(tmp_path: Path) -> None:
    shape = planner_of(make_trainer(three(), tmp_path, model=llama(4))).shape
    profile = replace(analytic_profile(DEVICES["cpu"], shape, 2), overlap=Overlap(slowdown=0.1))
    stored = tmp_path / "profile.json"
    stored.write_text(profile.to_json(), encoding="utf-8")
    trainer = make_trainer(three(), tmp_path, model=llama(4), cost_profile=str(stored))
    planner, runs = planner_of(trainer), list(trainer.table)
    assert planner.prices(0) is None, "nothing was planned"
    planner.plan(runs, devices_per_stage=2)
    alone, in_turns = planner.prices(0, 1), planner.prices(0, 2)
    planner.plan(runs, num_stages=2, devices_per_stage=2)
    staged = planner.prices(1, 1)
    assert [own is not None and own.turns is None for own in (alone, in_turns, staged)] == [True, False, False]
    assert None not in (in_turns, staged)


def test_passes_are_priced_only_after_steps_that_are_learnt_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    priced: list[int] = []
    prices = Planner.prices
    monkeypatch.setattr(Planner, "prices", lambda *given: priced.append(1) or prices(*given))
    train([small_task("a", data_seed=1, max_steps=26)], tmp_path)
    assert len(priced) == 19 + 2, "none of the first step, then each, and from the twentieth on each fifth"


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


@pytest.mark.parametrize(
    ("devices", "sizes", "said"),
    [
        (
            "3xA40",
            (2, None),
            r"the number of devices must be a multiple of 2, got 3 x A40 with tensor_parallel_size=2\. Plan for 4xA40",
        ),
        (
            "6xA40",
            (2, 2),
            r"multiple of 4, got 6 x A40 with tensor_parallel_size=2 and pipeline_parallel_size=2\. Plan for 8xA40",
        ),
        ("4xA40", (4, None), "tensor_parallel_size must divide .*num_key_value_heads=2"),
        ("8xA40", (1, None), "plan: devices must be 1 to 4 stages, .*, got 8.*fewer stages"),
        (None, (1, 5), "plan: pipeline_parallel_size must be 1 to 4 stages, .*, got 5"),
    ],
)
def test_devices_that_cannot_share_a_backbone_so_are_refused_with_what_can(
    devices: str | None, sizes: tuple[int, int | None], said: str, tmp_path: Path
) -> None:
    trainer = make_trainer(three(), tmp_path, model=llama(4))
    with pytest.raises((ConfigError, UnsupportedModelError), match=said):
        planner_of(trainer).plan(list(trainer.table), devices=devices, devices_per_stage=sizes[0], num_stages=sizes[1])


def test_a_backbone_is_divided_one_way_and_virtual_stages_need_layers_too(tmp_path: Path) -> None:
    trainer = make_trainer(three(), tmp_path / "shards", model=llama(4), shard_backbone=True)
    with pytest.raises(
        ConfigError, match=r"plan: tensor_parallel_size must be 1 with shard_backbone=True, got 2.*Leave one of the"
    ):
        planner_of(trainer).plan(list(trainer.table), devices="4xA40", devices_per_stage=2)
    trainer = make_trainer(three(), tmp_path / "chunks", pipeline_schedule="interleaved_1f1b")
    with pytest.raises(ConfigError, match=r"plan: devices must be.*, got 4.*or another pipe"):
        trainer.plan(devices="4xA40")


def test_what_no_pipeline_can_hold_is_refused_with_a_fix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing_fits(*_: object, **__: object) -> None:
        raise ValueError("bucket 'bucket 1' on stage 0: one micro-batch must take at most 5 bytes, got 9.")

    monkeypatch.setattr("peft_mux.planning.planner.plan_tasks", nothing_fits)
    with pytest.raises(ConfigError, match=r"plan: bucket 'bucket 1' on stage 0.* Raise memory_limit_gib, take more"):
        make_trainer(three(), tmp_path).plan(devices="2xA40")


@pytest.mark.parametrize(
    ("is_here", "has_triton", "reason", "words"),
    [
        (True, True, None, None),
        (True, True, "a trial kernel cannot be launched", "a trial kernel cannot be launched"),
        (False, True, "not asked", None),  # a plan of a GPU that is not here
        (False, False, "not asked", "Triton is not installed"),
    ],
)
def test_a_plan_says_why_kernels_will_not_run(
    is_here: bool,
    has_triton: bool,
    reason: str | None,
    words: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trainer = make_trainer(three(), tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_here)
    monkeypatch.setattr("peft_mux.planning.planner.has_triton", lambda: has_triton)
    monkeypatch.setattr("peft_mux.planning.planner.reason_against_kernels", lambda device: reason)
    notes = planner_of(trainer).plan(list(trainer.table), devices="1xA40").notes
    wanted = [] if words is None else [f"adapters are computed task by task with torch, as {words}"]
    assert [note for note in notes if "adapters are computed" in note] == wanted


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
    stage_link=None,
    notes=(),
    is_own=True,
)


@pytest.mark.parametrize(
    ("is_expected", "changed"),
    [
        (False, {}),
        (False, {"arguments": {"logging_strategy": "no", "logging_steps": 1}}),
        (False, {"arguments": {"logging_strategy": "epoch", "logging_steps": 1}}),
        (False, {"arguments": {"logging_steps": 0.1}}),
        (True, {"arguments": {"logging_steps": 0.1}, "num_steps": 20}),
        (True, {"arguments": {"pipeline_flush": "every_step"}}),
        (True, {"arguments": {"logging_steps": 1}}),
        (True, {"target": replace(TARGET, num_stages=1)}),
        (True, {"target": replace(TARGET, num_replicas=2)}),
        (True, {"target": replace(TARGET, devices_per_stage=2)}),
        (True, {"steps_per_epoch": None}),
        (True, {"load": {"has_reference_forward": True}}),
        (True, {"load": {"has_batch_forward": True}}),
        (True, {"objective": "own"}),
    ],
    ids=str,
)
def test_a_pipeline_is_drained_if_something_makes_all_stages_meet_after_most_steps(
    is_expected: bool, changed: dict[str, Any], tmp_path: Path
) -> None:
    arguments = {"logging_steps": 10, **changed.get("arguments", {})}
    args = MultiTaskTrainingArguments(str(tmp_path), report_to="none", **arguments)
    objective = SimpleNamespace(name=OWN if "objective" in changed else "sft")
    run: Any = SimpleNamespace(
        resolved=SimpleNamespace(objective=objective),
        num_steps=changed.get("num_steps", 100),
        loader=SimpleNamespace(steps_per_epoch=changed.get("steps_per_epoch", 3)),
    )
    loads = [replace(load("a"), **changed.get("load", {}))]
    assert is_drained(args, changed.get("target", TARGET), [run], loads) is is_expected


# -------------------------------------------------------------- another policy


@pytest.fixture
def _pairs() -> Iterator[None]:
    register_policy(Pairs())
    yield
    POLICIES.pop(Pairs.name)


@pytest.mark.usefixtures("_pairs")
def test_a_run_trains_by_a_policy_of_one_new_file(tmp_path: Path) -> None:
    tasks = [small_task(name, data_seed=seed, max_steps=3) for seed, name in enumerate(("a", "b", "c"))]
    pairs = train(tasks, tmp_path / "pairs", planner=Pairs.name)
    plan = pairs.trainer._plans.planner.plan(list(pairs.trainer.table))
    assert plan.policy == Pairs.name
    assert sorted(len(htask.tasks) for htask in plan.htasks) == [1, 2]
    together = train(tasks, tmp_path / "together", planner="together")
    for name in ("a", "b", "c"):
        assert len(pairs.losses[name]) == 3
        assert_close(pairs.losses[name], together.losses[name], 1e-5, name)
