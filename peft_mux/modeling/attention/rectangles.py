"""Rectangles: sequences of a packed stream gathered by near-equal length, for attention without a varlen kernel.

Shape letters: T tokens, P rows of all rectangles, n sequences of a rectangle, L its length, H heads, C channels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

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
            (`peft_mux.modeling.attention.prefixes`), or of the keys before them; empty where all may.
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
