"""What packed attention does not do, refused by name where an architecture asks for it."""

# MERGED: Dropout of attention weights, with draws that neighbours and packing never shift.
# MERGED: Shape letters: n sequences of a rectangle, L its length, K keys of a part, H heads.
# MERGED: Attention over a packed stream, through transformers' attention interface.
# MERGED: Each sequence attends to itself alone. On CUDA that is one call, where `varlen` has a kernel for it. Elsewhere
# MERGED: sequences are gathered into rectangles of near-equal length, and one scaled-dot-product call is made per
# MERGED: rectangle: no
# MERGED: dense T x T mask, and no sequence shares arithmetic with another (a masked NaN is still NaN: 0 * NaN), so a
# MERGED: poisoned
# MERGED: sequence harms nobody.
# MERGED: Where sequences begin alike, queries, keys and values are those of the computed rows, and each node of the
# MERGED: prefix tree
# MERGED: attends to the keys from the root on (`prefix_tree`).
# MERGED: Parts of long sequences (`parts`) are computed one by one, as each has a number of keys of its own.
# MERGED: Causal sequences are padded at their end to a multiple of 16 tokens, which needs no mask: a padded key comes
# MERGED: after
# MERGED: every real query. Where every token sees every other (encoders), rectangles hold equal lengths and nothing
# MERGED: is padded.
# MERGED: Shape letters: T tokens, U computed rows, P rows of all rectangles, n sequences of a rectangle, L its
# MERGED: length, H heads, G
# MERGED: key-value heads, C channels of a head.

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from peft_mux.errors import UnsupportedModelError
from peft_mux.kernels import philox
from peft_mux.modeling.attention.attention_stream import AttentionStream
from peft_mux.modeling.attention.prefix_tree import TreeLayouts, tree_attention, tree_varlen
from peft_mux.modeling.attention.rows import LENGTH_STEP, Layout, Rectangle, to_computed, to_stream
from peft_mux.modeling.attention.scores import Scores, attend
from peft_mux.modeling.attention.varlen import varlen_attention, varlen_support, warn_once

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


class AttentionDropout:
    """Dropout of attention weights whose draws depend on the query's place, the head and the key only.

    Heads count as those of the whole model, also where a shard of it has some of them (`head_window`).

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
        batch, stream = attention.batch, attention.stream
        self.places = batch.token_places.new_zeros(layout.num_rows)
        # Draws follow a token's place in its task's batch, so that neighbours and packing never shift them.
        self.places.index_copy_(0, layout.row_of_token, batch.token_places)
        # On the host, which knows the segments: reading them off the device would wait.
        owner = np.full(batch.num_tokens, -1)
        for index, segment in enumerate(stream.segments):
            owner[segment.start : segment.end] = index
        self.segments = stream.segments
        self.parts, self.prefixes = attention.parts, attention.prefixes
        self.owner_of_row = np.full(layout.num_rows, -1)
        self.owner_of_row[layout.row_of_token_on_host] = owner

    def __call__(self, rectangle: Rectangle, weights_nHLL: torch.Tensor) -> torch.Tensor:
        """Return the weights of a rectangle after dropout.

        Args:
            rectangle: one of the layout's.
            weights_nHLL: its attention weights; `[1, H, L, K]` where it is a part of a longer sequence.
        """
        if rectangle.sequence is not None:
            return self._dropped_part(weights_nHLL[0], rectangle)[None]
        owners = self.owner_of_row[rectangle.rows].reshape(rectangle.num_sequences, rectangle.length)[:, 0]
        places = self.places[rectangle.rows].view(rectangle.num_sequences, rectangle.length)
        parts = []
        for sequence, owner in enumerate(owners):
            weights_HLL = weights_nHLL[sequence]
            seed = self.segments[owner].draw_seed(self.name)
            # Draws are by place and column, so a row is a query and its columns are the keys of one head after another.
            by_query = weights_HLL.transpose(0, 1).reshape(rectangle.length, -1)
            window = self._window(weights_HLL.shape[-1])
            dropped = philox.dropout(by_query, places[sequence], self.probability, seed, window)
            parts.append(dropped.view(rectangle.length, weights_HLL.shape[0], -1).transpose(0, 1))
        return torch.stack(parts)

    def _dropped_part(self, weights_HLK: torch.Tensor, rectangle: Rectangle) -> torch.Tensor:
        """Return `[H, L, K]` with the draws that the whole sequence would have for these queries and keys."""
        # A draw is numbered by query, head and key within the padded width of the whole sequence, so draws of all keys
        # are made, and those of the keys at hand taken.
        assert self.parts is not None, "only parts have rectangles of their own"
        part = self.parts.of_sequence[rectangle.sequence or 0]
        num_heads, _, num_keys = weights_HLK.shape
        before = 0 if self.prefixes is None else self.prefixes.num_keys(rectangle.first)
        width = before + -(-part.num_tokens // LENGTH_STEP) * LENGTH_STEP
        seed = self.segments[self.owner_of_row[rectangle.start]].draw_seed(self.name)
        places, window = self.places[rectangle.rows], self._window(width)
        kept = philox.keep_mask(seed, places, num_heads * width, self.probability, window)
        last = before + part.end
        kept_HLK = kept.view(-1, num_heads, width)[:, :, last - num_keys : last].transpose(0, 1)
        return torch.where(kept_HLK, weights_HLK * philox.keep_scale(self.probability), 0.0)

    def _window(self, width: int) -> philox.Window | None:
        """Return where the draws of these heads lie among those of all, which have `width` of them each."""
        return None if self.heads is None else philox.Window(self.heads.first * width, self.heads.num_columns * width)


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
