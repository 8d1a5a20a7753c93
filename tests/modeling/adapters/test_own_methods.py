"""Adapter Tuning and Diff Pruning in whole runs: each task as plain PEFT alone, on any layout that takes it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel
from transformers import BitsAndBytesConfig, LlamaForCausalLM, LlamaForSequenceClassification

from peft_mux import BottleneckConfig, ConfigError, DiffPruningConfig, MultiTaskPeftModel
from peft_mux.checkpoint.hub import model_card
from peft_mux.engine.layout import ParallelLayout
from peft_mux.modeling.adapters.kind import kind_of
from tests.engine.processes.cases import assert_alike, assert_as_one, launch, values
from tests.invariants import mux_lab as lab
from tests.modeling.adapters import own_method_cases as cases
from tests.modeling.adapters.alone import assert_resumes
from tests.modeling.adapters.passes import IDS, assert_refused


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> lab.Run:
    """Return a run of all tasks, of three PEFT types, some on the same layers."""
    return lab.train(cases.tasks_of(), tmp_path_factory.mktemp("together"))


@pytest.fixture(scope="module")
def verdicts(together: lab.Run) -> Mapping[str, lab.Verdict]:
    return {task.name: cases.judge(together.trainer, task) for task in cases.tasks_of()}


def test_each_task_trains_as_plain_peft_would_train_it_alone(
    together: lab.Run, verdicts: Mapping[str, lab.Verdict]
) -> None:
    lab.assert_as_judged(together, verdicts)
    for name, verdict in verdicts.items():
        assert verdict.losses[-1] != verdict.losses[0], f"{name} has learned something"


def test_how_a_step_is_cut_changes_no_task(together: lab.Run, tmp_path: Path) -> None:
    options = {"split_long_sequences": True, "max_tokens_per_micro_batch": 16, "chunk_size": 4}
    cut = lab.train(cases.tasks_of(), tmp_path, gradient_checkpointing=True, **options)
    for name in cases.CONFIGS:
        lab.assert_same(cut, together, name, 1e-4)


def test_noise_and_penalty_of_a_task_are_its_own(together: lab.Run, tmp_path: Path) -> None:
    tasks = {task.name: task for task in cases.tasks_of()}
    alone = lab.train([tasks["rows"]], tmp_path)
    lab.assert_same(alone, together, "rows", 1e-4)


def test_nan_of_one_task_reaches_no_other_task(together: lab.Run, tmp_path: Path) -> None:
    def poison(trainer: Any) -> None:
        for name in ("narrow", "diff"):
            with torch.no_grad():
                next(iter(trainer.model.task_parameters(name).values())).fill_(float("nan"))

    run = lab.train(cases.tasks_of(), tmp_path, recorder=lab.Recorder(at_begin={2: poison}))
    statuses = {task.name: task.status.value for task in run.trainer.table}
    assert statuses == {name: "failed" if name in ("narrow", "diff") else "succeeded" for name in statuses}
    for name in ("houlsby", "rows", "lora"):
        lab.assert_same(run, together, name, 1e-5)


def test_tasks_resume_exactly_from_their_checkpoint(together: lab.Run, tmp_path: Path) -> None:
    assert_resumes(cases.tasks_of, tmp_path, whole=together)


def test_what_a_run_saves_is_plain_peft_is_pruned_there_and_merged(tmp_path: Path) -> None:
    run = lab.train(cases.tasks_of("diff", "houlsby", max_steps=3), tmp_path, save_strategy="steps", save_steps=3)
    model = run.trainer.model.eval()
    with torch.no_grad():
        for name in ("diff", "houlsby"):
            loaded = PeftModel.from_pretrained(lab.tiny_llama(), str(tmp_path / name)).eval()
            wanted = model.task_view(name)(input_ids=IDS).logits
            assert torch.equal(loaded(input_ids=IDS).logits, wanted)
            assert "import peft_mux\nfrom peft import PeftModel" in str(model_card(tmp_path / name, "me/it", 3))
        with pytest.raises(ConfigError, match=r"merge needs an adapter that adds to a weight.*got BOTTLENECK"):
            model.task_view("houlsby").merge_and_unload()
        assert model.tasks == ("diff", "houlsby")
        wanted = model.task_view("diff")(input_ids=IDS).logits
        merged = model.task_view("diff").merge_and_unload()
        assert torch.allclose(merged(input_ids=IDS).logits, wanted, atol=1e-5)
        pruned = PeftModel.from_pretrained(lab.tiny_llama(), str(tmp_path / "diff"))
        pruned.base_model.prune()
        pruned.save_pretrained(str(tmp_path / "served" / "diff"))
    with pytest.raises(
        ConfigError,
        match=(
            r"tasks\.diff\.peft_config\.kept must be.*, got \{'model\.layers\.0\.mlp\.down_proj': 12, "
            r"'model\.layers\.0\.self_attn\.q_proj': 4, 'model\.la.*the adapter was pruned"
        ),
    ):
        MultiTaskPeftModel.from_pretrained(lab.tiny_llama(), tmp_path / "served")


def test_a_bf16_run_begins_where_fp32_begins_and_stays_finite(together: lab.Run, tmp_path: Path) -> None:
    run = lab.train(cases.tasks_of(max_steps=3), tmp_path, bf16=True)
    for name, losses in run.losses.items():
        assert np.isfinite(losses).all()
        assert abs(losses[0] - together.losses[name][0]) <= 0.02 * together.losses[name][0], name


def test_on_a_quantised_backbone_tasks_train_as_in_plain_peft_and_are_not_merged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("bitsandbytes")
    lab.tiny_llama().save_pretrained(tmp_path / "base")
    options = {"quantization_config": BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")}
    monkeypatch.setattr(
        lab, "tiny_llama", lambda: LlamaForCausalLM.from_pretrained(tmp_path / "base", device_map="cpu", **options)
    )
    # Rounding of gradients that are all but zero is no step of AdamW then.
    tasks = cases.tasks_of("houlsby", "diff", "lora", max_steps=3, adam_epsilon=1e-6)
    run = lab.train(tasks, tmp_path / "run")
    lab.assert_as_judged(run, {task.name: cases.judge(run.trainer, task) for task in tasks})
    model = run.trainer.model.eval()
    with torch.no_grad():
        before = {task.name: model.task_view(task.name)(input_ids=IDS).logits for task in tasks}
        with pytest.raises(
            ConfigError,
            match="merge needs weights in full precision, got a DIFF_PRUNING adapter on a quantised Linear4bit",
        ):
            model.task_view("diff").merge_and_unload()
        for name, logits in before.items():
            assert torch.equal(model.task_view(name)(input_ids=IDS).logits, logits), "nothing was taken apart"


@pytest.mark.parametrize(
    ("field", "value"), [("bottleneck_size", 0), ("non_linearity", "x"), ("target_modules", ["x"])]
)
def test_a_field_that_was_spoilt_later_is_refused_by_task_and_field(field: str, value: Any) -> None:
    config: Any = BottleneckConfig(target_modules=["o_proj"])
    setattr(config, field, value)
    assert_refused({"own": config}, rf"tasks\.own\.peft_config\.{field} must be .*got .*")


def test_layouts_that_a_type_cannot_be_trained_on_are_refused_by_name() -> None:
    stages, shards = ParallelLayout.of(2, pp=2), ParallelLayout.of(2, tp=2)
    bottleneck, diff = (kind_of(config) for config in (BottleneckConfig(), DiffPruningConfig()))
    assert bottleneck.refusals(stages, "tasks.a") == []
    assert "its layers are not cut" in str(bottleneck.refusals(shards, "tasks.a")[0])
    assert "its layers are not cut" in str(diff.refusals(shards, "tasks.a")[0])
    assert "penalties of other stages" in str(diff.refusals(stages, "tasks.a")[0])


def test_plans_count_what_the_adapters_cost(tmp_path: Path) -> None:
    trainer = lab.make_trainer(cases.tasks_of("houlsby", "diff"), tmp_path)
    assert "houlsby" in str(trainer.plan())
    kind = kind_of(BottleneckConfig())
    shapes = {name: tuple(item.shape) for name, item in trainer.model.task_parameters("houlsby").items()}
    assert {(load.rank, load.width) for load in kind.loads(shapes, {})} == {(6, 64)}


LAYOUTS = [
    pytest.param(2, tuple(cases.CONFIGS), {}, id="dp2"),
    pytest.param(2, tuple(cases.CONFIGS), {"shard_backbone": True}, id="fsdp2"),
    pytest.param(2, ("houlsby", "narrow", "lora"), {"pipeline_parallel_size": 2}, id="pp2, without diff"),
]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("world_size", "names", "arguments"), LAYOUTS)
def test_a_layout_trains_to_the_result_of_one_process(
    world_size: int, names: tuple[str, ...], arguments: dict[str, Any], tmp_path: Path
) -> None:
    one = cases.train_some(0, tmp_path / "one", names, {})
    parts = values(launch(world_size, cases.train_some, tmp_path / "many", names, arguments, limit_s=120))
    assert_alike(parts)
    assert_as_one(parts[0], one)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("diff", {"pipeline_parallel_size": 2}, "the penalties of other stages do not reach the loss"),
        ("houlsby", {"tensor_parallel_size": 2}, "its layers are not cut"),
    ],
)
def test_a_layout_that_a_type_cannot_take_is_refused_on_every_process(
    name: str, arguments: dict[str, Any], said: str, tmp_path: Path
) -> None:
    for outcome in launch(2, cases.train_some, tmp_path, (name,), arguments, limit_s=120):
        assert outcome.error.startswith("ConfigError")
        assert f"tasks.{name}.peft_config" in outcome.error
        assert said in outcome.error


def test_classifiers_train_a_head_next_to_a_bottleneck() -> None:
    base = lab.tiny_llama()
    base.config.num_labels, base.config.pad_token_id = 3, 0
    model = MultiTaskPeftModel(
        LlamaForSequenceClassification(base.config),
        {"a": BottleneckConfig(task_type="SEQ_CLS"), "b": LoraConfig(task_type="SEQ_CLS")},
    )
    assert any("score" in name for name in model.task_parameters("a"))
