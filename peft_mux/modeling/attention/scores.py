"""Attention within one rectangle: by torch's fused attention, or with the weights written out.

Shape letters: n sequences of a rectangle, L its length, K keys of each, H heads, G key-value heads, C channels of a
head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional as F

from peft_mux.modeling.attention.parts import causal_mask


class Scores(NamedTuple):
    """What attention does to scores before their softmax; `window` counts the query itself, `sinks` is `[H]`."""

    scaling: float
    is_causal: bool
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None = None


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scores: Scores,
    dropped: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Attend within one rectangle, whose queries are the last of the tokens that there are keys of.

    Args:
        q: queries `[n, H, L, C]`.
        k: keys `[n, G, K, C]`.
        v: values `[n, G, K, C']`.
        scores: what is done to scores.
        dropped: returns weights `[n, H, L, K]` after dropout; `None` for no dropout.

    Returns:
        Outputs `[n * L, H, C']`.
    """
    mask = causal_mask(q.shape[2], k.shape[2], scores.window, q.device)
    if scores.softcap is None and scores.sinks is None and dropped is None:
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            # Torch takes a mask or the flag, never both.
            is_causal=scores.is_causal and mask is None,
            scale=scores.scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
    else:
        out = _attend_by_weights(q, k, v, scores, mask, dropped)
    return out.transpose(1, 2).reshape(-1, out.shape[1], out.shape[3])


def _attend_by_weights(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scores: Scores,
    mask: torch.Tensor | None,
    dropped: Callable[[torch.Tensor], torch.Tensor] | None,
) -> torch.Tensor:
    """Return `[n, H, L, C']` with the weights written out: fused attention knows no soft-caps, sinks or our dropout."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        # Written out for the plain product; fused attention shares key-value heads without a copy.
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    logits = (q @ k.transpose(-1, -2)) * scores.scaling
    if scores.softcap is not None:
        logits = scores.softcap * torch.tanh(logits / scores.softcap)
    if mask is None and scores.is_causal:
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        logits = logits.masked_fill(~mask, -math.inf)
    # In fp32 as the eager attention of transformers: the sum over long rows loses bits in half precision.
    if scores.sinks is not None:
        sinks = scores.sinks.to(logits.dtype).view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
        weights = torch.softmax(torch.cat([logits, sinks], dim=-1), dim=-1, dtype=torch.float32)[..., :-1].to(q.dtype)
    else:
        weights = torch.softmax(logits, dim=-1, dtype=torch.float32).to(q.dtype)
    if dropped is not None:
        weights = dropped(weights)
    return weights @ v
