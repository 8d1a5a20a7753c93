"""Between the tokens of a stream and the rows that are computed of them, forwards and backwards in a fixed order.

* Rectangles: sequences of a packed stream gathered by near-equal length, for attention without a varlen kernel.
  `attend` computes one of them: by torch's fused attention, or with the weights written out.
* `take_rows`: where sequences have a common prefix, one computed row serves several tokens and gets the sum of
  their gradients.

The queries of a part of a long sequence are the last tokens that its keys belong to, so causality is a triangle moved
to the right::

    part of tokens 4 to 6          keys    0 1 2 3 | 4 5 6
                         query 4           x x x x | x . .
                         query 5           x x x x | x x .
                         query 6           x x x x | x x x

Shape letters: T tokens of the stream, U computed rows, P rows of all rectangles, n sequences of a rectangle, L its
length (or its queries), K keys of each, M chosen tokens, H heads, G key-value heads, C channels of a head, D features.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from peft_mux.data.batch import MuxBatch

LENGTH_STEP = 16
"""Causal rectangles are padded to multiples of this many tokens: few kernel calls, and little of each is padding."""


def copied_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the host on a device, without waiting for the copy."""
    # From pageable memory the host would wait; torch gives pinned memory out again only once the copy is done.
    source = tensor.pin_memory() if device.type == "cuda" else tensor
    return source.to(device, non_blocking=True)


# -------------------------------------------------------------------- rectangles


class Rectangle(NamedTuple):
    """Sequences that one attention call computes together.

    Attributes:
        start: number of its first row among the rows of all rectangles.
        num_sequences: number n of sequences.
        length: number L of tokens that each sequence takes, padding included.
        first: number in the stream of its first sequence; all of them are of one kind, see `build_layout`.
    """

    start: int
    num_sequences: int
    length: int
    first: int = 0

    @property
    def rows(self) -> slice:
        """Its rows among the rows of all rectangles."""
        return slice(self.start, self.start + self.num_sequences * self.length)

    def heads_first(self, x_rows: torch.Tensor) -> torch.Tensor:
        """Return `[n, H, L, C]`, a view of its own rows `[n * L, H, C]`."""
        return x_rows.view(self.num_sequences, self.length, *x_rows.shape[1:]).transpose(1, 2)


class Layout(NamedTuple):
    """How a stream is cut into rectangles.

    Attributes:
        rectangles: the rectangles in the order of their rows.
        num_rows: number P of rows of all rectangles.
        row_of_token: int64 `[T]`, where each token goes.
        row_of_token_on_host: the same numbers on the host, so that nothing has to wait for a device.
        padding_rows: int64 `[P - T]`, the rows without a token.
    """

    rectangles: tuple[Rectangle, ...]
    num_rows: int
    row_of_token: torch.Tensor
    row_of_token_on_host: np.ndarray
    padding_rows: torch.Tensor

    def apart(self, qkv: Sequence[torch.Tensor]) -> Iterator[tuple[Rectangle, list[torch.Tensor]]]:
        """Yield each rectangle with its queries, keys and values `[n, H, L, C]`, from `[T, H, C]` of all tokens."""
        sizes = [rectangle.num_sequences * rectangle.length for rectangle in self.rectangles]
        # Split, as the backward of a slice would fill all rows with zeros, once for each rectangle.
        rows = (ToRows.apply(x, self.row_of_token, self.padding_rows, self.num_rows).split(sizes) for x in qkv)
        for rectangle, parts in zip(self.rectangles, zip(*rows, strict=True), strict=True):
            yield rectangle, [rectangle.heads_first(x) for x in parts]

    def joined(self, outs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return `[T, H, C]` of all tokens from `[n, H, L, C]` of each rectangle; differentiable."""
        rows = [out.transpose(1, 2).reshape(-1, out.shape[1], out.shape[3]) for out in outs]
        out_PHC = torch.cat(rows) if len(rows) > 1 else rows[0]
        return ToTokens.apply(out_PHC, self.row_of_token, self.padding_rows)  # type: ignore[return-value]


def build_layout(
    lengths: Sequence[int],
    length_step: int,
    device: torch.device,
    apart: Sequence[int] = (),
    kinds: Sequence[int | None] = (),
) -> Layout:
    """Cut a stream into rectangles of equal (rounded) length.

    A sequence's rectangle length depends only on its own length, so its arithmetic is the same in any company.

    Args:
        lengths: tokens of each sequence, in stream order.
        length_step: lengths are rounded up to multiples of this many tokens.
        device: where the indices are needed.
        apart: numbers of sequences that get rectangles of their own, without padding.
        kinds: sequences share a rectangle only if they are of equal kind: the numbers of their prefixes
            (`peft_mux.modeling.attention.attention_stream`), or of the keys before them; empty if all may.
    """
    members: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, length in enumerate(lengths):
        if index not in apart:
            kind = kinds[index] if kinds else None
            # The keys of sequences that share a call are equal in number.
            members[-(-length // length_step) * length_step, -1 if kind is None else kind].append(index)
    first_row = np.empty(len(lengths), dtype=np.int64)
    rectangles, start = [], 0
    for (length, _), sequences in sorted(members.items()):
        rectangles.append(Rectangle(start, len(sequences), length, sequences[0]))
        first_row[sequences] = start + length * np.arange(len(sequences))
        start += length * len(sequences)
    # Parts of long sequences have more keys than queries, each its own number of them: no two fit one call.
    for index in apart:
        rectangles.append(Rectangle(start, 1, lengths[index], index))
        first_row[index] = start
        start += lengths[index]
    sizes = np.asarray(lengths, dtype=np.int64)
    stream_start = np.cumsum(sizes) - sizes
    row_of_token = np.repeat(first_row - stream_start, sizes) + np.arange(sizes.sum())
    # The host knows which rows are padding, so no size is read back from a device.
    is_padding = np.ones(start, dtype=bool)
    is_padding[row_of_token] = False
    index, padding = torch.from_numpy(row_of_token), torch.from_numpy(np.flatnonzero(is_padding))
    return Layout(tuple(rectangles), start, copied_to(index, device), row_of_token, copied_to(padding, device))


class ToRows(torch.autograd.Function):
    """`[T, ...] -> [P, ...]`: each token to its row, padding rows zero."""

    @staticmethod
    def forward(
        ctx: Any, x_T: torch.Tensor, row_of_token: torch.Tensor, padding_rows: torch.Tensor, num_rows: int
    ) -> torch.Tensor:
        """Return `[P, ...]`."""
        ctx.save_for_backward(row_of_token)
        return _spread(x_T, row_of_token, padding_rows, num_rows)

    @staticmethod
    def backward(ctx: Any, grad_P: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradient `[T, ...]`."""
        return grad_P.index_select(0, ctx.saved_tensors[0]), None, None, None


class ToTokens(torch.autograd.Function):
    """`[P, ...] -> [T, ...]`: the inverse of `ToRows`.

    No row goes to two tokens, so the backward is a copy, where autograd would take a sum by index.
    """

    @staticmethod
    def forward(ctx: Any, x_P: torch.Tensor, row_of_token: torch.Tensor, padding_rows: torch.Tensor) -> torch.Tensor:
        """Return `[T, ...]`."""
        ctx.save_for_backward(row_of_token, padding_rows)
        ctx.num_rows = len(x_P)
        return x_P.index_select(0, row_of_token)

    @staticmethod
    def backward(ctx: Any, grad_T: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradient `[P, ...]`."""
        row_of_token, padding_rows = ctx.saved_tensors
        return _spread(grad_T, row_of_token, padding_rows, ctx.num_rows), None, None


def _spread(x_T: torch.Tensor, row_of_token: torch.Tensor, padding_rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """Return `[P, ...]` with the tokens in their rows and zeros in the padding, which must be finite: 0 * NaN = NaN."""
    # Not zeroed throughout: tokens fill all rows but those of the padding.
    x_P = x_T.new_empty(num_rows, *x_T.shape[1:]).index_copy_(0, row_of_token, x_T)
    return x_P.index_fill_(0, padding_rows, 0.0)


class Apart(torch.autograd.Function):
    """`[T, ...] -> [T, ...], [M, ...]`: all tokens, and those of long rows, whose gradients come by the latter."""

    @staticmethod
    def forward(ctx: Any, x_T: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens themselves, and a copy of some."""
        ctx.save_for_backward(tokens)
        return x_T.view_as(x_T), x_T.index_select(0, tokens)

    @staticmethod
    def backward(ctx: Any, grad_T: torch.Tensor, grad_M: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradient `[T, ...]`: the first one, in place, as the kernel that made it does not need it."""
        return grad_T.index_copy_(0, ctx.saved_tensors[0], grad_M), None


class Joined(torch.autograd.Function):
    """`[T, ...], [M, ...] -> [T, ...]`: the inverse of `Apart`, in place."""

    @staticmethod
    def forward(ctx: Any, x_T: torch.Tensor, x_M: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Overwrite some tokens."""
        ctx.save_for_backward(tokens)
        ctx.mark_dirty(x_T)
        return x_T.index_copy_(0, tokens, x_M)

    @staticmethod
    def backward(ctx: Any, grad_T: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradients of both; of the first, those of other tokens count."""
        return grad_T, grad_T.index_select(0, ctx.saved_tensors[0]), None


# ---------------------------------------------------- attention in a rectangle

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""Queries, keys and values."""


class Scores(NamedTuple):
    """Changes to scores before their softmax; `window` counts the query itself, `sinks` is `[H]`."""

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


# ----------------------------------------------------------------- shared rows


class _TakeRows(torch.autograd.Function):
    """`[U, ...] -> [M, ...]`, any row any number of times."""

    @staticmethod
    def forward(ctx: Any, x_U: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return `[M, ...]`."""
        ctx.save_for_backward(rows)
        ctx.shape = x_U.shape
        return x_U.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, grad_M: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradient `[U, ...]`."""
        (rows,) = ctx.saved_tensors
        # In fp32, as a row of a long prefix adds up those of many sequences.
        grad = grad_M.float() if grad_M.dtype in (torch.bfloat16, torch.float16) else grad_M
        total_U = grad.new_zeros(ctx.shape)
        if grad.is_cuda:
            # Sorts by row there, so that sums have one order; `index_add_` adds as threads come.
            total_U.index_put_((rows,), grad, accumulate=True)
        else:
            total_U.index_add_(0, rows, grad)
        return total_U.to(grad_M.dtype), None


def take_rows(x_U: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return rows `[M, ...]` of `[U, ...]`, any row any number of times; gradients are added in a fixed order."""
    taken: torch.Tensor = _TakeRows.apply(x_U, rows)  # type: ignore[assignment]
    return taken


def states_of(hidden_UD: torch.Tensor, batch: MuxBatch, tokens: torch.Tensor) -> torch.Tensor:
    """Return the hidden states `[M, D]` of tokens of a stream.

    Args:
        hidden_UD: the last hidden states `[U, D]` of the computed rows, all tokens where none is shared.
        batch: the micro-batch.
        tokens: int64 `[M]`, numbers of tokens of the stream.
    """
    if batch.shared is None:
        return hidden_UD.index_select(0, tokens)
    return take_rows(hidden_UD, batch.rows_of(tokens))
