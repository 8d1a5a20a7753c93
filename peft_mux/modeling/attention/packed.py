"""Attention over a packed stream, through transformers' attention interface.

Each sequence attends only to itself. On CUDA, short sequences have kernels of their own (`peft_mux.kernels.attention`),
and all others one call, if `varlen` has a kernel for it. Otherwise sequences are gathered into rectangles of near-equal
length, and one scaled-dot-product call is made per rectangle. There is no dense T x T mask, and no sequence shares
arithmetic with another (a masked NaN is still NaN: 0 * NaN), so a poisoned sequence harms no other.

Where sequences have a common prefix, queries, keys and values are those of the computed rows, and each node of the
prefix tree attends to the keys from the root on (`prefix_tree`). Parts of long sequences are computed one by one,
because each has another number of keys.

Causal sequences are padded at their end to a multiple of 16 tokens, which needs no mask: a padded key comes after every
real query. If every token sees every other (encoders), rectangles hold equal lengths and nothing is padded.

Shape letters: T tokens, U computed rows, n sequences of a rectangle, L its length, K keys of a part, H heads, G
key-value heads, C channels of a head.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface

from peft_mux.errors import UnsupportedModelError
from peft_mux.kernels import philox
from peft_mux.kernels.attention import MAX_HEAD_DIM
from peft_mux.kernels.availability import runs_kernels
from peft_mux.modeling.attention.attention_stream import AttentionStream
from peft_mux.modeling.attention.prefix_tree import tree_attention, tree_varlen
from peft_mux.modeling.attention.rows import (
    LENGTH_STEP,
    QKV,
    Apart,
    Joined,
    Layout,
    Rectangle,
    Scores,
    attend,
    take_rows,
    visible_mask,
)
from peft_mux.modeling.attention.varlen import varlen_attention, varlen_support, warn_once

ATTENTION_NAME = "peft_mux"
"""Name of packed attention in transformers' table of attention functions."""

_HARMLESS_TENSORS = frozenset({"position_ids", "cache_position", "cu_seq_lens_q", "cu_seq_lens_k"})


def register_attention() -> None:
    """Make `packed_attention` known to transformers under `ATTENTION_NAME`; may be called again."""
    # No mask function under this name: transformers then makes no mask, and does not search the positions for packed
    # sequences either, which would wait for the device.
    AttentionInterface.register(ATTENTION_NAME, packed_attention)


def packed_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    mux_stream: AttentionStream | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within each sequence of the stream; the function that transformers' models call.

    Args:
        module: attention module of the layer that attends.
        query: queries `[1, H, T, C]` of all heads; `[1, H, U, C]` if U rows are computed of the T tokens.
        key: keys `[1, G, T, C]`, where G divides H.
        value: values `[1, G, T, C']` of the same G heads.
        attention_mask: must be `None`, as the layouts of `mux_stream` replace it.
        scaling: factor of the scores; by default `1 / sqrt(C)`.
        dropout: probability with which an attention weight is dropped.
        is_causal: whether a query sees earlier tokens only; by default the module's own `is_causal`.
        sliding_window: a query sees this many tokens, itself included, before it; and after it if not causal.
        softcap: bound of the scores (Gemma 2).
        s_aux: `[H]`, a score of each head that takes part in the softmax and leads to no value (sinks, gpt-oss).
        mux_stream: the stream and its layouts, which `MultiTaskPeftModel` passes through the model call.
        **kwargs: what else the architecture passes; refused if it would change the result.

    Returns:
        Outputs `[1, T, H, C']`, or `[1, U, H, C']`, and `None` in place of the attention weights.

    Raises:
        UnsupportedModelError: if the architecture asks for what packed attention does not do.
    """
    if mux_stream is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} must pass **kwargs of the model call through to its attention function; "
            "without them its sequences cannot be separated."
        )
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    _check_supported(module, mux_stream, attention_mask, kwargs, is_causal=causal)
    tree = mux_stream.tree if dropout == 0.0 else None
    # Parts of long sequences, learnt prefixes and dropout draws belong to all tokens of the stream.
    shared = mux_stream.batch.shared if tree is None else None
    if shared is not None:
        rows = shared.row_of_token
        query, key, value = (
            take_rows(x.squeeze(0).transpose(0, 1), rows).transpose(0, 1)[None] for x in (query, key, value)
        )
    mux_stream.stream.num_attention_calls += 1
    if mux_stream.parts is not None:
        mux_stream.keep_parts(mux_stream.module_names[module], key, value)
    scores = Scores(query.shape[-1] ** -0.5 if scaling is None else scaling, causal, sliding_window, softcap, s_aux)
    if mux_stream.rows is not None:
        keys, values, _ = mux_stream.stream_with_context(module, key, value, None)
        out = mux_stream.rows.attend(mux_stream.module_names[module], (query, keys, values), scores)
        if out is not None:
            return out, None
    # The precision in which scaled-dot-product attention would compute. Rotary embedding makes queries of fp32 under
    # autocast; float64 is what autocast leaves alone. Asked in every call, as are the kernels, because dropout and
    # dtype differ between training, evaluation and autocast.
    device_type, dtype = query.device.type, query.dtype
    if dtype != torch.float64 and torch.is_autocast_enabled(device_type):
        dtype = torch.get_autocast_dtype(device_type)
    reason = varlen_support(
        query.device,
        dtype,
        query.shape[-1],
        value_dim=value.shape[-1],
        softcap=softcap,
        dropout=dropout,
        has_sinks=s_aux is not None,
    )
    if reason is not None and query.is_cuda:
        warn_once(reason)
    if tree is not None:
        q, k, v = (x.squeeze(0).transpose(0, 1).to(dtype) for x in (query, key, value))
        out = (tree_varlen if reason is None else tree_attention)((q, k, v), tree, scores)[None]
    elif reason is None:
        out = _by_varlen(module, (query, key, value), mux_stream, scores, dtype)
    else:
        out = _by_rectangles(module, (query, key, value), mux_stream, scores, dropout)
    if mux_stream.parts is not None and not torch.is_grad_enabled():
        # With gradients, the backward may read keys and values again, and `KeyValueStore.release` frees them after it.
        for part in mux_stream.parts.values():
            if not part.has_more:
                mux_stream.stream.key_values.forget(mux_stream.module_names[module], part)
    if shared is not None:
        out = out.squeeze(0).index_select(0, shared.computed)[None]
    return out, None


def _check_supported(
    module: nn.Module,
    mux_stream: AttentionStream,
    attention_mask: torch.Tensor | None,
    kwargs: dict[str, Any],
    *,
    is_causal: bool,
) -> None:
    """Refuse by name what would change the result, and what has no meaning if every token sees every other."""
    reason = None
    if attention_mask is not None:
        reason = "builds its own attention mask, and a mask over the stream would mix tasks"
    for key, value in kwargs.items():
        if isinstance(value, torch.Tensor) and key not in _HARMLESS_TENSORS:
            reason = (
                f'passes "{key}" to attention (position biases and similar), which packed attention does not '
                "support; it supports plain, grouped-query, sliding-window and soft-capped attention, and sinks "
                "(s_aux)"
            )
    if is_causal or reason is not None:
        pass
    elif mux_stream.parts is not None:
        reason = "lets every token see every other, so long sequences cannot be split. Set split_long_sequences=False"
    elif mux_stream.batch.shared is not None:
        reason = "lets every token see every other, so no prefix can be shared. Set share_prefixes=False"
    if reason is not None:
        raise UnsupportedModelError(f"{type(module).__name__} {reason}.")


def _by_varlen(
    module: nn.Module, qkv: QKV, mux_stream: AttentionStream, scores: Scores, dtype: torch.dtype
) -> torch.Tensor:
    """Attend by kernels that know where each sequence begins, computing in `dtype`; `[1, T, H, C']`."""
    query, key, value = qkv
    key, value, num_keys = mux_stream.stream_with_context(module, key, value, scores.window)
    keys = None
    if mux_stream.parts is not None or mux_stream.prefixes is not None:
        keys = mux_stream.key_bounds(num_keys), max(num_keys)
    # As autocast would cast what scaled-dot-product attention is called with; only now, so that keys and values of
    # parts are kept, and their gradients added up, as the model computes them.
    q_THC, k_KGC, v_KGC = (x.squeeze(0).transpose(0, 1).to(dtype) for x in (query, key, value))
    options: dict[str, Any] = {"is_causal": scores.is_causal, "window": scores.window, "scaling": scores.scaling}
    bounds, longest = mux_stream.batch.cu_seqlens, mux_stream.max_length
    # By the length of each row alone, so that a row is computed in one way in any company.
    if keys is None and mux_stream.has_short_rows and q_THC.shape[-1] <= MAX_HEAD_DIM and runs_kernels(query.device):
        from peft_mux.kernels.attention.short_rows import short_row_attention  # needs Triton

        if mux_stream.long_rows is None:
            return short_row_attention(q_THC, k_KGC, v_KGC, bounds, **options)[None]
        tokens, long_bounds, longest = mux_stream.long_rows
        (q, long_q), (k, long_k), (v, long_v) = (Apart.apply(x, tokens) for x in (q_THC, k_KGC, v_KGC))
        out = short_row_attention(q, k, v, bounds, **options)
        long_out = varlen_attention(long_q, long_k, long_v, long_bounds, longest, **options)
        return Joined.apply(out, long_out, tokens)[None]
    return varlen_attention(q_THC, k_KGC, v_KGC, bounds, longest, keys=keys, **options)[None]


def _by_rectangles(
    module: nn.Module, qkv: QKV, mux_stream: AttentionStream, scores: Scores, dropout: float
) -> torch.Tensor:
    """Attend in one call for each group of sequences of near-equal length; `[1, T, H, C']`."""
    layout = mux_stream.layout(is_causal=scores.is_causal)
    draws = AttentionDropout(mux_stream, module, layout, dropout) if dropout > 0.0 else None
    outs = []
    for rectangle, (q, k, v) in layout.apart([x.squeeze(0).transpose(0, 1) for x in qkv]):
        k, v = mux_stream.with_context(module, rectangle.first, k, v, scores.window)
        mask = visible_mask(q.shape[2], k.shape[2], scores.window, q.device, is_causal=scores.is_causal)
        outs.append(attend(q, k, v, scores, mask, None if draws is None else partial(draws, rectangle)))
    return layout.joined(outs)[None]


class AttentionDropout:
    """Dropout of attention weights whose draws depend only on the query's place, the head and the key.

    Heads count as those of the whole model, also if a shard has only some of them (`head_window`).

    Args:
        attention: the micro-batch in flight.
        module: the attention module whose weights are dropped.
        layout: the rectangles of the micro-batch.
        probability: probability with which a weight is dropped.
    """

    def __init__(self, attention: AttentionStream, module: nn.Module, layout: Layout, probability: float) -> None:
        """Find the task and the place of every row of the rectangles."""
        self.probability = probability
        self.name = attention.module_names[module]
        self.heads: philox.Window | None = getattr(module, "head_window", None)
        self.parts, self.prefixes = attention.parts or {}, attention.prefixes
        self.segments, batch = attention.stream.segments, attention.batch
        self.places = batch.token_places.new_zeros(layout.num_rows)
        # Draws follow a token's place in its task's batch, so that neighbours and packing never shift them.
        self.places.index_copy_(0, layout.row_of_token, batch.token_places)
        # On the host, which knows the segments: reading them off the device would wait.
        owner = np.full(batch.num_tokens, -1)
        for index, segment in enumerate(self.segments):
            owner[segment.start : segment.end] = index
        self.owner_of_row = np.full(layout.num_rows, -1)
        self.owner_of_row[layout.row_of_token_on_host] = owner

    def __call__(self, rectangle: Rectangle, weights_nHLK: torch.Tensor) -> torch.Tensor:
        """Return the attention weights of one of the layout's rectangles after dropout."""
        num_heads, _, num_keys = weights_nHLK.shape[1:]
        width = last = num_keys
        part = self.parts.get(rectangle.first)
        if part is not None:
            # A draw is numbered by query, head and key within the padded width of the whole sequence, so draws of all
            # keys are made, and those of the keys at hand taken.
            before = 0 if self.prefixes is None else self.prefixes.num_keys(rectangle.first)
            width, last = before + -(-part.num_tokens // LENGTH_STEP) * LENGTH_STEP, before + part.end
        # Where the draws of these heads are among those of all heads, which have `width` of them each.
        heads = self.heads
        window = None if heads is None else philox.Window(heads.first * width, heads.num_columns * width)
        parts = []
        for number, weights_HLK in enumerate(weights_nHLK):
            first_row = rectangle.start + number * rectangle.length
            seed = self.segments[self.owner_of_row[first_row]].draw_seed(self.name)
            places = self.places[first_row : first_row + rectangle.length]
            # Draws are by place and column: a row is a query, its columns are the keys of one head after another.
            kept = philox.keep_mask(seed, places, num_heads * width, self.probability, window)
            kept_HLK = kept.view(-1, num_heads, width)[:, :, last - num_keys : last].transpose(0, 1)
            parts.append(philox.dropped(weights_HLK, kept_HLK, self.probability))
        return torch.stack(parts)
