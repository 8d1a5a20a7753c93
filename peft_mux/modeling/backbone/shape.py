"""Reads off a transformers model what the planner needs to know of it, without touching its weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from peft_mux.modeling.backbone.modules import frozen_parameters
from peft_mux.modeling.backbone.quantized import quantized_layers, weight_bytes
from peft_mux.scheduler.costs.memory import ModelShape


def model_shape(backbone: nn.Module, config: Any, *, dtype: torch.dtype, activation_dtype: torch.dtype) -> ModelShape:
    """Return the shape of a backbone.

    Args:
        backbone: possibly on the meta device, possibly with adapters (whose parameters are not counted).
        config: the configuration of the backbone.
        dtype: the dtype in which weights are (or will be) held that are not quantised.
        activation_dtype: the dtype in which the backbone computes.
    """
    text = config.get_text_config()
    heads = _first(text, "num_attention_heads", "n_head", default=1)
    hidden = _first(text, "hidden_size", "n_embd", "dim", default=1)
    channels = getattr(text, "head_dim", None) or hidden // heads
    frozen = {id(parameter): parameter for _, parameter in frozen_parameters(backbone)}
    quantized = {id(layer.weight): weight_bytes(layer, bits) for _, layer, bits in quantized_layers(backbone)}
    # A quantised weight counts packed words, not elements; its bytes come from its layer.
    plain = sum(parameter.numel() for key, parameter in frozen.items() if key not in quantized)
    return ModelShape(
        num_layers=_first(text, "num_hidden_layers", "n_layer", "n_layers", default=1),
        hidden_size=hidden,
        intermediate_size=_first(text, "intermediate_size", "n_inner", "ffn_dim", "hidden_dim", default=4 * hidden),
        attention_size=heads * channels,
        key_value_size=_first(text, "num_key_value_heads", default=heads) * channels,
        vocab_size=text.vocab_size,
        backbone_bytes=plain * dtype.itemsize + sum(quantized.values()),
        activation_bytes=activation_dtype.itemsize,
    )


def _first(config: Any, *names: str, default: int) -> int:
    for name in names:
        value = getattr(config, name, None)
        if isinstance(value, int):
            return value
    return default
