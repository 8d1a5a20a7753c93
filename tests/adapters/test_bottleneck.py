"""Adapter Tuning: PEFT's layer against the formula of the paper, and many tasks in one pass against plain PEFT."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch import nn
from torch.nn import functional as F

from peft_mux import BottleneckConfig, ChunkPackingCollator, ConfigError, MultiTaskPeftModel
from peft_mux.adapters.bottleneck import BottleneckLinear
from peft_mux.kernels import philox
from tests.invariants import mux_lab as lab
from tests.invariants.mux_lab import relative, tiny_llama
from tests.modeling.adapters.alone import PhiloxDropout
from tests.modeling.adapters.passes import assert_as_plain, assert_nan_stays, gradients_of, judges_of

BIASES = ((True, True), (False, False), (True, False), (False, True))
ACTIVATIONS = ("relu", "gelu", "silu", "tanh")


@pytest.mark.parametrize(("name", "biases"), list(zip(ACTIVATIONS, BIASES, strict=True)))
def test_a_layer_adds_what_the_paper_says(name: str, biases: tuple[bool, bool]) -> None:
    torch.manual_seed(0)
    fields: dict[str, Any] = {"non_linearity": name, "down_bias": biases[0], "up_bias": biases[1]}
    config = BottleneckConfig(bottleneck_size=3, init_weights=False, adapter_dropout=0.5, **fields)
    layer = BottleneckLinear(nn.Linear(5, 7), "default", config, (7, 5))
    x = torch.randn(2, 4, 5)
    down, up = (layer.bottleneck_down["default"], layer.bottleneck_up["default"])
    torch.manual_seed(1)
    got = layer(x)
    torch.manual_seed(1)
    y: Any = layer.base_layer(x)
    # Dropped is what the bottleneck reads, and not what passes by.
    hidden = F.dropout(y, 0.5) @ down.weight.t() + (down.bias if biases[0] else 0)
    hidden = {"relu": hidden.clamp_min(0), "tanh": hidden.tanh(), "silu": hidden * hidden.sigmoid()}.get(
        name, 0.5 * hidden * (1 + torch.erf(hidden / 2**0.5))
    )
    assert torch.allclose(got, y + hidden @ up.weight.t() + (up.bias if biases[1] else 0), atol=1e-6)


def test_sizes_follow_from_the_width_and_adapters_stand_behind_attention_and_feed_forward() -> None:
    fields = ({}, {"bottleneck_size": 8}, {"reduction_factor": 16}, {"reduction_factor": 10_000})
    assert [BottleneckConfig(**one).size_for(4096) for one in fields] == [64, 8, 256, 1]
    model = get_peft_model(tiny_llama(), BottleneckConfig())
    wanted = [f"model.layers.{n}.{part}" for n in (0, 1) for part in ("self_attn.o_proj", "mlp.down_proj")]
    assert model.base_model.targeted_module_names == wanted
    for merge in (model.merge_and_unload, model.merge_adapter):
        with pytest.raises(ConfigError, match=r"merge needs an adapter that adds to a weight.*got BOTTLENECK.*unload"):
            merge()


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_every_activation_and_bias_is_computed_as_plain_peft_does(dropout: float) -> None:
    configs = {
        name: BottleneckConfig(
            bottleneck_size=2 + number, non_linearity=name, down_bias=down, up_bias=up, adapter_dropout=dropout
        )
        for number, (name, (down, up)) in enumerate(zip(ACTIVATIONS, BIASES, strict=True))
    }
    model = MultiTaskPeftModel(tiny_llama(), configs, seeds=dict.fromkeys(configs, 3), verify=False).train()
    row = lab.rows(1, 1, 9, 9)[0]["input_ids"]
    batch = ChunkPackingCollator()([{"task": name, "input_ids": row, "seed": 5} for name in configs])
    judges = judges_of(model, configs, dict.fromkeys(configs, 3))
    for number, (judge, _) in enumerate(judges.values()):
        for site, module in judge.train().base_model.model.named_modules():
            if isinstance(module, BottleneckLinear) and dropout:
                seed = philox.draw_seed(5, batch.task_steps[number], site)
                module.bottleneck_dropout["default"] = PhiloxDropout(dropout, seed)
    assert_as_plain(model, batch, judges, {name: [row] for name in configs}, may_be_zero=True)


def test_nan_of_a_bottleneck_reaches_no_other_and_under_autocast_they_compute_in_bf16_with_gradients_in_fp32() -> None:
    configs = {
        name: BottleneckConfig(bottleneck_size=2 + number, init_weights=False, adapter_dropout=0.3 * number)
        for number, name in enumerate("abc")
    }
    model = MultiTaskPeftModel(tiny_llama(), configs, verify=False).train()
    row = lab.rows(1, 1, 9, 9)[0]["input_ids"]
    batch = ChunkPackingCollator()([{"task": name, "input_ids": row, "seed": 5} for name in configs])
    for poisoned in "ac":
        assert_nan_stays(model, batch, poisoned)
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = model(batch).losses
    losses.sum().backward()
    assert 0 < relative(losses, model(batch).losses) < 0.02
    for key, gradient in gradients_of(model).items():
        assert gradient.dtype == torch.float32, key
        assert gradient.abs().sum() > 0, key
