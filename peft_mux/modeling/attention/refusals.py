"""What packed attention does not do, refused by name where an architecture asks for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from peft_mux.errors import UnsupportedModelError

_HARMLESS_TENSORS = frozenset({"position_ids", "cache_position", "cu_seq_lens_q", "cu_seq_lens_k"})


def refuse_unknown(module: nn.Module, attention_mask: torch.Tensor | None, kwargs: dict[str, Any]) -> None:
    """Refuse masks and tensors that would change the result, and that nothing here reads."""
    name = type(module).__name__
    if attention_mask is not None:
        raise UnsupportedModelError(
            f"{name} builds an attention mask of its own; allowed: none, as a mask over the stream would mix tasks."
        )
    for key, value in kwargs.items():
        if isinstance(value, torch.Tensor) and key not in _HARMLESS_TENSORS:
            raise UnsupportedModelError(
                f'{name} passes "{key}" to attention (position biases and the like), which packed attention does not '
                "honour; allowed: plain, grouped-query, sliding-window and soft-capped attention, and sinks (s_aux)."
            )


def refuse_causal_options(module: nn.Module, *, has_window: bool, has_parts: bool) -> None:
    """Refuse what has no meaning where every token sees every other."""
    if has_window:
        raise UnsupportedModelError(
            f"{type(module).__name__} slides a window over both directions; allowed: windows of causal attention."
        )
    if has_parts:
        raise UnsupportedModelError(
            f"{type(module).__name__} lets every token see every other, so long sequences cannot be split; allowed:"
            " causal attention. Set split_long_sequences=False."
        )


def refuse_trees(module: nn.Module, *, has_tree: bool) -> None:
    """Refuse rows that stand for several tokens where these would see different tokens behind them."""
    if has_tree:
        raise UnsupportedModelError(
            f"{type(module).__name__} lets every token see every other, so no token of two sequences is the same;"
            " allowed: shared prefixes with causal attention. Set share_prefixes=False."
        )


def refuse_prefixes(module: nn.Module, *, has_prefixes: bool) -> None:
    """Refuse learnt keys where every token sees every other."""
    if has_prefixes:
        raise UnsupportedModelError(
            f"{type(module).__name__} lets every token see every other, so nothing comes before the first; allowed:"
            " prefixes (PREFIX_TUNING, CARTRIDGE) with causal attention. Use PROMPT_TUNING."
        )
