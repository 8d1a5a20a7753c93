"""The shape that the planner takes of a backbone: read off its configuration and its description."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import GPT2Config, GPT2LMHeadModel

from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.objectives.heads import output_head
from peft_mux.planning.model_shape import cut_layers, frozen_parts, model_shape
from peft_mux.planning.replica_facts import supported_configs
from peft_mux.scheduler.parallel_layout import ParallelConfig
from tests.engine import lab
from tests.modeling.backbones import backbone_of
from tests.planning.cases import described

FP32 = torch.float32
OF_EVERY_FORM = ("cohere", "deepseek_v3", "gemma3_text", "glm4", "gpt2", "gpt_neox", "mixtral", "olmo2", "opt", "phi3")


@pytest.mark.parametrize(
    ("kind", "changed"), [*((kind, {}) for kind in OF_EVERY_FORM), ("opt", {"word_embed_proj_dim": 32})]
)
def test_the_bytes_of_a_family_lie_where_its_modules_do(kind: str, changed: dict[str, Any]) -> None:
    backbone = described(kind, **changed)
    shape = model_shape(backbone, backbone.config, dtype=FP32, activation_dtype=FP32)
    assert (shape.num_layers, shape.hidden_size, shape.vocab_size) == (lab.NUM_LAYERS, 32, lab.VOCABULARY)
    parts = frozen_parts(backbone, shape.num_layers, FP32)
    assert parts is not None
    found = parts.before_bytes + parts.after_bytes + (0 if parts.is_tied else parts.head_bytes)
    assert abs(found + shape.num_layers * parts.layer_bytes - shape.backbone_bytes) < shape.num_layers
    rows = {name for name, is_row in cut_layers(backbone).items() if is_row}
    assert rows
    # More than half of the smallest layer, where latent attention's narrow matrices and norms stay whole.
    assert parts.layer_bytes / 2 < parts.cut_bytes < parts.layer_bytes


def test_the_shape_of_a_model_counts_its_frozen_weights_alone() -> None:
    model = backbone_of("llama")()
    frozen = sum(parameter.numel() for parameter in model.parameters())
    MultiTaskPeftModel(model, {"a": LoraConfig(r=2, target_modules=["q_proj"])}, verify=False)
    shape = model_shape(model, model.config, dtype=torch.bfloat16, activation_dtype=FP32)
    assert (shape.num_layers, shape.hidden_size, shape.intermediate_size) == (2, 32, 48)
    assert (shape.attention_size, shape.key_value_size, shape.vocab_size) == (32, 16, 61)
    assert shape.backbone_bytes == 2 * frozen
    assert shape.activation_bytes == 4
    config = GPT2Config(vocab_size=61, n_embd=32, n_layer=3, n_head=4, n_positions=16)
    shape = model_shape(GPT2LMHeadModel(config), config, dtype=FP32, activation_dtype=FP32)
    assert (shape.num_layers, shape.hidden_size, shape.intermediate_size, shape.attention_size) == (3, 32, 128, 32)


def test_the_shape_of_a_mixture_counts_the_experts_of_a_token_and_all_experts() -> None:
    changed = {"num_hidden_layers": 3, "num_key_value_heads": 4, "n_routed_experts": 8, "q_lora_rank": None}
    model = backbone_of("deepseek_v3", **changed)()
    config = model.config
    before = model_shape(model, config, dtype=FP32, activation_dtype=FP32)
    MultiTaskPeftModel(model, {"a": LoraConfig(target_modules="all-linear")}, verify=False)
    shape = model_shape(model, config, dtype=FP32, activation_dtype=FP32)
    assert shape == before, "adapters are seen through"
    # One dense layer of 48; two of 24 a shared expert, and 2 of 8 experts of 24 a token.
    assert shape.intermediate_size == (48 + 2 * (24 + 2 * 24)) // 3
    assert shape.held_intermediate_size == (48 + 2 * (24 + 8 * 24)) // 3
    assert shape.routed_share == 0.25


@pytest.mark.parametrize(("kind", "caps"), [("gemma2", True), ("gemma3_text", False), ("phi3", False)])
def test_bounded_logits_are_known(kind: str, caps: bool) -> None:
    backbone = described(kind)
    assert (output_head(backbone)[2] is not None) == caps
    assert model_shape(backbone, backbone.config, dtype=FP32, activation_dtype=FP32).caps_logits == caps


def test_tasks_on_the_experts_of_a_mixture_are_planned_on_whole_models_alone() -> None:
    configs = {
        "all": LoraConfig(r=2, target_modules="all-linear"),
        "attention": LoraConfig(r=2, target_modules=["q_proj"]),
    }
    model = MultiTaskPeftModel(lab.backbone("qwen3_moe"), configs, verify=False)
    planner: Any = SimpleNamespace(model=model, args=SimpleNamespace(shard_optimizer=False))
    runs: list[Any] = [SimpleNamespace(name=name) for name in configs]
    for config, supported in ((ParallelConfig(1, 1), [True, True]), (ParallelConfig(1, 2), [False, True])):
        assert [supported_configs(planner, [run])(config) for run in runs] == supported
