"""Backbones for tests of planning."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.engine import lab


def llama(num_layers: int, hidden_size: int = 32) -> LlamaForCausalLM:
    """Return a random backbone: vocabulary 97, MLPs twice as wide as the stream, as many layers as asked for."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=97,
            hidden_size=hidden_size,
            intermediate_size=2 * hidden_size,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
    )


def described(kind: str, **fields: Any) -> Any:
    """Return a small backbone of a family without weights."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(lab.config_of(kind, **fields), dtype=torch.float32)
