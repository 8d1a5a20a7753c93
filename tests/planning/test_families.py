"""The shape that the planner takes of a family that is cut: read off its configuration and its description."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig

from peft_mux.modeling.backbone.shape import model_shape
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.objectives.heads import output_head
from peft_mux.planning.replica_facts import supported_configs
from peft_mux.planning.task_loads import cut_layers, frozen_parts
from peft_mux.scheduler.parallel_layout import ParallelConfig
from tests.engine import lab
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
