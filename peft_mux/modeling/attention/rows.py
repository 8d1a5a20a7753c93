"""Keys and values of rows that are completed token by token, between the passes that attend to them.

Prompts come as one packed stream, and attend as any stream does; what their tokens leave is laid out by row, shorter
rows behind zeros. After that every pass brings one token of each row, which attends to its own row alone. Rows share a
call but no arithmetic, so a row with NaN harms no other.

Shape letters: B rows, T tokens of all prompts, L columns (tokens of the longest row so far), H heads, G key-value
heads, C channels of a head.
"""

# MERGED: `ReadRows`: the rows whose last hidden states a head reads, and attention of a layer that computes these
# MERGED: alone.
# MERGED: Keys and values are of all rows, as those that are read see the others.
# MERGED: Shape letters: U computed rows, R rows that are read, H heads, G key-value heads, C channels of a head.
# MERGED: Rectangles: sequences of a packed stream gathered by near-equal length, for attention without a varlen kernel.
# MERGED: Shape letters: T tokens, P rows of all rectangles, n sequences of a rectangle, L its length, H heads, C
# MERGED: channels.
# MERGED: Between the tokens of a stream and the rows that are computed of them, where sequences begin alike.
# MERGED: A row that stands for several tokens gets the sum of their gradients, in a fixed order.
# MERGED: Shape letters: T tokens of the stream, U computed rows, M chosen tokens, H heads, C channels of a head, D
# MERGED: features.

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn import functional as F

from peft_mux.data.batch import MuxBatch, SharedRows

_GROWTH = 64
"""Columns by which memory grows at a time, so that a pass writes in place and copies nothing."""


class KeyValueRows:
    """Keeps the keys and values of every layer, by row.

    Args:
        lengths: how many tokens of each row come in the packed stream, in which rows follow one another.
        device: where keys and values are.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        """Keep nothing yet."""
        self._num_columns = max(lengths)
        columns = torch.arange(self._num_columns, device=device)
        self._first_B = self._num_columns - torch.tensor(list(lengths), device=device)
        self._is_padded = len(set(lengths)) > 1
        # Row by row, which is the order of the stream.
        self._places = (columns >= self._first_B[:, None]).nonzero(as_tuple=True)
        self._is_reading = True
        self._layers: dict[str, list[torch.Tensor]] = {}
        self._masks: dict[int | None, torch.Tensor | None] = {}

    def next_column(self) -> None:
        """Expect one token of every row in the next pass."""
        self._is_reading = False
        self._num_columns += 1
        self._masks.clear()

    def select(self, rows: Sequence[int]) -> None:
        """Keep some of the rows, and forget the others.

        Args:
            rows: numbers of the rows that stay, in their order from now on.
        """
        numbers = torch.tensor(list(rows), device=self._first_B.device)
        self._first_B = self._first_B[numbers]
        self._layers = {name: [x[numbers] for x in kept] for name, kept in self._layers.items()}

    def attend(
        self,
        layer: str,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        *,
        scaling: float,
        window: int | None,
        softcap: float | None,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor | None:
        """Keep the keys and values of a pass, and return what its queries attend to; `None` while prompts are read.

        Args:
            layer: name of the attention module.
            qkv: queries `[1, H, B, C]`, keys and values `[1, G, B, C]`; of prompts T in place of B.
            scaling: factor of the scores.
            window: a query sees this many tokens, itself included; `None` for all before it.
            softcap: bound of the scores; `None` for none.
            sinks: `[H]`, a score of each head that takes part in the softmax and leads to no value; `None` for none.

        Returns:
            Outputs `[1, B, H, C]`.
        """
        query, key, value = qkv
        if self._is_reading:
            self._layers[layer] = [self._by_row(key), self._by_row(value)]
            return None
        k_BGLC, v_BGLC = self._appended(layer, key[0].transpose(0, 1), value[0].transpose(0, 1))
        q_BH1C = query[0].transpose(0, 1)[:, :, None]
        mask = self._mask(window)
        if softcap is None and sinks is None:
            is_grouped = q_BH1C.shape[1] != k_BGLC.shape[1]
            out = F.scaled_dot_product_attention(
                q_BH1C, k_BGLC, v_BGLC, attn_mask=mask, scale=scaling, enable_gqa=is_grouped
            )
        else:
            out = _attend_by_weights(q_BH1C, k_BGLC, v_BGLC, mask, scaling, softcap, sinks)
        return out[:, :, 0][None]

    def _by_row(self, x_1GTC: torch.Tensor) -> torch.Tensor:
        """Return `[B, G, L + room, C]` of a stream's keys or values."""
        x_TGC = x_1GTC[0].transpose(0, 1)
        x_BLGC = x_TGC.new_zeros(len(self._first_B), self._num_columns + _GROWTH, *x_TGC.shape[1:])
        x_BLGC[self._places] = x_TGC
        return x_BLGC.transpose(1, 2).contiguous()

    def _appended(self, layer: str, *new: torch.Tensor) -> list[torch.Tensor]:
        """Write the `[B, G, C]` keys and values of each row's newest token; return `[B, G, L, C]`, those of all."""
        last = self._num_columns - 1
        kept = self._layers[layer]
        if kept[0].shape[2] <= last:
            kept = [torch.cat([x, x.new_zeros(*x.shape[:2], _GROWTH, x.shape[3])], dim=2) for x in kept]
        for x, newest in zip(kept, new, strict=True):
            x[:, :, last] = newest
        self._layers[layer] = kept
        return [x[:, :, : self._num_columns] for x in kept]

    def _mask(self, window: int | None) -> torch.Tensor | None:
        """Return which columns each row sees, `[B, 1, 1, L]`; `None` where it is all of them. Layers share it."""
        if window not in self._masks:
            begin = 0 if window is None else max(self._num_columns - window, 0)
            mask = None
            if self._is_padded or begin > 0:
                columns = torch.arange(self._num_columns, device=self._first_B.device)
                mask = (columns >= self._first_B.clamp(min=begin)[:, None])[:, None, None]
            self._masks[window] = mask
        return self._masks[window]


def _attend_by_weights(
    q_BH1C: torch.Tensor,
    k_BGLC: torch.Tensor,
    v_BGLC: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Return `[B, H, 1, C]` with the weights written out: fused attention knows no soft-caps and no sinks."""
    groups = q_BH1C.shape[1] // k_BGLC.shape[1]
    k_BHLC, v_BHLC = (x.repeat_interleave(groups, dim=1) for x in (k_BGLC, v_BGLC))
    scores = (q_BH1C @ k_BHLC.transpose(-1, -2)) * scaling
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    if sinks is not None:
        of_rows = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, of_rows], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(q_BH1C.dtype)
    return weights[..., : v_BHLC.shape[2]] @ v_BHLC


QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class ReadRows(NamedTuple):
    """Rows of the activations whose last hidden states are read.

    Attributes:
        rows: int64 `[R]`, their numbers among the U computed rows, ascending.
        offsets: where each task's rows begin among them, `N + 1` numbers.
    """

    rows: torch.Tensor
    offsets: tuple[int, ...]


def rows_of_targets(batch: MuxBatch) -> ReadRows:
    """Return the rows that predict something."""
    if batch.shared is None:
        return ReadRows(batch.target_rows, batch.target_offsets)
    return ReadRows(batch.shared.target_rows, batch.shared.target_offsets)


def nothing() -> None:
    """Do nothing."""


class KeysReady(Exception):
    """Ends a layer's first call: its keys and values are there."""


class LayerCalls:
    """What attention does in the two calls of a layer: first the keys of all rows, then the queries of those read.

    Args:
        rows: int64 `[R]`, numbers of the rows that are read.
        has_own_queries: whether queries are computed in the second call, of the rows that are read; otherwise one
            projection makes queries, keys and values, in the first.

    Attributes:
        attention: the module that attended in the first call; `None` before it.
        reached: what is done when the second call asks for attention; nothing by default.
    """

    def __init__(self, rows: torch.Tensor, *, has_own_queries: bool) -> None:
        """Expect the first call."""
        self.attention: Any = None
        self.reached: Callable[[], object] = nothing
        self._rows, self._has_own_queries = rows, has_own_queries
        self._of_all: QKV | None = None

    def of_all(self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> QKV:
        """Return queries `[1, H, U, C]`, keys and values `[1, G, U, C]` of all rows, in the second call.

        Queries of rows that are not read may be zeros: nobody reads what they attend to, and no gradient comes from it.

        Args:
            module: the attention module.
            query: those of the rows of this call.
            key: those of the rows of this call; in the second one of no meaning, as `value`.
            value: as `key`.

        Raises:
            KeysReady: in the first call.
        """
        if self._of_all is None:
            self.attention, self._of_all = module, (query, key, value)
            raise KeysReady
        self.reached()
        all_queries, keys, values = self._of_all
        if not self._has_own_queries:
            return all_queries, keys, values
        shape = (*query.shape[:2], keys.shape[2], query.shape[3])
        return query.new_zeros(shape).index_copy(2, self._rows, query), keys, values

    def of_read(self, out_1UHC: torch.Tensor) -> torch.Tensor:
        """Return the outputs `[1, R, H, C]` of the rows that are read."""
        return out_1UHC.index_select(1, self._rows)


LENGTH_STEP = 16
"""Causal rectangles are padded to multiples of this many tokens: few kernel calls, and little of each is padding."""


class Rectangle(NamedTuple):
    """Sequences that one attention call computes together.

    Attributes:
        start: number of its first row among the rows of all rectangles.
        num_sequences: number n of sequences.
        length: number L of tokens that each sequence takes, padding included.
        sequence: number in the stream of the one sequence that is a part of a longer one; else `None`.
        first: number in the stream of its first sequence; all of them are of one kind, see `build_layout`.
    """

    start: int
    num_sequences: int
    length: int
    sequence: int | None = None
    first: int = 0

    @property
    def rows(self) -> slice:
        """Its rows among the rows of all rectangles."""
        return slice(self.start, self.start + self.num_sequences * self.length)


class Layout(NamedTuple):
    """How a stream is cut into rectangles.

    Attributes:
        rectangles: the rectangles in the order of their rows.
        num_rows: number P of rows of all rectangles.
        row_of_token: int64 `[T]`, where each token goes.
        row_of_token_on_host: the same numbers on the host, so that nothing has to wait for a device.
        padding_rows: int64 `[P - T]`, the rows where none goes.
    """

    rectangles: tuple[Rectangle, ...]
    num_rows: int
    row_of_token: torch.Tensor
    row_of_token_on_host: np.ndarray
    padding_rows: torch.Tensor

    def apart(self, qkv: Sequence[torch.Tensor]) -> Iterator[tuple[Rectangle, list[torch.Tensor]]]:
        """Yield each rectangle with its queries, keys and values, `[n, H, L, C]`; differentiable.

        Args:
            qkv: those of all tokens, `[T, H, C]` each.
        """
        sizes = [rectangle.num_sequences * rectangle.length for rectangle in self.rectangles]
        # Split, as the backward of a slice would fill all rows with zeros, for each rectangle anew.
        rows = (ToRows.apply(x, self.row_of_token, self.padding_rows, self.num_rows).split(sizes) for x in qkv)
        for rectangle, own in zip(self.rectangles, zip(*rows, strict=True), strict=True):
            yield rectangle, [heads_first(x, rectangle) for x in own]

    def joined(self, outs: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return `[T, H, C]` of all tokens from `[n * L, H, C]` of each rectangle; differentiable."""
        out_PHC = torch.cat(list(outs)) if len(outs) > 1 else outs[0]
        return ToTokens.apply(out_PHC, self.row_of_token, self.padding_rows)  # type: ignore[return-value]


def build_layout(
    lengths: tuple[int, ...],
    length_step: int,
    device: torch.device,
    apart: tuple[int, ...] = (),
    kinds: tuple[int | None, ...] = (),
) -> Layout:
    """Cut a stream into rectangles of equal (rounded) length.

    A sequence's rectangle length depends on its own length only, so its arithmetic is the same in any company.

    Args:
        lengths: tokens of each sequence, in stream order.
        length_step: lengths are rounded up to multiples of this many tokens.
        device: where the indices are needed.
        apart: numbers of sequences that get rectangles of their own, without padding.
        kinds: which sequences may share a rectangle, those of equal kind: the numbers of their prefixes
            (`peft_mux.modeling.attention.attention_stream`), or of the keys before them; empty where all may.
    """
    members: dict[tuple[int, int], list[int]] = defaultdict(list)
    for index, length in enumerate(lengths):
        if index not in apart:
            kind = kinds[index] if kinds else None
            # Keys of sequences that share a call have to be alike in number.
            members[-(-length // length_step) * length_step, -1 if kind is None else kind].append(index)
    first_row = np.empty(len(lengths), dtype=np.int64)
    rectangles, start = [], 0
    for (length, _), sequences in sorted(members.items()):
        rectangles.append(Rectangle(start, len(sequences), length, first=sequences[0]))
        first_row[sequences] = start + length * np.arange(len(sequences))
        start += length * len(sequences)
    # Parts of long sequences have more keys than queries, each its own number of them: no two fit one call.
    for index in apart:
        rectangles.append(Rectangle(start, 1, lengths[index], index, first=index))
        first_row[index] = start
        start += lengths[index]
    sizes = np.asarray(lengths, dtype=np.int64)
    stream_start = np.cumsum(sizes) - sizes
    row_of_token = np.repeat(first_row - stream_start, sizes) + np.arange(sizes.sum())
    # Which rows are padding is known on the host, so that no size has to be read off a device.
    is_padding = np.ones(start, dtype=bool)
    is_padding[row_of_token] = False
    index, padding = torch.from_numpy(row_of_token), torch.from_numpy(np.flatnonzero(is_padding))
    return Layout(tuple(rectangles), start, copied_to(index, device), row_of_token, copied_to(padding, device))


def copied_to(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a tensor of the host on a device, without waiting for the copy.

    Args:
        tensor: a tensor on the host.
        device: where it is needed.
    """
    # From pageable memory the host would wait; torch gives pinned memory out again only once the copy is done.
    source = tensor.pin_memory() if device.type == "cuda" else tensor
    return source.to(device, non_blocking=True)


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


def heads_first(x_rows: torch.Tensor, rectangle: Rectangle) -> torch.Tensor:
    """`[n * L, H, C] -> [n, H, L, C]` as a view."""
    return x_rows.view(rectangle.num_sequences, rectangle.length, *x_rows.shape[1:]).transpose(1, 2)


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
    """Return `[M, ...]`, rows of a tensor, whose gradients are added in a fixed order.

    Args:
        x_U: `[U, ...]`.
        rows: int64 `[M]`, any row any number of times.
    """
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


def to_stream(x_1HUC: torch.Tensor, shared: SharedRows) -> torch.Tensor:
    """Return queries, keys or values `[1, H, T, C]` of all tokens from those of the computed rows."""
    return take_rows(x_1HUC[0].transpose(0, 1), shared.row_of_token).transpose(0, 1)[None]


def to_computed(x_1THC: torch.Tensor, shared: SharedRows) -> torch.Tensor:
    """Return outputs of attention `[1, U, H, C]` at the computed rows from those of all tokens."""
    return x_1THC[0].index_select(0, shared.computed)[None]
