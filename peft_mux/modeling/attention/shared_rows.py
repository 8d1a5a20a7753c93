"""Between the tokens of a stream and the rows that are computed of them, where sequences begin alike.

A row that stands for several tokens gets the sum of their gradients, in a fixed order.

Shape letters: T tokens of the stream, U computed rows, M chosen tokens, H heads, C channels of a head, D features.
"""

from __future__ import annotations

from typing import Any

import torch

from peft_mux.data.batch import MuxBatch
from peft_mux.data.shared_rows import SharedRows


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
