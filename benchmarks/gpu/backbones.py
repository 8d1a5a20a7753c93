"""The frozen backbones of `benchmarks.gpu`: random weights, made on the device, one at a time."""

from __future__ import annotations

from typing import Any

import torch

from benchmarks.gpu.roofline import Backbone
from benchmarks.gpu.settings import Settings, free

MAX_POSITIONS = 4096


class Backbones:
    """Holds the backbone in use. Callers must not keep it, or its memory stays taken when it is dropped.

    Args:
        settings: where backbones are made, and in which dtype.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._held: tuple[Backbone, Any] | None = None
        self.num_made = 0

    def of(self, shape: Backbone) -> Any:
        """Return the backbone of a shape, made now unless it is the one that is held."""
        if self._held is None or self._held[0] != shape:
            self.drop()
            self._held = shape, llama(self._settings, shape)
            self.num_made += 1
        return self._held[1]

    def drop(self) -> None:
        """Free the backbone that is held, as after a failure, which leaves unknown things attached to it."""
        self._held = None
        free(self._settings.device)


def llama(settings: Settings, shape: Backbone) -> Any:
    """Return a Llama of random weights on the device, with 8 key-value heads for 32 heads as Llama-3-8B has them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=shape.hidden_size,
        num_hidden_layers=shape.num_layers,
        intermediate_size=shape.intermediate_size,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=max(1, shape.num_heads // 4),
        vocab_size=shape.vocab_size,
        max_position_embeddings=MAX_POSITIONS,
        pad_token_id=None,
        use_cache=False,
    )
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(settings.dtype)
    try:
        with settings.device:
            return LlamaForCausalLM(config).requires_grad_(False).train()
    finally:
        torch.set_default_dtype(before)
