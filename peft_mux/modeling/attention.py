"""Attention over a packed stream, through transformers' attention interface.

Each sequence attends to itself alone. On CUDA that is one call, where `varlen` has a kernel for it. Elsewhere
sequences are gathered into rectangles of near-equal length, and one scaled-dot-product call is made per rectangle: no
dense T x T mask, and no sequence shares arithmetic with another (a masked NaN is still NaN: 0 * NaN), so a poisoned
sequence harms nobody.

Causal sequences are padded at their end to a multiple of 16 tokens, which needs no mask: a padded key comes after
every real query. Where every token sees every other (encoders), rectangles hold equal lengths and nothing is padded.

Shape letters: T tokens, P rows of all rectangles, n sequences of a rectangle, L its length, H heads, G key-value
heads, C channels of a head.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from peft_mux.data.batch import MuxBatch
from peft_mux.errors import UnsupportedModelError
from peft_mux.kernels import philox
from peft_mux.modeling.stream import Stream
from peft_mux.modeling.varlen import say_once, varlen_attention, varlen_support

ATTENTION_NAME = "peft_mux"
_LENGTH_STEP = 16
_HARMLESS_TENSORS = frozenset({"position_ids", "cache_position", "cu_seq_lens_q", "cu_seq_lens_k"})


class Rectangle(NamedTuple):
    """Sequences that one attention call computes together.

    Attributes:
        start: first of its rows among the rows of all rectangles.
        num_sequences: n.
        length: L, padding included.
    """

    start: int
    num_sequences: int
    length: int

    @property
    def rows(self) -> slice:
        """Its rows among the rows of all rectangles."""
        return slice(self.start, self.start + self.num_sequences * self.length)


class Layout(NamedTuple):
    """How a stream is cut into rectangles.

    Attributes:
        rectangles: in the order of their rows.
        num_rows: P.
        row_of_token: int64 `[T]`, where each token goes.
        row_of_token_on_host: the same.
        padding_rows: int64 `[P - T]`, the rows where none goes.
    """

    rectangles: tuple[Rectangle, ...]
    num_rows: int
    row_of_token: torch.Tensor
    row_of_token_on_host: np.ndarray
    padding_rows: torch.Tensor


class AttentionStream:
    """Carries the stream and its layouts into the attention function, as an argument of the model call.

    Layouts are built once per micro-batch and shared by all layers.
    """

    def __init__(self, stream: Stream, batch: MuxBatch, module_names: dict[nn.Module, str]) -> None:
        """Bind a micro-batch.

        Args:
            stream: of the model, counts the calls.
            batch: the micro-batch in flight.
            module_names: name of every attention module, for dropout draws and messages.
        """
        self.stream = stream
        self.batch = batch
        self.module_names = module_names
        self.max_length = max(batch.sequence_lengths, default=0)
        self._layouts: dict[bool, Layout] = {}

    def layout(self, *, is_causal: bool) -> Layout:
        """Return the rectangles for causal or full attention."""
        if is_causal not in self._layouts:
            step = _LENGTH_STEP if is_causal else 1
            device = self.batch.input_ids.device
            self._layouts[is_causal] = build_layout(self.batch.sequence_lengths, step, device)
        return self._layouts[is_causal]


def build_layout(lengths: tuple[int, ...], length_step: int, device: torch.device) -> Layout:
    """Cut a stream into rectangles of equal (rounded) length.

    A sequence's rectangle length depends on its own length only, so its arithmetic is the same in any company.

    Args:
        lengths: of the sequences, in stream order.
        length_step: lengths are rounded up to multiples of this.
        device: of the index.
    """
    members: dict[int, list[int]] = defaultdict(list)
    for index, length in enumerate(lengths):
        members[-(-length // length_step) * length_step].append(index)
    first_row = np.empty(len(lengths), dtype=np.int64)
    rectangles, start = [], 0
    for length, sequences in sorted(members.items()):
        rectangles.append(Rectangle(start, len(sequences), length))
        first_row[sequences] = start + length * np.arange(len(sequences))
        start += length * len(sequences)
    sizes = np.asarray(lengths, dtype=np.int64)
    stream_start = np.cumsum(sizes) - sizes
    row_of_token = np.repeat(first_row - stream_start, sizes) + np.arange(sizes.sum())
    is_padding = np.ones(start, dtype=bool)
    is_padding[row_of_token] = False
    index, padding = torch.from_numpy(row_of_token), torch.from_numpy(np.flatnonzero(is_padding))
    return Layout(tuple(rectangles), start, index.to(device), row_of_token, padding.to(device))


class _ToRows(torch.autograd.Function):
    """`[T, ...] -> [P, ...]`: each token to its row, padding rows zero."""

    @staticmethod
    def forward(
        ctx: Any, x_T: torch.Tensor, row_of_token: torch.Tensor, padding_rows: torch.Tensor, num_rows: int
    ) -> torch.Tensor:
        ctx.save_for_backward(row_of_token)
        return _spread(x_T, row_of_token, padding_rows, num_rows)

    @staticmethod
    def backward(ctx: Any, grad_P: torch.Tensor) -> tuple[Any, ...]:
        return grad_P.index_select(0, ctx.saved_tensors[0]), None, None, None


class _ToTokens(torch.autograd.Function):
    """`[P, ...] -> [T, ...]`: the inverse of `_ToRows`."""

    @staticmethod
    def forward(ctx: Any, x_P: torch.Tensor, row_of_token: torch.Tensor, padding_rows: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(row_of_token, padding_rows)
        ctx.num_rows = len(x_P)
        return x_P.index_select(0, row_of_token)

    @staticmethod
    def backward(ctx: Any, grad_T: torch.Tensor) -> tuple[Any, ...]:
        row_of_token, padding_rows = ctx.saved_tensors
        return _spread(grad_T, row_of_token, padding_rows, ctx.num_rows), None, None


def _spread(x_T: torch.Tensor, row_of_token: torch.Tensor, padding_rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return `[P, ...]` with the tokens in their rows and zeros in the padding, which must be finite: 0 * NaN = NaN."""
    x_P = x_T.new_empty(num_rows, *x_T.shape[1:]).index_copy_(0, row_of_token, x_T)
    return x_P.index_fill_(0, padding_rows, 0.0)


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
    mux_stream: AttentionStream | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within each sequence of the stream; the function that transformers' models call.

    Args:
        module: the attention module.
        query: `[1, H, T, C]`.
        key: `[1, G, T, C]`, G dividing H.
        value: `[1, G, T, C']`.
        attention_mask: must be `None`.
        scaling: of the scores; by default `1 / sqrt(C)`.
        dropout: of the attention weights.
        is_causal: by default the module's own `is_causal`.
        sliding_window: a query sees this many tokens, itself included.
        softcap: bound of the scores (Gemma 2).
        mux_stream: given by `MultiTaskPeftModel`.
        **kwargs: what else the architecture passes; refused where it would change the result.

    Returns:
        `[1, T, H, C']` and no weights.

    Raises:
        UnsupportedModelError: if the architecture asks for what packed attention does not do.
    """
    if mux_stream is None:
        raise UnsupportedModelError(
            f"{type(module).__name__} does not hand the arguments of the model call on to its attention function, "
            "so its sequences cannot be told apart; allowed: architectures that pass **kwargs through to attention."
        )
    _refuse_unknown(module, attention_mask, kwargs)
    if not torch.compiler.is_compiling():
        mux_stream.stream.num_attention_calls += 1
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if sliding_window is not None and not causal:
        raise UnsupportedModelError(
            f"{type(module).__name__} slides a window over both directions; allowed: windows of causal attention."
        )
    scale: float = query.shape[-1] ** -0.5 if scaling is None else scaling
    reason = varlen_support(
        query.device, query.dtype, query.shape[-1], value_dim=value.shape[-1], softcap=softcap, dropout=dropout
    )
    if reason is None:
        return _through_varlen(query, key, value, mux_stream, scale, bool(causal), sliding_window), None
    if query.is_cuda:
        say_once(reason)
    scores = _Scores(scaling=scale, is_causal=bool(causal), window=sliding_window, softcap=softcap)
    return _through_rectangles(module, (query, key, value), mux_stream, scores, dropout), None


def _through_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mux_stream: AttentionStream,
    scaling: float,
    is_causal: bool,
    window: int | None,
) -> torch.Tensor:
    """Attend in one call that knows where each sequence begins; `[1, T, H, C']`."""
    q_THC, k_TGC, v_TGC = (x[0].transpose(0, 1) for x in (query, key, value))
    bounds, longest = mux_stream.batch.cu_seqlens, mux_stream.max_length
    out_THC = varlen_attention(
        q_THC, k_TGC, v_TGC, bounds, longest, is_causal=is_causal, window=window, scaling=scaling
    )
    return out_THC.unsqueeze(0)


def _through_rectangles(
    module: nn.Module,
    qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    mux_stream: AttentionStream,
    scores: _Scores,
    dropout: float,
) -> torch.Tensor:
    """Attend in one call for each group of sequences of near-equal length; `[1, T, H, C']`."""
    layout = mux_stream.layout(is_causal=scores.is_causal)
    q_PHC, k_PGC, v_PGC = (
        _ToRows.apply(x[0].transpose(0, 1), layout.row_of_token, layout.padding_rows, layout.num_rows) for x in qkv
    )
    draws = _AttentionDropout(mux_stream, module, layout, dropout) if dropout > 0.0 else None
    parts = []
    for rectangle in layout.rectangles:
        q, k, v = (_heads_first(x[rectangle.rows], rectangle) for x in (q_PHC, k_PGC, v_PGC))
        parts.append(_attend(rectangle, q, k, v, scores, draws))
    out_PHC = torch.cat(parts) if len(parts) > 1 else parts[0]
    return _ToTokens.apply(out_PHC, layout.row_of_token, layout.padding_rows).unsqueeze(0)


class _Scores(NamedTuple):
    scaling: float
    is_causal: bool
    window: int | None
    softcap: float | None

    def mask(self, length: int, device: torch.device) -> torch.Tensor | None:
        """Return bool `[L, L]`, true where a query sees a key, or `None` where plain causality says it all."""
        if self.window is None or length <= self.window:
            return None
        rows = torch.arange(length, device=device)
        distance = rows[:, None] - rows[None, :]
        return (distance >= 0) & (distance < self.window)


class _AttentionDropout:
    """Dropout of attention weights whose draws depend on the query's place, the head and the key only."""

    def __init__(self, attention: AttentionStream, module: nn.Module, layout: Layout, probability: float) -> None:
        self.probability = probability
        self.name = attention.module_names[module]
        batch, stream = attention.batch, attention.stream
        self.places = batch.token_places.new_zeros(layout.num_rows)
        self.places.index_copy_(0, layout.row_of_token, batch.token_places)
        owner = np.full(batch.num_tokens, -1)
        for index, segment in enumerate(stream.segments):
            owner[segment.start : segment.end] = index
        self.segments = stream.segments
        self.owner_of_row = np.full(layout.num_rows, -1)
        self.owner_of_row[layout.row_of_token_on_host] = owner

    def __call__(self, weights_nHLL: torch.Tensor, rectangle: Rectangle) -> torch.Tensor:
        owners = self.owner_of_row[rectangle.rows].reshape(rectangle.num_sequences, rectangle.length)[:, 0]
        places = self.places[rectangle.rows].view(rectangle.num_sequences, rectangle.length)
        parts = []
        for sequence, owner in enumerate(owners):
            weights_HLL = weights_nHLL[sequence]
            seed = self.segments[owner].draw_seed(self.name)
            by_query = weights_HLL.transpose(0, 1).reshape(rectangle.length, -1)
            dropped = philox.dropout(by_query, places[sequence], self.probability, seed)
            parts.append(dropped.view(rectangle.length, weights_HLL.shape[0], -1).transpose(0, 1))
        return torch.stack(parts)


def _heads_first(x_rows: torch.Tensor, rectangle: Rectangle) -> torch.Tensor:
    """`[n * L, H, C] -> [n, H, L, C]` as a view."""
    return x_rows.view(rectangle.num_sequences, rectangle.length, *x_rows.shape[1:]).transpose(1, 2)


def _attend(
    rectangle: Rectangle,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scores: _Scores,
    dropout: _AttentionDropout | None,
) -> torch.Tensor:
    """Return `[n * L, H, C']` of one rectangle."""
    mask = scores.mask(rectangle.length, q.device)
    if scores.softcap is None and dropout is None:
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            is_causal=scores.is_causal and mask is None,
            scale=scores.scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
    else:
        out = _attend_by_weights(rectangle, q, k, v, scores, mask, dropout)
    return out.transpose(1, 2).reshape(-1, out.shape[1], out.shape[3])


def _attend_by_weights(
    rectangle: Rectangle,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    scores: _Scores,
    mask: torch.Tensor | None,
    dropout: _AttentionDropout | None,
) -> torch.Tensor:
    """The same with the weights written out, for what fused attention cannot do: soft-caps and our dropout."""
    groups = q.shape[1] // k.shape[1]
    if groups > 1:
        k, v = k.repeat_interleave(groups, dim=1), v.repeat_interleave(groups, dim=1)
    logits = (q @ k.transpose(-1, -2)) * scores.scaling
    if scores.softcap is not None:
        logits = scores.softcap * torch.tanh(logits / scores.softcap)
    if mask is None and scores.is_causal:
        mask = torch.ones(rectangle.length, rectangle.length, dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        logits = logits.masked_fill(~mask, -math.inf)
    weights = torch.softmax(logits, dim=-1, dtype=torch.float32).to(q.dtype)
    if dropout is not None:
        weights = dropout(weights, rectangle)
    return weights @ v


def _refuse_unknown(module: nn.Module, attention_mask: torch.Tensor | None, kwargs: dict[str, Any]) -> None:
    name = type(module).__name__
    if attention_mask is not None:
        raise UnsupportedModelError(
            f"{name} builds an attention mask of its own; allowed: none, as a mask over the stream would mix tasks."
        )
    for key, value in kwargs.items():
        if isinstance(value, torch.Tensor) and key not in _HARMLESS_TENSORS:
            raise UnsupportedModelError(
                f'{name} passes "{key}" to attention (sinks, position biases and the like), which packed attention '
                "does not honour; allowed: plain, grouped-query, sliding-window and soft-capped attention."
            )


def register() -> None:
    """Make `packed_attention` known to transformers under `ATTENTION_NAME`; may be called again."""
    from transformers import AttentionInterface

    # No mask function under this name: transformers then makes no mask, and does not search the positions for packed
    # sequences either, which would wait for the device.
    AttentionInterface.register(ATTENTION_NAME, packed_attention)
