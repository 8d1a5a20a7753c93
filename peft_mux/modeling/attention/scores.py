"""Attention within one rectangle: by torch's fused attention, or with the weights written out.

The queries of a part of a long sequence are the last tokens that its keys belong to, so causality is a triangle moved
to the right::

    part of tokens 4 to 6          keys    0 1 2 3 | 4 5 6
                         query 4           x x x x | x . .
                         query 5           x x x x | x x .
                         query 6           x x x x | x x x

Shape letters: n sequences of a rectangle, L its queries, K keys of each, H heads, G key-value heads, C channels of a
head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch.nn import functional as F

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries, keys and values."""


class Scores(NamedTuple):
    """What attention does to scores before their softmax; `window` counts the query itself, `sinks` is `[H]`."""

    scaling: float
    is_causal: bool
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None = None


def visible_mask(
    num_queries: int, num_keys: int, window: int | None, device: torch.device, *, is_causal: bool = True
) -> torch.Tensor | None:
    """Return bool `[L, K]`, true where a query sees a key, or `None` if plain causality, or none, says it all.

    Args:
        num_queries: number L of queries.
        num_keys: number K of keys; the last L of them belong to the queries' own tokens.
        window: a query sees this many tokens, itself included, in each direction; `None` for all.
        device: where the mask is made.
        is_causal: whether a query sees earlier tokens only.
    """
    # Without a mask torch takes its fused kernels, whose own triangle is right for as many keys as queries.
    if (num_keys == num_queries or not is_causal) and (window is None or num_keys <= window):
        return None
    rows = torch.arange(num_keys - num_queries, num_keys, device=device)
    distance = rows[:, None] - torch.arange(num_keys, device=device)[None, :]
    if window is None:
        return distance >= 0
    return (distance >= 0 if is_causal else distance > -window) & (distance < window)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scores: Scores,
    mask: torch.Tensor | None,
    dropped: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor:
    """Attend within one rectangle, whose queries are the last of the tokens that there are keys of.

    Args:
        q: queries `[n, H, L, C]`.
        k: keys `[n, G, K, C]`.
        v: values `[n, G, K, C']`.
        scores: what is done to scores.
        mask: bool, broadcast to `[n, H, L, K]`, true where a query sees a key; `None` for plain causality if `scores`
            is causal, else for all.
        dropped: returns weights `[n, H, L, K]` after dropout; `None` for no dropout.

    Returns:
        Outputs `[n, H, L, C']`.
    """
    is_causal = scores.is_causal and mask is None
    groups = q.shape[1] // k.shape[1]
    if scores.softcap is None and scores.sinks is None and dropped is None:
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal, scale=scores.scaling, enable_gqa=groups > 1
        )
    # With the weights written out: fused attention knows no soft-caps, sinks or our dropout.
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    logits = (q @ k.transpose(-1, -2)) * scores.scaling
    if scores.softcap is not None:
        logits = scores.softcap * torch.tanh(logits / scores.softcap)
    if is_causal:
        mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        logits = logits.masked_fill(~mask, -math.inf)
    # In fp32 as the eager attention of transformers: the sum over long rows loses bits in half precision.
    if scores.sinks is not None:
        sinks = scores.sinks.to(logits.dtype).view(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
        weights = torch.softmax(torch.cat([logits, sinks], dim=-1), dim=-1, dtype=torch.float32)[..., :-1].to(q.dtype)
    else:
        weights = torch.softmax(logits, dim=-1, dtype=torch.float32).to(q.dtype)
    return (weights if dropped is None else dropped(weights)) @ v
