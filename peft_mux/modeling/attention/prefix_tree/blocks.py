"""Attention over a prefix tree without a copy of any key: each node's keys meet all queries below it in one product.

What a query sees is its own node and the nodes above it. Torch's fused attention on a CPU tells the logarithm of the
softmax's divisor beside the outputs, so each of these is computed apart, and the outputs are joined by their shares of
the whole divisor. Backwards, each of them is given the joined outputs and the whole divisor, which yields exactly its
part of the gradients. A shared key's gradient is so one product over all queries below, in their order.

    prefix of 300 tokens, 8 sequences of 30    300 x 300 causal, 240 x 300 full, 8 times 30 x 30 causal

Shape letters: U computed rows, P rows of all rectangles, n nodes of a rectangle, L its length, H heads, G key-value
heads, C channels of a head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from peft_mux.modeling.attention.parts import causal_mask
from peft_mux.modeling.attention.prefix_tree.depth_first import DepthFirst
from peft_mux.modeling.attention.prefix_tree.gathered import Gathered
from peft_mux.modeling.attention.rectangles import heads_first
from peft_mux.modeling.attention.scores import Scores

_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class TreeBlocks(torch.autograd.Function):
    """`[U, H, C]` queries, `[U, G, C]` keys and values in depth-first order `-> [U, H, C]`, on a CPU."""

    @staticmethod
    def forward(
        ctx: Any, q_UHC: torch.Tensor, k_UGC: torch.Tensor, v_UGC: torch.Tensor, tree: DepthFirst, scores: Scores
    ) -> torch.Tensor:
        """Return `[U, H, C]`."""
        out_UHC, lse_UH = _within_nodes((q_UHC, k_UGC, v_UGC), tree, scores)
        for queries, keys, window in tree.blocks:
            qkv = (_heads(x) for x in (q_UHC[queries], k_UGC[keys], v_UGC[keys]))
            options = _options(None if window is None else window.added, scores, q_UHC.dtype)
            out, lse = _FORWARD(*qkv, 0.0, False, **options)
            if window is not None:
                # Torch tells 0 for a query that sees nothing, which would be a key of score 0.
                lse = lse.masked_fill(window.is_blind, -math.inf)
            _join(out_UHC[queries], lse_UH[queries], out[0].transpose(0, 1), lse[0].transpose(0, 1))
        out_UHC = out_UHC.to(q_UHC.dtype)
        ctx.save_for_backward(q_UHC, k_UGC, v_UGC, out_UHC, lse_UH)
        ctx.tree, ctx.scores = tree, scores
        return out_UHC

    @staticmethod
    def backward(ctx: Any, grad_UHC: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradients of queries, keys and values."""
        saved, scores = (grad_UHC, *ctx.saved_tensors), ctx.scores
        grads = _within_nodes_backward(saved, ctx.tree, scores)
        grad, q, k, v, out, lse = saved
        for queries, keys, window in ctx.tree.blocks:
            own = (_heads(x) for x in (grad[queries], q[queries], k[keys], v[keys], out[queries]))
            options = _options(None if window is None else window.added, scores, q.dtype)
            parts = _BACKWARD(*own, lse[queries].transpose(0, 1)[None], 0.0, False, **options)
            for total, place, part in zip(grads, (queries, keys, keys), parts, strict=True):
                total[place] += part[0].transpose(0, 1)
        return (*grads, None, None)


def _within_nodes(qkv: Sequence[torch.Tensor], tree: DepthFirst, scores: Scores) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs `[U, H, C]` and logarithms of divisors `[U, H]` of each node's queries over its own keys.

    Those of a tree that is computed at once are over all that they see. Both are in fp32 at least, as
    several of them will be joined.
    """
    q_UHC, wide = qkv[0], torch.promote_types(qkv[0].dtype, torch.float32)
    out_UHC, lse_UH = q_UHC.new_empty(q_UHC.shape, dtype=wide), q_UHC.new_empty(q_UHC.shape[:2], dtype=wide)
    for node in tree.long_nodes:
        out, lse = _forward_causal([_heads(x[node]) for x in qkv], scores)
        out_UHC[node], lse_UH[node] = out[0].transpose(0, 1), lse[0].transpose(0, 1)
    for gathered in tree.gathered:
        parts = []
        rows = [_to_rows(x, gathered) for x in qkv]
        for rectangle, mask in zip(gathered.layout.rectangles, gathered.masks, strict=True):
            own = [heads_first(x[rectangle.rows], rectangle) for x in rows]
            parts.append(_forward_causal(own, scores, mask))
        for total, own in zip((out_UHC, lse_UH), zip(*parts, strict=True), strict=True):
            _from_rows(total, own, gathered)
    return out_UHC, lse_UH


def _within_nodes_backward(saved: Sequence[torch.Tensor], tree: DepthFirst, scores: Scores) -> list[torch.Tensor]:
    """Return what queries, keys and values get from within their nodes; `saved` is what `_BACKWARD` reads."""
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in saved[1:4]]
    for node in tree.long_nodes:
        *states, lse = (x[node].transpose(0, 1)[None] for x in saved)
        for total, part in zip(grads, _backward_causal(states, lse, scores), strict=True):
            total[node] = part[0].transpose(0, 1)
    for gathered in tree.gathered:
        parts = []
        *rows, lse_PH = (_to_rows(x, gathered) for x in saved)
        for rectangle, mask in zip(gathered.layout.rectangles, gathered.masks, strict=True):
            states = [heads_first(x[rectangle.rows], rectangle) for x in rows]
            lse = lse_PH[rectangle.rows].view(rectangle.num_sequences, rectangle.length, -1).transpose(1, 2)
            parts.append(_backward_causal(states, lse, scores, mask))
        for total, own in zip(grads, zip(*parts, strict=True), strict=True):
            _from_rows(total, own, gathered)
    return grads


def _forward_causal(
    qkv: Sequence[torch.Tensor], scores: Scores, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    mask = _own_mask(qkv[0].shape[2], scores) if mask is None else mask
    return _FORWARD(*qkv, 0.0, mask is None, **_options(mask, scores, qkv[0].dtype))


def _backward_causal(
    states: Sequence[torch.Tensor], lse: torch.Tensor, scores: Scores, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    mask = _own_mask(states[0].shape[2], scores) if mask is None else mask
    return _BACKWARD(*states, lse, 0.0, mask is None, **_options(mask, scores, states[1].dtype))


def _own_mask(length: int, scores: Scores) -> torch.Tensor | None:
    """Return what is added to the scores of a node's own keys; `None` where plain causality says it all."""
    is_seen = causal_mask(length, length, scores.window, torch.device("cpu"))
    return None if is_seen is None else torch.zeros(is_seen.shape).masked_fill_(~is_seen, -math.inf)


def _options(mask: torch.Tensor | None, scores: Scores, dtype: torch.dtype) -> dict[str, Any]:
    # Masks are of the queries' precision, or of fp32.
    if mask is not None and dtype == torch.float64:
        mask = mask.double()
    return {"attn_mask": mask, "scale": scores.scaling}


def _to_rows(x_U: torch.Tensor, gathered: Gathered) -> torch.Tensor:
    """`[U, ...] -> [P, ...]`, with zeros in the padding, which must be finite: 0 * NaN = NaN."""
    return x_U.index_select(0, gathered.place_of_row).index_fill_(0, gathered.layout.padding_rows, 0.0)


def _from_rows(total_U: torch.Tensor, parts: Sequence[torch.Tensor], gathered: Gathered) -> None:
    """Put what calls have given for the rectangles, `[n, H, L, ...]`, into its places of a stream."""
    rows = [part.transpose(1, 2).flatten(0, 1) for part in parts]
    found_P = torch.cat(rows) if len(rows) > 1 else rows[0]
    found_U = found_P.index_select(0, gathered.layout.row_of_token)
    total_U.index_copy_(0, gathered.places, found_U.to(total_U.dtype))


def _join(out_UHC: torch.Tensor, lse_UH: torch.Tensor, other_UHC: torch.Tensor, other_lse_UH: torch.Tensor) -> None:
    """Let outputs and logarithms of divisors stand for further keys, too; in place."""
    share_UH1 = torch.sigmoid(other_lse_UH - lse_UH)[..., None]
    out_UHC.lerp_(other_UHC.to(out_UHC.dtype), share_UH1)
    torch.logaddexp(lse_UH, other_lse_UH, out=lse_UH)


def _heads(x_LHC: torch.Tensor) -> torch.Tensor:
    """`[L, H, C] -> [1, H, L, C]` as a view."""
    return x_LHC.transpose(0, 1)[None]
