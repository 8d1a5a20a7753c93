"""The differences of many tasks on one frozen layer, over one packed stream.

    y_g += x_g delta_g^T          dx_g = dy_g delta_g          ddelta_g = dy_g^T x_g

No sum of a frozen weight and a difference is ever made. A difference is computed of its trained tensors where it is
multiplied with, forward and backward, and freed at once: between the two a pass holds nothing of its size.

Shape letters: T rows of the stream, D input and K output features of the frozen layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch


class DiffSegment(NamedTuple):
    """Rows of one task on one layer, and how its difference comes about.

    Attributes:
        start: first row of the task in the stream.
        end: one past the task's last row.
        delta: returns the difference `[K, D]` of the trained tensors, the same each time in one step.
        parts: the trained tensors.
    """

    start: int
    end: int
    delta: Callable[..., torch.Tensor]
    parts: tuple[torch.Tensor, ...]


def grouped_deltas(y_TK: torch.Tensor, x_TD: torch.Tensor, segments: Sequence[DiffSegment]) -> torch.Tensor:
    """Return `[T, K]`, a frozen layer's output with every task's difference applied to its own rows.

    Args:
        y_TK: the frozen layer's output, sorted by task.
        x_TD: what the frozen layer has read.
        segments: rows of the tasks that have a difference here; rows of no segment stay as they are.
    """
    flat = [part for segment in segments for part in segment.parts]
    # The frozen layer has settled the dtype; autocast would cast each product by itself.
    with torch.autocast(y_TK.device.type, enabled=False):
        return DiffPruningFunction.apply(y_TK, x_TD.to(y_TK.dtype), tuple(segments), *flat)


class DiffPruningFunction(torch.autograd.Function):
    """Manual forward and backward of `grouped_deltas`, in place on row slices."""

    @staticmethod
    def forward(
        ctx: Any, y_TK: torch.Tensor, x_TD: torch.Tensor, segments: tuple[DiffSegment, ...], *flat: torch.Tensor
    ) -> torch.Tensor:
        """Compute the output; save `x`."""
        out = y_TK.clone()
        for segment, parts in _with_parts(segments, flat):
            rows = slice(segment.start, segment.end)
            out[rows].addmm_(x_TD[rows], segment.delta(*parts).to(out.dtype).t())
        ctx.save_for_backward(x_TD)
        ctx.segments, ctx.flat = segments, flat
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy_TK: torch.Tensor) -> tuple[Any, ...]:
        """Compute `dx` and the gradient of each trained tensor."""
        (x_TD,) = ctx.saved_tensors
        # Below the lowest adapter nothing trains, and no dx is needed.
        dx_TD = torch.zeros_like(x_TD) if ctx.needs_input_grad[1] else None
        gradients: list[torch.Tensor] = []
        for segment, parts in _with_parts(ctx.segments, ctx.flat):
            rows = slice(segment.start, segment.end)
            leaves = [part.detach().requires_grad_() for part in parts]
            with torch.enable_grad():
                delta_KD = segment.delta(*leaves)
            if dx_TD is not None:
                torch.mm(dy_TK[rows], delta_KD.detach().to(dy_TK.dtype), out=dx_TD[rows])
            ddelta_KD = (dy_TK[rows].t() @ x_TD[rows]).to(delta_KD.dtype)
            gradients += torch.autograd.grad(delta_KD, leaves, ddelta_KD)
        return dy_TK, dx_TD, None, *gradients


def _with_parts(
    segments: Sequence[DiffSegment], flat: Sequence[torch.Tensor]
) -> Iterator[tuple[DiffSegment, Sequence[torch.Tensor]]]:
    start = 0
    for segment in segments:
        yield segment, flat[start : start + len(segment.parts)]
        start += len(segment.parts)
