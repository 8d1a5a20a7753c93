"""A frozen linear layer with the LoRA adapters of many tasks on top, over one packed stream.

    S_g = drop(x_g) A_g^T          y = x W^T + b;    y_g += s_g S_g B_g^T            (M Eq. 1)
    dS_g = s_g dy_g B_g            dB_g = s_g dy_g^T S_g        dA_g = dS_g^T drop(x_g)
    dx = dy W;                     dx_g += mask_g * (dS_g A_g)                       (M Eq. 2)

The base GEMM runs once over all rows; each task touches only its own rows, by slices and never by masks that
multiply, so that a NaN of one task (0 * NaN = NaN) reaches no other.

Shape letters: T rows of the stream, D input features, K output features, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

from peft_mux.kernels import philox


class LoraSegment(NamedTuple):
    """Rows of one task in one layer, and how its adapter acts on them.

    Attributes:
        start: first row.
        end: one past the last row.
        scale: alpha / rank (or alpha / sqrt(rank)).
        dropout: probability of dropping an input element; 0 for none.
        seed: of the dropout draws, from `philox.draw_seed`.
    """

    start: int
    end: int
    scale: float
    dropout: float = 0.0
    seed: int = 0


def grouped_lora(
    x_TD: torch.Tensor,
    weight_KD: torch.Tensor | None,
    bias_K: torch.Tensor | None,
    segments: Sequence[LoraSegment],
    factors: Sequence[tuple[torch.Tensor, torch.Tensor]],
    *,
    places: torch.Tensor,
    out_features: int,
) -> torch.Tensor:
    """Return the frozen layer's output with every task's adapter added to its own rows.

    Args:
        x_TD: `[T, D]` activations, sorted by task.
        weight_KD: frozen `[K, D]`; `None` for the adapters' part alone (the base is added by the caller).
        bias_K: frozen `[K]` or `None`.
        segments: rows of the tasks that have an adapter here; rows of no segment get the base alone.
        factors: `(A [R, D], B [K, R])` per segment; ranks may differ.
        places: int64 `[T]`, for dropout.
        out_features: K.

    Returns:
        `[T, K]`, in the autocast dtype where autocast is on, else in that of `x`.
    """
    device_type = x_TD.device.type
    autocast = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type) if autocast else x_TD.dtype
    flat = [factor for pair in factors for factor in pair]
    with torch.autocast(device_type, enabled=False):
        return GroupedLoraFunction.apply(x_TD, weight_KD, bias_K, tuple(segments), places, out_features, dtype, *flat)


class GroupedLoraFunction(torch.autograd.Function):
    """Manual forward and backward of `grouped_lora`: in-place `addmm_` on row slices, no copies.

    Skinny products are written so that the rank is their first dimension (`A x^T`, `B^T dy^T`, `S dy`): on CPUs the
    other orientation takes up to five times as long (docs/log.md).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: torch.Tensor,
        weight_KD: torch.Tensor | None,
        bias_K: torch.Tensor | None,
        segments: tuple[LoraSegment, ...],
        places: torch.Tensor,
        out_features: int,
        dtype: torch.dtype,
        *factors: torch.Tensor,
    ) -> torch.Tensor:
        """Compute `y`; save `x`, the factors and each `S`."""
        x = x_TD.to(dtype)
        if weight_KD is None:
            y = x.new_zeros(len(x), out_features)
        else:
            y = F.linear(x, weight_KD.to(dtype), None if bias_K is None else bias_K.to(dtype))
        shrunk = []
        for segment, a, b in zip(segments, factors[::2], factors[1::2], strict=True):
            x_g = _dropped(x, segment, places)
            s_RT = a.to(dtype) @ x_g.t()
            y[segment.start : segment.end].addmm_(s_RT.t(), b.to(dtype).t(), alpha=segment.scale)
            shrunk.append(s_RT)
        ctx.save_for_backward(x, weight_KD, places, *factors, *shrunk)
        ctx.segments, ctx.dtype, ctx.input_dtype = segments, dtype, x_TD.dtype
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy_TK: torch.Tensor) -> tuple[Any, ...]:
        """Compute `dx` and each `dA`, `dB`; the frozen weight gets no gradient."""
        x, weight, places, *rest = ctx.saved_tensors
        count = len(ctx.segments)
        factors, shrunk = rest[: 2 * count], rest[2 * count :]
        needs_dx = ctx.needs_input_grad[0]
        dy = dy_TK.to(ctx.dtype)
        dx = None
        if needs_dx:
            dx = torch.zeros_like(x) if weight is None else dy @ weight.to(ctx.dtype)
        gradients: list[torch.Tensor] = []
        for segment, a, b, s_RT in zip(ctx.segments, factors[::2], factors[1::2], shrunk, strict=True):
            dy_g = dy[segment.start : segment.end]
            ds_RT = (b.to(ctx.dtype).t().contiguous() @ dy_g.t()).mul_(segment.scale)
            x_g = _dropped(x, segment, places)
            gradients.append((ds_RT @ x_g).to(a.dtype))
            gradients.append((s_RT @ dy_g).mul_(segment.scale).t().to(b.dtype, memory_format=torch.contiguous_format))
            if dx is not None:
                _add_input_gradient(dx, ds_RT, a.to(ctx.dtype), segment, places)
        dx = None if dx is None else dx.to(ctx.input_dtype)
        return (dx, None, None, None, None, None, None, *gradients)


def _dropped(x: torch.Tensor, segment: LoraSegment, places: torch.Tensor) -> torch.Tensor:
    rows = slice(segment.start, segment.end)
    if segment.dropout == 0.0:
        return x[rows]
    return philox.dropout(x[rows], places[rows], segment.dropout, segment.seed)


def _add_input_gradient(
    dx: torch.Tensor, ds_RT: torch.Tensor, a: torch.Tensor, segment: LoraSegment, places: torch.Tensor
) -> None:
    rows = slice(segment.start, segment.end)
    if segment.dropout == 0.0:
        dx[rows].addmm_(ds_RT.t(), a)
    else:
        dx[rows] += philox.dropout(ds_RT.t() @ a, places[rows], segment.dropout, segment.seed)


def reference_grouped_lora(
    x_TD: torch.Tensor,
    weight_KD: torch.Tensor | None,
    bias_K: torch.Tensor | None,
    segments: Sequence[LoraSegment],
    factors: Sequence[tuple[torch.Tensor, torch.Tensor]],
    *,
    places: torch.Tensor,
    out_features: int,
) -> torch.Tensor:
    """Return the same as `grouped_lora`, written for reading and left to autograd."""
    if weight_KD is None:
        y = x_TD.new_zeros(len(x_TD), out_features)
    else:
        y = F.linear(x_TD, weight_KD, bias_K)
    delta = torch.zeros_like(y)
    for segment, (a, b) in zip(segments, factors, strict=True):
        x_g = _dropped(x_TD, segment, places)
        added = segment.scale * (x_g @ a.t() @ b.t())
        delta = torch.cat((delta[: segment.start], added, delta[segment.end :]))
    return y + delta
