"""Attention of which each tensor parallel rank has some heads: how many they are, and norms over all of them."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from peft_mux.kernels.cross_entropy.vocab_parallel import TensorParallelLinks
from peft_mux.kernels.philox import Window
from peft_mux.modeling.sharding.sums import copy_to_tp_region, reduce_from_tp_region

_COUNTS = ("num_heads", "n_heads", "num_attention_heads", "num_key_value_heads", "num_kv_heads", "split_size")
"""Attributes of attention modules that count heads, or the channels of all of them (GPT-2's `split_size`)."""


class _OwnHeads:
    """A configuration as the attention of one rank reads it: with fewer heads, else as it is at any time."""

    def __init__(self, config: Any, size: int) -> None:
        self._config, self._size = config, size

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._config, name)
        return value // self._size if name in _COUNTS and value is not None else value


def count_own_heads(attention: Any, config: Any, links: TensorParallelLinks) -> None:
    """Tell an attention module how many heads it has now, and which of the whole model's they are.

    Args:
        attention: the module, whose layers are cut.
        config: the configuration of the model of language.
        links: all-reduces over the tensor parallel group.
    """
    for count in _COUNTS:
        if isinstance(getattr(attention, count, None), int):
            setattr(attention, count, getattr(attention, count) // links.size)
    if hasattr(attention, "qkv_proj"):
        # Where queries, keys and values lie in one tensor, model code divides it by the numbers of the configuration.
        attention.config = _OwnHeads(attention.config, links.size)
    num_heads = config.num_attention_heads
    # Attention dropout draws by the number of the head in the whole model.
    attention.head_window = Window(num_heads * links.index // links.size, num_heads)


def norm_over_all_ranks(norm: Any, links: TensorParallelLinks) -> None:
    """Let a root mean square norm take the mean over the channels of all ranks.

    Args:
        norm: the norm, whose weights are cut.
        links: all-reduces over the tensor parallel group.
    """
    epsilon = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps

    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.float()
        own = x.pow(2).mean(-1, keepdim=True) / links.size
        # Summed going forward, and its gradient going back: every rank's channels are divided by it.
        mean = copy_to_tp_region(reduce_from_tp_region(own, links), links)
        return (norm.weight * (x * torch.rsqrt(mean + epsilon))).to(hidden_states.dtype)

    assert isinstance(norm, nn.Module)
    norm.forward = forward
    norm.is_over_all_ranks = True  # type: ignore[assignment]
