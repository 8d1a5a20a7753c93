"""The shapes of backbones that people fine-tune; weights are random, as speed does not depend on them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Shape(NamedTuple):
    """A published configuration.

    Attributes:
        model_type: of transformers.
        num_layers: decoder layers of the published model.
        fields: what its configuration has in addition to the defaults of transformers.
    """

    model_type: str
    num_layers: int
    fields: Mapping[str, Any]


SHAPES = {
    "qwen3-0.6b": Shape(
        "qwen3",
        28,
        {
            "vocab_size": 151_936,
            "hidden_size": 1024,
            "intermediate_size": 3072,
            "num_attention_heads": 16,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "tie_word_embeddings": True,
        },
    ),
    "llama-3.2-1b": Shape(
        "llama",
        16,
        {
            "vocab_size": 128_256,
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "tie_word_embeddings": True,
        },
    ),
    "gemma-3-1b": Shape(
        "gemma3_text",
        26,
        {
            "vocab_size": 262_144,
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "sliding_window": 512,
        },
    ),
}


def config_of(name: str, num_layers: int, max_tokens: int) -> Any:
    """Return a configuration of a shape.

    Args:
        name: key of `SHAPES`.
        num_layers: how many of its layers to take.
        max_tokens: greatest length of a row.
    """
    from transformers import AutoConfig

    shape = SHAPES[name]
    ids = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    return AutoConfig.for_model(
        shape.model_type,
        **shape.fields,
        **ids,
        num_hidden_layers=num_layers,
        max_position_embeddings=max_tokens,
        use_cache=False,
    )
