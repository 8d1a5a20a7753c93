"""What needs the whole backbone in a process is refused by task and field where processes divide it."""

from __future__ import annotations

import re
from typing import Any

import pytest
from peft import LoraConfig
from peft.tuners.lora.config import BdLoraConfig

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.engine.layout import ParallelLayout, check_layout
from peft_mux.engine.tasks.setup import resolve_tasks
from peft_mux.errors import ConfigError
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


def check(layout: ParallelLayout, is_sharded: bool, config: LoraConfig, folder: Any) -> None:
    args: Any = MultiTaskTrainingArguments(output_dir=str(folder), use_cpu=True)
    args.shard_backbone = is_sharded
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
def test_plain_lora_is_trained_on_every_layout(divided: str, tmp_path: Any) -> None:
    check(*DIVIDED[divided], LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="gaussian"), tmp_path)


def test_plain_lora_is_trained_on_stages_that_replicas_divide(tmp_path: Any) -> None:
    check(*SHARDED_STAGES, LoraConfig(r=4, target_modules=["q_proj"]), tmp_path)
    field = next(iter(FIELDS))
    with pytest.raises(ConfigError, match="with shard_backbone=True"):
        check(*SHARDED_STAGES, LoraConfig(r=4, target_modules=["q_proj"], **{field: FIELDS[field]}), tmp_path)


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        ("<1,2>", r"several replicas.*got <1,2>x1, a single replica.*twice as many processes, 4"),
        ("<1,2>, <1,1>x2", r"replicas with the same stages with shard_backbone=True.*different replicas"),
        ("<2,2>x2", r"without tensor parallelism.*got <2,2>x2, with tensor parallelism.*both divide each layer"),
        ("<2,1>x2", r"got <2,1>x2, with tensor parallelism"),
    ],
)
def test_replicas_that_cannot_share_their_stages_are_refused(layout: str, said: str, tmp_path: Any) -> None:
    with pytest.raises(
        ConfigError, match=(rf"args\.tensor_parallel_size, pipeline_parallel_size, replicas must be .*{said}")
    ):
        check(ParallelLayout.parse(layout), True, LoraConfig(r=4, target_modules=["q_proj"]), tmp_path)
