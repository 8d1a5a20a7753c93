"""Attention over a packed stream, through transformers' attention interface.

Each sequence attends to itself alone. On CUDA that is one call, where `varlen` has a kernel for it. Elsewhere
sequences are gathered into rectangles of near-equal length, and one scaled-dot-product call is made per rectangle: no
dense T x T mask, and no sequence shares arithmetic with another (a masked NaN is still NaN: 0 * NaN), so a poisoned
sequence harms nobody.

Where sequences begin alike, queries, keys and values are those of the computed rows, and each node of the prefix tree
attends to the keys from the root on (`prefix_tree`).

Parts of long sequences (`parts`) are computed one by one, as each has a number of keys of its own.

Causal sequences are padded at their end to a multiple of 16 tokens, which needs no mask: a padded key comes after
every real query. Where every token sees every other (encoders), rectangles hold equal lengths and nothing is padded.

Shape letters: T tokens, U computed rows, P rows of all rectangles, n sequences of a rectangle, L its length, H heads, G
key-value heads, C channels of a head.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from peft_mux.errors import UnsupportedModelError
from peft_mux.modeling.attention.attention_stream import AttentionStream
from peft_mux.modeling.attention.prefix_tree.attention import tree_attention, tree_varlen
from peft_mux.modeling.attention.prefix_tree.layouts import TreeLayouts
from peft_mux.modeling.attention.refusals import refuse_causal_options, refuse_prefixes, refuse_trees, refuse_unknown
from peft_mux.modeling.attention.scores import Scores, attend
from peft_mux.modeling.attention.shared_rows import to_computed, to_stream
from peft_mux.modeling.attention.varlen import varlen_attention, varlen_support, warn_once
from peft_mux.modeling.attention.weight_dropout import AttentionDropout

ATTENTION_NAME = "peft_mux"
"""Name of packed attention in transformers' table of attention functions."""


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
        query: queries `[1, H, T, C]` of all heads; `[1, H, U, C]` where U rows are computed of the T tokens.
        key: keys `[1, G, T, C]`, where G divides H.
        value: values `[1, G, T, C']` of the same G heads.
        attention_mask: must be `None`, as the layouts of `mux_stream` stand for it.
        scaling: factor of the scores; by default `1 / sqrt(C)`.
        dropout: probability with which an attention weight is dropped.
        is_causal: whether a query sees earlier tokens only; by default the module's own `is_causal`.
        sliding_window: a query sees this many tokens, itself included.
        softcap: bound of the scores (Gemma 2).
        s_aux: `[H]`, a score of each head that takes part in the softmax and leads to no value (sinks, gpt-oss).
        mux_stream: the stream and its layouts, which `MultiTaskPeftModel` passes through the model call.
        **kwargs: what else the architecture passes; refused where it would change the result.

    Returns:
        Outputs `[1, T, H, C']`, or `[1, U, H, C']`, and `None` in place of the attention weights. Of a layer that
        computes some of its rows alone, those of these rows.

    Raises:
        UnsupportedModelError: if the architecture asks for what packed attention does not do.
    """
    mux_stream = _required_stream(module, mux_stream)
    refuse_unknown(module, attention_mask, kwargs)
    if mux_stream.calls is not None:
        query, key, value = mux_stream.calls.of_all(module, query, key, value)
    tree = mux_stream.tree if dropout == 0.0 else None
    # Parts of long sequences, learnt prefixes and draws are of all tokens of the stream.
    shared = mux_stream.batch.shared if tree is None else None
    if shared is not None:
        query, key, value = (to_stream(x, shared) for x in (query, key, value))
    if not torch.compiler.is_compiling():  # a compiled pass would be guarded by the count, and compiled anew each time
        mux_stream.stream.num_attention_calls += 1
    causal, parts = getattr(module, "is_causal", True) if is_causal is None else is_causal, mux_stream.parts
    if not causal:
        _refuse_what_is_causal(module, mux_stream, has_window=sliding_window is not None)
    if parts is not None:
        # Keys come here after rotary embedding, so that later parts read them as they are (M §3.5).
        parts.keep(mux_stream.module_names[module], key, value)
    scale: float = query.shape[-1] ** -0.5 if scaling is None else scaling
    if mux_stream.rows is not None:
        name, options = mux_stream.module_names[module], {"window": sliding_window, "softcap": softcap, "sinks": s_aux}
        pair = _with_prefixes(module, key, value, mux_stream)
        out = mux_stream.rows.attend(name, (query, *pair), scaling=scale, **options)
        if out is not None:
            return out, None
    scores = Scores(scaling=scale, is_causal=bool(causal), window=sliding_window, softcap=softcap, sinks=s_aux)
    out = _through_kernels(module, (query, key, value), mux_stream, scores, dropout, tree)
    if parts is not None:
        parts.release_finished(mux_stream.module_names[module])
    out = out if shared is None else to_computed(out, shared)
    return out if mux_stream.calls is None else mux_stream.calls.of_read(out), None


def _required_stream(module: nn.Module, mux_stream: AttentionStream | None) -> AttentionStream:
    if mux_stream is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} does not hand the arguments of the model call on to its attention function, "
            "so its sequences cannot be told apart; allowed: architectures that pass **kwargs through to attention."
        )
    return mux_stream


def _refuse_what_is_causal(module: nn.Module, mux_stream: AttentionStream, *, has_window: bool) -> None:
    """Refuse, of a module that sees later tokens too, what means something for earlier ones alone."""
    refuse_causal_options(module, has_window=has_window, has_parts=mux_stream.parts is not None)
    refuse_prefixes(module, has_prefixes=mux_stream.prefixes is not None)
    refuse_trees(module, has_tree=mux_stream.batch.shared is not None)


def _through_kernels(
    module: nn.Module,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mux_stream: AttentionStream,
    scores: Scores,
    dropout: float,
    tree: TreeLayouts | None,
) -> torch.Tensor:
    """Return the outputs by the library of variable lengths, or else by rectangles; on a GPU it is said why."""
    query, _, value = qkv
    # Asked in every call, as dropout and dtype differ between training, evaluation and autocast.
    dtype = _computed_in(query)
    reason = varlen_support(
        query.device,
        dtype,
        query.shape[-1],
        value_dim=value.shape[-1],
        softcap=scores.softcap,
        dropout=dropout,
        has_sinks=scores.sinks is not None,
    )
    if reason is not None and query.is_cuda:
        warn_once(reason)
    if tree is not None:
        q, k, v = (x[0].transpose(0, 1).to(dtype) for x in qkv)
        return (tree_varlen if reason is None else tree_attention)((q, k, v), tree, scores).unsqueeze(0)
    if reason is None:
        return _through_varlen(module, qkv, mux_stream, scores, dtype)
    return _through_rectangles(module, qkv, mux_stream, scores, dropout)


def _computed_in(query: torch.Tensor) -> torch.dtype:
    """Return the precision in which scaled-dot-product attention would compute, autocast included."""
    device_type = query.device.type
    # Rotary embedding makes queries of fp32 under autocast; float64 is what autocast leaves alone.
    if query.dtype == torch.float64 or not torch.is_autocast_enabled(device_type):
        return query.dtype
    return torch.get_autocast_dtype(device_type)


def _with_prefixes(
    module: nn.Module, key: torch.Tensor, value: torch.Tensor, mux_stream: AttentionStream
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of a stream of whole sequences, each behind its prefix."""
    if mux_stream.prefixes is None:
        return key, value
    lengths = mux_stream.batch.sequence_lengths
    k_GKC, v_GKC, _ = mux_stream.prefixes.before_all(module, key[0], value[0], lengths)
    return k_GKC[None], v_GKC[None]


def _through_varlen(
    module: nn.Module,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mux_stream: AttentionStream,
    scores: Scores,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Attend in one call that knows where each sequence begins, computing in `dtype`; `[1, T, H, C']`."""
    q_THC, k_TGC, v_TGC = (x[0].transpose(0, 1) for x in qkv)
    bounds, longest, keys = mux_stream.batch.cu_seqlens, mux_stream.max_length, None
    k_GKC, v_GKC, num_keys = qkv[1][0], qkv[2][0], mux_stream.batch.sequence_lengths
    if mux_stream.parts is not None:
        layer = mux_stream.module_names[module]
        k_GKC, v_GKC, num_keys = mux_stream.parts.joined_stream(layer, qkv[1], qkv[2], scores.window)
    if mux_stream.prefixes is not None:
        k_GKC, v_GKC, num_keys = mux_stream.prefixes.before_all(module, k_GKC, v_GKC, num_keys)
    if mux_stream.parts is not None or mux_stream.prefixes is not None:
        k_TGC, v_TGC = k_GKC.transpose(0, 1), v_GKC.transpose(0, 1)
        keys = mux_stream.key_bounds(num_keys), max(num_keys)
    # As autocast would cast what scaled-dot-product attention is called with; only now, so that keys and values of
    # parts are kept, and their gradients added up, as the model computes them.
    q_THC, k_TGC, v_TGC = (x if x.dtype is dtype else x.to(dtype) for x in (q_THC, k_TGC, v_TGC))
    options: dict[str, Any] = {"is_causal": scores.is_causal, "window": scores.window, "scaling": scores.scaling}
    return varlen_attention(q_THC, k_TGC, v_TGC, bounds, longest, keys=keys, **options).unsqueeze(0)


def _through_rectangles(
    module: nn.Module,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mux_stream: AttentionStream,
    scores: Scores,
    dropout: float,
) -> torch.Tensor:
    """Attend in one call for each group of sequences of near-equal length; `[1, T, H, C']`."""
    layout = mux_stream.layout(is_causal=scores.is_causal)
    draws = AttentionDropout(mux_stream, module, layout, dropout) if dropout > 0.0 else None
    parts = []
    for rectangle, (q, k, v) in layout.apart([x[0].transpose(0, 1) for x in qkv]):
        if rectangle.sequence is not None and mux_stream.parts is not None:
            layer = mux_stream.module_names[module]
            k_GKC, v_GKC = mux_stream.parts.joined(layer, rectangle.sequence, k[0], v[0], scores.window)
            k, v = k_GKC[None], v_GKC[None]
        if mux_stream.prefixes is not None:
            k, v = mux_stream.prefixes.before(module, rectangle.first, k, v)
        parts.append(attend(q, k, v, scores, None if draws is None else partial(draws, rectangle)))
    return layout.joined(parts).unsqueeze(0)


def register_attention() -> None:
    """Make `packed_attention` known to transformers under `ATTENTION_NAME`; may be called again."""
    from transformers import AttentionInterface

    # No mask function under this name: transformers then makes no mask, and does not search the positions for packed
    # sequences either, which would wait for the device.
    AttentionInterface.register(ATTENTION_NAME, packed_attention)
