"""Attention over a prefix tree, by whichever way knows the device and what is done to scores.

    on CUDA        one call, keys gathered from the root to each node (`varlen`)
    on a CPU       blocks that read keys where they lie (`TreeBlocks`)
    what remains   rectangles behind gathered keys: soft-caps, sinks, other devices and precisions

No query shares arithmetic with one that is not of its own tree, so a poisoned sequence harms those alone that have
tokens in common with it, and these are of its task.

Shape letters: U computed rows, K keys of all nodes, P rows of all rectangles, n nodes of a rectangle, L its length, H
heads, G key-value heads, C channels of a head.
"""

from __future__ import annotations

import torch

from peft_mux.modeling.attention.prefix_tree.blocks import TreeBlocks
from peft_mux.modeling.attention.prefix_tree.layouts import TreeLayouts
from peft_mux.modeling.attention.rectangles import ToRows, ToTokens
from peft_mux.modeling.attention.scores import Scores, attend
from peft_mux.modeling.attention.shared_rows import take_rows
from peft_mux.modeling.attention.varlen import varlen_attention

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def tree_varlen(qkv: QKV, tree: TreeLayouts, scores: Scores) -> torch.Tensor:
    """Attend in one call for all nodes, each behind the keys of those above it.

    Args:
        qkv: queries `[U, H, C]`, keys and values `[U, G, C]` in the precision to compute in.
        tree: the layouts of the micro-batch.
        scores: what is done to scores.

    Returns:
        Outputs `[U, H, C]`.
    """
    window = tree.narrowed(scores.window)
    keys = tree.paths(window)
    k_KGC, v_KGC = (take_rows(x, keys.rows) for x in qkv[1:])
    return varlen_attention(
        qkv[0],
        k_KGC,
        v_KGC,
        tree.bounds,
        max(tree.lengths),
        is_causal=True,
        window=scores.window,
        scaling=scores.scaling,
        keys=(keys.bounds, max(keys.num_keys)),
    )


def tree_attention(qkv: QKV, tree: TreeLayouts, scores: Scores) -> torch.Tensor:
    """Attend by blocks, or by rectangles where blocks are not enough.

    Args:
        qkv: queries `[U, H, C]`, keys `[U, G, C]` and values `[U, G, C']`, in the precision to compute in.
        tree: the layouts of the micro-batch.
        scores: what is done to scores.

    Returns:
        Outputs `[U, H, C']`.
    """
    scores = scores._replace(window=tree.narrowed(scores.window))
    has_weights_written_out = scores.softcap is not None or scores.sinks is not None
    if not has_weights_written_out and qkv[0].device.type == "cpu" and qkv[0].shape[-1] == qkv[2].shape[-1]:
        return _by_blocks(qkv, tree, scores)
    return _by_rectangles(qkv, tree, scores)


def _by_blocks(qkv: QKV, tree: TreeLayouts, scores: Scores) -> torch.Tensor:
    found = tree.depth_first(scores.window)
    if found.order is None:
        return TreeBlocks.apply(*qkv, found, scores)  # type: ignore[return-value]
    # Each way a copy, forwards and backwards, as no row goes to two places.
    no_padding = found.order[:0]
    q, k, v = (ToTokens.apply(x, found.order, no_padding) for x in qkv)
    out_UHC = TreeBlocks.apply(q, k, v, found, scores)
    return ToRows.apply(out_UHC, found.order, no_padding, len(qkv[0]))


def _by_rectangles(qkv: QKV, tree: TreeLayouts, scores: Scores) -> torch.Tensor:
    before = tree.before(scores.window)
    layout = before.rectangles
    pairs = zip(*(take_rows(x, before.rows).split(before.sizes) for x in qkv[1:]), strict=True)
    outs = []
    for (rectangle, (q, k, v)), pair in zip(layout.apart(qkv), pairs, strict=True):
        if len(pair[0]):
            # What is before them, `[n * before, G, C]`.
            earlier = (x.unflatten(0, (rectangle.num_sequences, -1)).transpose(1, 2) for x in pair)
            k, v = (torch.cat(both, dim=2) for both in zip(earlier, (k, v), strict=True))
        outs.append(attend(q, k, v, scores))
    return layout.joined(outs)
