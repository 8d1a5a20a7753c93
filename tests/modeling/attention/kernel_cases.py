"""A stand-in for a kernel that attends to sequences of varying lengths in one call, computed on a CPU."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from peft_mux.modeling.attention import packed
from peft_mux.modeling.attention.rows import visible_mask
from peft_mux.modeling.attention.varlen import as_kernel, varlen_attention


def flash_attention(q_THC, k_TGC, v_TGC, bounds_q, bounds_k, max_q, max_k, *, scale, window_size, enable_gqa):
    """Stand for torch's kernel: queries are the last tokens of their keys."""
    rows = pairwise(bounds_q.tolist()), pairwise(bounds_k.tolist())
    parts = []
    for (q_start, q_end), (k_start, k_end) in zip(*rows, strict=True):
        assert q_end - q_start <= max_q
        assert k_end - k_start <= max_k
        q, k, v = (
            x[start:end].transpose(0, 1)
            for x, start, end in ((q_THC, q_start, q_end), (k_TGC, k_start, k_end), (v_TGC, k_start, k_end))
        )
        window, is_causal = window_size[0] + 1 if window_size[0] >= 0 else None, window_size[1] == 0
        mask = visible_mask(q.shape[1], k.shape[1], window, q.device, is_causal=is_causal)
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=is_causal and mask is None, scale=scale, enable_gqa=enable_gqa
        )
        parts.append(out.transpose(0, 1))
    return torch.cat(parts)


def one_call(patch: pytest.MonkeyPatch, module: Any = packed) -> list[tuple[Any, ...]]:
    """Let a module attend in one call; return a list that grows by the lengths of queries and of keys of each call."""
    calls: list[tuple[Any, ...]] = []

    def kernel(q, k, v, bounds_q, bounds_k, max_q, max_k, *, scale=1.0, window_size=(-1, -1), enable_gqa=False):
        calls.append((bounds_q.diff().tolist(), bounds_k.diff().tolist(), max_q, max_k, window_size))
        options = {"scale": scale, "window_size": window_size, "enable_gqa": enable_gqa}
        return flash_attention(q, k, v, bounds_q, bounds_k, max_q, max_k, **options)

    patch.setattr(packed, "varlen_support", lambda *args, **kwargs: None)
    patch.setattr(module, "varlen_attention", partial(varlen_attention, kernel=as_kernel("torch", kernel)))
    return calls
