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


class LinearSlice(NamedTuple):
    """One frozen linear layer of several that read the same activations (q, k and v; gate and up).

    Attributes:
        weight_KD: frozen `[K, D]`; `None` for the adapters' part alone (the base is added by the caller).
        bias_K: frozen `[K]` or `None`.
        out_features: K.
        segments: rows of the tasks that have an adapter here; rows of no segment get the base alone.
        factors: `(A [R, D], B [K, R])` per segment; ranks may differ.
    """

    weight_KD: torch.Tensor | None
    bias_K: torch.Tensor | None
    out_features: int
    segments: Sequence[LoraSegment]
    factors: Sequence[tuple[torch.Tensor, torch.Tensor]]


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
        weight_KD: as in `LinearSlice`.
        bias_K: as in `LinearSlice`.
        segments: as in `LinearSlice`.
        factors: as in `LinearSlice`.
        places: int64 `[T]`, for dropout.
        out_features: K.

    Returns:
        `[T, K]`, in the autocast dtype where autocast is on, else in that of `x`.
    """
    (y,) = grouped_lora_slices(x_TD, [LinearSlice(weight_KD, bias_K, out_features, segments, factors)], places)
    return y


def grouped_lora_slices(
    x_TD: torch.Tensor, slices: Sequence[LinearSlice], places: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Return the outputs of several frozen layers that read the same `x`, each with its adapters (M §3.4.3).

    A task's factors A of all slices work as one of their summed rank: `x` is read once a task, and `dx` written once.

    Args:
        x_TD: `[T, D]` activations, sorted by task.
        slices: the layers.
        places: int64 `[T]`, for dropout.

    Returns:
        One `[T, K]` a slice, in the autocast dtype where autocast is on, else in that of `x`.
    """
    device_type = x_TD.device.type
    autocast = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type) if autocast else x_TD.dtype
    flat = [factor for part in slices for pair in part.factors for factor in pair]
    with torch.autocast(device_type, enabled=False):
        return GroupedLoraFunction.apply(x_TD, tuple(slices), places, dtype, *flat)


class _Bundle(NamedTuple):
    """Adapters of one task that read the same rows of `x`, with the same draws: one product for all of their A.

    Attributes:
        segment: rows and dropout.
        members: slice, number among all adapters, and scale of each.
    """

    segment: LoraSegment
    members: tuple[tuple[int, int, float], ...]


def _bundles(slices: Sequence[LinearSlice]) -> list[_Bundle]:
    """Gather the adapters of each task; one with dropout stands alone, as its draws are its own."""
    shared: dict[tuple[int, int], list[tuple[int, int, float]]] = {}
    alone: list[_Bundle] = []
    number = 0
    for index, part in enumerate(slices):
        for segment in part.segments:
            member = (index, number, segment.scale)
            if segment.dropout == 0.0:
                shared.setdefault((segment.start, segment.end), []).append(member)
            else:
                alone.append(_Bundle(segment, (member,)))
            number += 1
    return [_Bundle(LoraSegment(*rows, 1.0), tuple(members)) for rows, members in shared.items()] + alone


class GroupedLoraFunction(torch.autograd.Function):
    """Manual forward and backward of `grouped_lora_slices`: in-place `addmm_` on row slices, no copies of activations.

    Skinny products are written so that the rank is their first dimension (`A x^T`, `B^T dy^T`, `S dy`): on CPUs the
    other orientation takes up to ten times as long (docs/log.md).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x_TD: torch.Tensor,
        slices: tuple[LinearSlice, ...],
        places: torch.Tensor,
        dtype: torch.dtype,
        *factors: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Compute each `y`; save `x`, the factors and each `S`."""
        x = x_TD.to(dtype)
        ys = tuple(_base(x, part) for part in slices)
        bundles, shrunk = _bundles(slices), []
        for bundle in bundles:
            s_RT = _joint_a(bundle, factors, dtype) @ _dropped(x, bundle.segment, places).t()
            rows = slice(bundle.segment.start, bundle.segment.end)
            for (index, number, scale), s in zip(bundle.members, _split(s_RT, bundle, factors), strict=True):
                ys[index][rows].addmm_(s.t(), factors[2 * number + 1].to(dtype).t(), alpha=scale)
            shrunk.append(s_RT)
        ctx.save_for_backward(x, places, *factors, *shrunk)
        ctx.weights = tuple(part.weight_KD for part in slices)
        ctx.bundles, ctx.dtype, ctx.input_dtype = bundles, dtype, x_TD.dtype
        return ys

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *dys_TK: torch.Tensor) -> tuple[Any, ...]:
        """Compute `dx` and each `dA`, `dB`; the frozen weights get no gradient."""
        x, places, *rest = ctx.saved_tensors
        bundles: list[_Bundle] = ctx.bundles
        factors, shrunk = rest[: len(rest) - len(bundles)], rest[len(rest) - len(bundles) :]
        dys = [dy.to(ctx.dtype) for dy in dys_TK]
        dx = _base_input_gradient(x, dys, ctx.weights) if ctx.needs_input_grad[0] else None
        gradients: list[Any] = [None] * len(factors)
        for bundle, s_RT in zip(bundles, shrunk, strict=True):
            rows = slice(bundle.segment.start, bundle.segment.end)
            ds_RT = torch.empty_like(s_RT)
            parts = zip(bundle.members, _split(s_RT, bundle, factors), _split(ds_RT, bundle, factors), strict=True)
            for (index, number, scale), s, ds in parts:
                b = factors[2 * number + 1]
                dy_g = dys[index][rows]
                torch.mm(b.to(ctx.dtype).t().contiguous(), dy_g.t(), out=ds).mul_(scale)
                db = (s @ dy_g).mul_(scale).t()
                gradients[2 * number + 1] = db.to(b.dtype, memory_format=torch.contiguous_format)
            da_RD = ds_RT @ _dropped(x, bundle.segment, places)
            for (_, number, _), da in zip(bundle.members, _split(da_RD, bundle, factors), strict=True):
                gradients[2 * number] = da.to(factors[2 * number].dtype)
            if dx is not None:
                _add_input_gradient(dx, ds_RT, _joint_a(bundle, factors, ctx.dtype), bundle.segment, places)
        dx = None if dx is None else dx.to(ctx.input_dtype)
        return (dx, None, None, None, *gradients)


def _base(x: torch.Tensor, part: LinearSlice) -> torch.Tensor:
    if part.weight_KD is None:
        return x.new_zeros(len(x), part.out_features)
    bias = None if part.bias_K is None else part.bias_K.to(x.dtype)
    return F.linear(x, part.weight_KD.to(x.dtype), bias)


def _base_input_gradient(
    x: torch.Tensor, dys: Sequence[torch.Tensor], weights: Sequence[torch.Tensor | None]
) -> torch.Tensor:
    """Return the sum of `dy W` over the slices that have a frozen weight."""
    dx = None
    for dy, weight in zip(dys, weights, strict=True):
        if weight is not None:
            dx = dy @ weight.to(x.dtype) if dx is None else dx.addmm_(dy, weight.to(x.dtype))
    return torch.zeros_like(x) if dx is None else dx


def _joint_a(bundle: _Bundle, factors: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    parts = [factors[2 * number].to(dtype) for _, number, _ in bundle.members]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _split(x_R: torch.Tensor, bundle: _Bundle, factors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return each member's rows of a tensor whose first dimension is the summed rank."""
    return x_R.split([len(factors[2 * number]) for _, number, _ in bundle.members])


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
