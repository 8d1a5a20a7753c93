"""Backbones for tests of planning."""

from __future__ import annotations

from transformers import LlamaConfig, LlamaForCausalLM


def llama(num_layers: int) -> LlamaForCausalLM:
    """Return a random backbone: hidden 32, vocabulary 97, as many layers as asked for."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=num_layers,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
        )
    )
