"""What needs the whole backbone in a process is refused by task and field where processes divide it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from peft import LoraConfig
from peft.tuners.lora.config import BdLoraConfig

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.engine.tasks.setup import resolve_tasks
from peft_mux.errors import ConfigError
from peft_mux.parallel.layout import check_layout, parse_layout
from peft_mux.scheduler.parallel_layout import ParallelLayout
from tests.engine.losses.cases import token_tasks
from tests.invariants.mux_lab import tiny_llama
from tests.modeling.adapters.alone import task

FIELDS: dict[str, Any] = {
    "use_dora": True,
    "lora_bias": True,
    "use_bdlora": BdLoraConfig(target_modules_bd_a=["q_proj"]),
    "init_lora_weights": "pissa",
    "bias": "lora_only",
    "modules_to_save": ["lm_head"],
    "trainable_token_indices": [1, 2],
}
LAYOUTS = {"shards": ParallelLayout.of(2, tp=2), "stages": ParallelLayout.of(2, pp=2)}
DIVIDED = {
    **{f"replicas {layout}": (layout, False) for layout in LAYOUTS.values()},
    "shard_backbone=True": (ParallelLayout.of(2), True),
}
SHARDED_STAGES = ParallelLayout.of(4, pp=2), True


def check(layout: ParallelLayout, is_sharded: bool, config: LoraConfig, folder: Any, **changed: bool) -> None:
    args: Any = MultiTaskTrainingArguments(output_dir=str(folder), use_cpu=True)
    vars(args).update(shard_backbone=is_sharded, **changed)
    tasks = resolve_tasks([task("own", config, 0)], args)
    check_layout(layout, is_quantized=False, args=args, tasks=tasks, backbone=tiny_llama())


@pytest.mark.parametrize("divided", DIVIDED)
@pytest.mark.parametrize("field", FIELDS)
def test_a_field_that_needs_the_whole_backbone_is_refused_where_it_is_divided(
    field: str, divided: str, tmp_path: Any
) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj"], **{field: FIELDS[field]})
    said = rf"tasks\.own\.peft_config\.{field} must be its default.*got .* with {re.escape(divided)}"
    with pytest.raises(ConfigError, match=said):
        check(*DIVIDED[divided], config, tmp_path)
    check(ParallelLayout.of(2), False, config, tmp_path)


@pytest.mark.parametrize("divided", DIVIDED)
@pytest.mark.parametrize("name", ["use_liger_kernel", "selective_recompute"])
def test_what_only_a_whole_backbone_does_is_refused_where_it_is_divided(name: str, divided: str, tmp_path: Any) -> None:
    config = LoraConfig(r=4, target_modules=["q_proj"])
    said = rf"args\.{name} must be .*False if a process holds only a part.*got True with {re.escape(divided)}"
    with pytest.raises(ConfigError, match=said):
        check(*DIVIDED[divided], config, tmp_path, **{name: True})
    check(ParallelLayout.of(2), False, config, tmp_path, **{name: True})


def test_plain_lora_is_trained_on_every_layout(tmp_path: Any) -> None:
    for layout, is_sharded in (*DIVIDED.values(), SHARDED_STAGES):
        check(layout, is_sharded, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="gaussian"), tmp_path)
    with pytest.raises(ConfigError, match="with shard_backbone=True"):
        check(*SHARDED_STAGES, LoraConfig(r=4, target_modules=["q_proj"], use_dora=True), tmp_path)


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("<1,2>", r"several replicas.*got <1,2>x1, a single replica.*twice as many processes, 4"),
        ("<1,2>, <1,1>x2", r"replicas with the same stages with shard_backbone=True.*different replicas"),
        ("<2,2>x2", r"without tensor parallelism.*got <2,2>x2, with tensor parallelism.*both divide each layer"),
    ],
)
def test_replicas_that_cannot_share_their_stages_are_refused(layout: str, said: str, tmp_path: Any) -> None:
    with pytest.raises(
        ConfigError, match=(rf"args\.tensor_parallel_size, pipeline_parallel_size, replicas must be .*{said}")
    ):
        check(parse_layout(layout), True, LoraConfig(r=4, target_modules=["q_proj"]), tmp_path)


@pytest.mark.parametrize("divided", ["replicas <2,1>x1", "shard_backbone=True"])
def test_losses_that_read_several_words_for_each_target_are_refused_where_the_head_is_divided(
    divided: str, tmp_path: Any
) -> None:
    layout, is_sharded = DIVIDED[divided]
    args: Any = MultiTaskTrainingArguments(output_dir=str(tmp_path), use_cpu=True)
    args.shard_backbone = is_sharded
    tasks = resolve_tasks(token_tasks(), args)
    with pytest.raises(ConfigError) as caught:
        check_layout(layout, is_quantized=False, args=args, tasks=tasks, backbone=tiny_llama())
    message = str(caught.value)
    assert "tasks.taught.train_dataset must be rows with one target per token in this layout, got" in message
    assert "tasks.curious.objective_args must be a loss without entropies in this layout" in message
    assert "tasks.policy" not in message
