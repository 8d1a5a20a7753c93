"""Adapter Tuning held against the formula of the paper, written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from peft import get_peft_model
from torch import nn
from torch.nn import functional as F

from peft_mux import BottleneckConfig, ConfigError
from peft_mux.modeling.adapters.bottleneck.peft_tuner import BottleneckLinear
from tests.invariants.mux_lab import tiny_llama


@pytest.mark.parametrize("name", ["relu", "gelu", "silu", "tanh"])
@pytest.mark.parametrize("biases", [(True, True), (False, False), (True, False)])
def test_a_layer_adds_what_the_paper_says(name: str, biases: tuple[bool, bool]) -> None:
    torch.manual_seed(0)
    config = BottleneckConfig(
        bottleneck_size=3, non_linearity=name, down_bias=biases[0], up_bias=biases[1], init_weights=False
    )
    layer = BottleneckLinear(nn.Linear(5, 7), "default", config, 7)
    x = torch.randn(2, 4, 5)
    weights: Any = layer.bottleneck_down["default"], layer.bottleneck_up["default"]
    y = layer.base_layer(x)
    hidden = y @ weights[0].weight.t() + (weights[0].bias if biases[0] else 0)
    hidden = {"relu": hidden.clamp_min(0), "tanh": hidden.tanh(), "silu": hidden * hidden.sigmoid()}.get(
        name, 0.5 * hidden * (1 + torch.erf(hidden / 2**0.5))
    )
    wanted = y + hidden @ weights[1].weight.t() + (weights[1].bias if biases[1] else 0)
    assert torch.allclose(layer(x), wanted, atol=1e-6)


def test_dropout_drops_what_the_bottleneck_reads_and_not_what_passes_by() -> None:
    config = BottleneckConfig(bottleneck_size=3, adapter_dropout=0.5, init_weights=False)
    layer = BottleneckLinear(nn.Linear(5, 7), "default", config, 7)
    x = torch.randn(4, 5)
    torch.manual_seed(1)
    got = layer(x)
    torch.manual_seed(1)
    y = layer.base_layer(x)
    down, up = layer.bottleneck_down["default"], layer.bottleneck_up["default"]
    assert torch.allclose(got, y + up(F.gelu(down(F.dropout(y, 0.5)))), atol=1e-6)


def test_sizes_are_given_or_follow_from_the_width() -> None:
    assert BottleneckConfig().size_for(4096) == 64
    assert BottleneckConfig(bottleneck_size=8).size_for(4096) == 8
    assert BottleneckConfig(reduction_factor=16).size_for(4096) == 256
    assert BottleneckConfig(reduction_factor=64).size_for(32) == 1


def test_by_default_adapters_stand_behind_attention_and_feed_forward_of_every_block() -> None:
    model = get_peft_model(tiny_llama(), BottleneckConfig())
    wanted = [f"model.layers.{n}.{part}" for n in (0, 1) for part in ("self_attn.o_proj", "mlp.down_proj")]
    assert model.base_model.targeted_module_names == wanted


def test_merging_is_refused_by_name_and_takes_nothing_apart() -> None:
    model = get_peft_model(tiny_llama(), BottleneckConfig())
    before = [name for name, _ in model.named_parameters()]
    for merge in (model.merge_and_unload, model.merge_adapter):
        with pytest.raises(ConfigError, match=r"merge: got a BOTTLENECK adapter .*; allowed: .*unload\(\)"):
            merge()
    assert [name for name, _ in model.named_parameters()] == before
