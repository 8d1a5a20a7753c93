"""The bottlenecks of many tasks behind one frozen layer, over one packed stream.

    P_g = down_g drop(y_g)^T + b_g          H_g = f(P_g)          out_g = y_g + H_g^T up_g^T + c_g
    dH_g = up_g^T dout_g^T                  dP_g = f'(P_g) dH_g   dy_g = dout_g + mask_g * (dP_g^T down_g)
    dup_g = dout_g^T H_g^T                  ddown_g = dP_g drop(y_g)

The frozen layer has run once over all rows; each task touches only its own, by slices and never by masks that
multiply, so that a NaN of one task reaches no other. As in `peft_mux.kernels.lora.reference`, skinny products are
written with the bottleneck as their first dimension, which takes a fraction of the time on CPUs.

Shape letters: T rows of the stream, K features of the frozen layer's output, M of a bottleneck.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from peft_mux.kernels import philox
from peft_mux.peft_methods.bottleneck.layer import ACTIVATIONS

_Gradient = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_GRADIENTS: dict[str, _Gradient] = {
    "relu": lambda gradient, before: torch.ops.aten.threshold_backward(gradient, before, 0),
    "gelu": lambda gradient, before: torch.ops.aten.gelu_backward(gradient, before),
    "silu": lambda gradient, before: torch.ops.aten.silu_backward(gradient, before),
    "tanh": lambda gradient, before: torch.ops.aten.tanh_backward(gradient, before.tanh()),
}
"""Gradient before a nonlinearity, from that behind it and what it read."""


class BottleneckSegment(NamedTuple):
    """Rows of one task behind one layer, and how its bottleneck acts on them.

    Attributes:
        start: first row of the task in the stream.
        end: one past the task's last row.
        non_linearity: name of f.
        dropout: probability of dropping an element that `down` reads; 0 for none.
        seed: 64-bit key of the dropout draws, from `philox.draw_seed`.
    """

    start: int
    end: int
    non_linearity: str
    dropout: float
    seed: int


class Bottleneck(NamedTuple):
    """The trained tensors of one adapter behind one layer; no bias is `None`."""

    down_MK: torch.Tensor
    down_bias_M: torch.Tensor | None
    up_KM: torch.Tensor
    up_bias_K: torch.Tensor | None


def grouped_bottlenecks(
    y_TK: torch.Tensor,
    places: torch.Tensor,
    segments: Sequence[BottleneckSegment],
    bottlenecks: Sequence[Bottleneck],
) -> torch.Tensor:
    """Return `[T, K]`, a frozen layer's output with every task's bottleneck behind its own rows.

    Args:
        y_TK: the frozen layer's output, sorted by task.
        places: int64 `[T]`, place of each row in its task's global batch, for dropout.
        segments: rows of the tasks that have an adapter here; rows of no segment stay as they are.
        bottlenecks: the adapter of each segment.
    """
    flat = [tensor for bottleneck in bottlenecks for tensor in bottleneck]
    # The frozen layer has settled the dtype; autocast would cast each product by itself.
    with torch.autocast(y_TK.device.type, enabled=False):
        return BottleneckFunction.apply(y_TK, places, tuple(segments), *flat)


class BottleneckFunction(torch.autograd.Function):
    """Manual forward and backward of `grouped_bottlenecks`: in-place products on row slices."""

    @staticmethod
    def forward(
        ctx: Any,
        y_TK: torch.Tensor,
        places: torch.Tensor,
        segments: tuple[BottleneckSegment, ...],
        *flat: torch.Tensor | None,
    ) -> torch.Tensor:
        """Compute the output; save `y` and each P."""
        out, befores = y_TK.clone(), []
        for segment, own in zip(segments, _bottlenecks(flat, y_TK.dtype), strict=True):
            rows = slice(segment.start, segment.end)
            read_TK = _dropped(y_TK[rows], segment, places[rows])
            before_MT = own.down_MK @ read_TK.t()
            if own.down_bias_M is not None:
                before_MT += own.down_bias_M[:, None]
            hidden_MT = ACTIVATIONS[segment.non_linearity](before_MT)
            out[rows].addmm_(hidden_MT.t(), own.up_KM.t())
            if own.up_bias_K is not None:
                out[rows] += own.up_bias_K
            befores.append(before_MT)
        ctx.save_for_backward(y_TK, places, *befores)
        ctx.segments, ctx.flat = segments, flat
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dout_TK: torch.Tensor) -> tuple[Any, ...]:
        """Compute `dy` and the gradient of each trained tensor."""
        y_TK, places, *befores = ctx.saved_tensors
        # Below the lowest adapter nothing trains, and no dy is needed.
        dy_TK = dout_TK.clone() if ctx.needs_input_grad[0] else None
        gradients: list[torch.Tensor | None] = []
        for segment, own, before_MT in zip(ctx.segments, _bottlenecks(ctx.flat, y_TK.dtype), befores, strict=True):
            rows = slice(segment.start, segment.end)
            dout_g = dout_TK[rows]
            hidden_MT = ACTIVATIONS[segment.non_linearity](before_MT)
            dhidden_MT = own.up_KM.t().contiguous() @ dout_g.t()
            dbefore_MT = _GRADIENTS[segment.non_linearity](dhidden_MT, before_MT)
            # Drawn once more, from seed and place: a mask that was kept would take memory for every layer.
            read_TK = _dropped(y_TK[rows], segment, places[rows])
            gradients += [
                dbefore_MT @ read_TK,
                None if own.down_bias_M is None else dbefore_MT.sum(1),
                (hidden_MT @ dout_g).t(),
                None if own.up_bias_K is None else dout_g.sum(0),
            ]
            if dy_TK is not None:
                _add_input_gradient(dy_TK[rows], dbefore_MT, own.down_MK, segment, places[rows])
        cast = [
            None if gradient is None else gradient.to(tensor.dtype)
            for gradient, tensor in zip(gradients, ctx.flat, strict=True)
        ]
        return dy_TK, None, None, *cast


def _bottlenecks(flat: Sequence[torch.Tensor | None], dtype: torch.dtype) -> list[Bottleneck]:
    """Return the adapters that tensors lie one after another of, in the dtype to compute in."""
    cast: list[Any] = [None if tensor is None else tensor.to(dtype) for tensor in flat]
    size = len(Bottleneck._fields)
    return [Bottleneck(*cast[start : start + size]) for start in range(0, len(cast), size)]


def _dropped(y_TK: torch.Tensor, segment: BottleneckSegment, places: torch.Tensor) -> torch.Tensor:
    return y_TK if segment.dropout == 0.0 else philox.dropout(y_TK, places, segment.dropout, segment.seed)


def _add_input_gradient(
    dy_TK: torch.Tensor,
    dbefore_MT: torch.Tensor,
    down_MK: torch.Tensor,
    segment: BottleneckSegment,
    places: torch.Tensor,
) -> None:
    """Add what a bottleneck gives to `dy`, in its own rows."""
    if segment.dropout == 0.0:
        dy_TK.addmm_(dbefore_MT.t(), down_MK)
    else:
        dy_TK += philox.dropout(dbefore_MT.t() @ down_MK, places, segment.dropout, segment.seed)
