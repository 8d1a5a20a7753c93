"""The bottlenecks of all tasks behind one frozen layer, and the launches of a pass.

    forward    P = drop(y) down^T + b          H = f(P)           out = (y + c) + H up^T
    backward   dH = dout up                    dP = f'(P) dH      dy = dout + mask * (dP down)
               dup = dout^T H, dc = sum dout   ddown = dP^T drop(y), db = sum dP

(Houlsby et al., 2019; M §3.2.) The products are those of LoRA, with the bottleneck's width for a rank: `down` in the
place of A, `up` transposed in that of B. Tasks with dropout have launches of
`down` of their own, so that which launches work on a task follows from that task alone.

Shape letters: T rows of the stream, K features of the frozen layer's output, M of a bottleneck, C columns of P,
G segments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from peft_mux.kernels import philox
from peft_mux.kernels.bottleneck.biases import Biases, biases_of, on_device
from peft_mux.kernels.lora.group import Layouts, lies_like_new, rows_of
from peft_mux.kernels.lora.launch import Factors
from peft_mux.kernels.lora.tables import MAX_RANK, RankTable, SegmentTables

CODES: Mapping[str, int] = {"relu": 0, "gelu": 1, "silu": 2, "tanh": 3}
"""Numbers by which kernels know nonlinearities (`peft_mux.kernels.bottleneck.device`)."""

_ROW = 16  # columns of a row of P come in such groups, as those of LoRA's S


class Trained(NamedTuple):
    """One trained tensor, where kernels find it.

    Attributes:
        values: in the dtype of the activations.
        gradient: fp32, which a backward pass adds to; `None` where nothing trains.
    """

    values: torch.Tensor
    gradient: torch.Tensor | None


class Adapter(NamedTuple):
    """One task's bottleneck behind one layer, where kernels find it.

    Attributes:
        down: `[M, K]`.
        up: `[M, K]`, the weight of `up` transposed.
        down_bias: `[M]`, or `None`.
        up_bias: `[K]`, or `None`.
        non_linearity: name of f.
        dropout: probability of dropping an element that `down` reads.
    """

    down: Trained
    up: Trained
    down_bias: Trained | None
    up_bias: Trained | None
    non_linearity: str
    dropout: float

    @property
    def size(self) -> int:
        """Features of the bottleneck, M."""
        return len(self.down.values)


class _Matrices(NamedTuple):
    """What launches of one kind of matrices need: where they lie, and how many rows each segment's has."""

    ranks: RankTable
    values: Factors
    gradients: Factors | None


class BottleneckGroup:
    """What the launches behind one layer need to know of its adapters; the same for every pass of the same tasks.

    Args:
        adapters: the adapter of each segment of the stream; `None` for a task without one.
        module_name: name of the layer, on which dropout draws depend.

    Attributes:
        is_empty: whether no task has an adapter here; then there is nothing to compute.
        num_columns: number of columns of P, C.

    Raises:
        ValueError: if a bottleneck is too wide, or lies where kernels cannot read it.
    """

    def __init__(self, adapters: Sequence[Adapter | None], module_name: str) -> None:
        """Decide which launches each task takes part in, and build their tables."""
        sizes = [0 if adapter is None else adapter.size for adapter in adapters]
        self.is_empty = not any(sizes)
        self.num_columns = -(-max(sizes, default=0) // _ROW) * _ROW
        self._module_seed = philox.hash_seed(module_name)
        self._layouts = Layouts()
        self._launches: dict[tuple[Any, ...], Any] = {}
        if self.is_empty:
            return
        if max(sizes) > MAX_RANK:
            raise ValueError(f"the largest bottleneck has {max(sizes)} features; allowed: 1 to {MAX_RANK}.")
        drops = [adapter is not None and philox.drop_threshold(adapter.dropout) > 0 for adapter in adapters]
        calm = [None if is_dropping else adapter for adapter, is_dropping in zip(adapters, drops, strict=True)]
        dropping = [adapter if is_dropping else None for adapter, is_dropping in zip(adapters, drops, strict=True)]
        self._downs = [part for part in map(_downs, (calm, dropping)) if part is not None]
        up = _matrices([None if adapter is None else adapter.up for adapter in adapters])
        assert up is not None, "one of them has an adapter"
        self._up = up
        down_biases = [None if adapter is None else adapter.down_bias for adapter in adapters]
        up_biases = [None if adapter is None else adapter.up_bias for adapter in adapters]
        codes = [0 if adapter is None else CODES[adapter.non_linearity] for adapter in adapters]
        self._code_G = on_device(codes, np.int32, up.values.base.device)
        spare = up.values.base
        self._down_bias, self._up_bias = (_values(biases, spare) for biases in (down_biases, up_biases))
        self._down_gradient, self._up_gradient = (_gradients(biases) for biases in (down_biases, up_biases))

    def forward(
        self, x: torch.Tensor, bases: Any, segments: SegmentTables, places: torch.Tensor, *, num_columns: int | None
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Return the output `[..., K]`, and P for the backward pass.

        Args:
            x: the frozen layer's output y `[..., K]`, T rows, in the dtype of the factors.
            bases: not read; the frozen layer has run.
            segments: which rows of the stream belong to which task.
            places: int64 `[T]`, place of each row in its task's global batch, for dropout.
            num_columns: number of columns of P, where it shall be wider than needed.
        """
        # Imported here, as it needs Triton, without which this file has to be importable.
        from peft_mux.kernels.bottleneck import launch as own
        from peft_mux.kernels.lora import launch as kernels

        y_TK = rows_of(x)
        # Not zeroed: no kernel reads columns of P that its segment has not written.
        p_TC = y_TK.new_empty((y_TK.shape[0], num_columns or self.num_columns))
        layout = self._layouts.of(y_TK, p_TC, segments)
        for part in self._downs:
            more = self._drawing(part, places, layout)
            kernels.shrink(y_TK, part.values, p_TC, segments, part.ranks, scaled=False, **more)
        h_TC = torch.empty_like(p_TC)
        own.activate(p_TC, h_TC, segments, self._up.ranks.rank_G, self._code_G, self._down_bias, self._launches)
        out = y_TK.new_empty(x.shape)
        out_TK = rows_of(out)
        own.copy_with_bias(y_TK, out_TK, segments, self._up_bias, self._launches)
        kernels.expand(h_TC, self._up.values, out_TK, segments, self._up.ranks, scaled=False, add=True, layout=layout)
        return (out,), p_TC

    def backward(
        self,
        dys: Sequence[torch.Tensor],
        x: torch.Tensor,
        p_TC: torch.Tensor,
        bases: Any,
        segments: SegmentTables,
        places: torch.Tensor,
        *,
        needs_dx: bool,
    ) -> torch.Tensor | None:
        """Add to the gradients of the adapters, and return `dy [..., K]`.

        Args:
            dys: gradient `[..., K]` of the output, alone in a sequence.
            x: the frozen layer's output y `[..., K]`.
            p_TC: the P that the forward pass returned.
            bases: not read.
            segments: which rows of the stream belong to which task.
            places: int64 `[T]`, place of each row in its task's global batch, for dropout.
            needs_dx: whether a layer below needs `dy`.
        """
        from peft_mux.kernels.bottleneck import launch as own
        from peft_mux.kernels.lora import launch as kernels

        (dout,) = dys
        y_TK, dout_TK, up = rows_of(x), rows_of(dout), self._up
        dp_TC, h_TC = torch.empty_like(p_TC), torch.empty_like(p_TC)
        layout = self._layouts.of(y_TK, p_TC, segments)
        of_dout = layout if lies_like_new(dout_TK, y_TK.dtype) else None
        kernels.shrink(dout_TK, up.values, dp_TC, segments, up.ranks, scaled=False, layout=of_dout)
        own.derivative(p_TC, dp_TC, h_TC, segments, up.ranks.rank_G, self._code_G, self._launches)
        dy = None
        if needs_dx:
            dy = dout.clone(memory_format=torch.contiguous_format)
            for part in self._downs:
                more = self._drawing(part, places, layout)
                kernels.expand(dp_TC, part.values, rows_of(dy), segments, part.ranks, scaled=False, add=True, **more)
        adding: dict[str, Any] = {"scaled": False, "accumulate": True}
        for part in self._downs:
            if part.gradients is not None:
                more = self._drawing(part, places, layout)
                kernels.wgrad(dp_TC, y_TK, part.gradients, segments, part.ranks, **adding, **more)
        if up.gradients is not None:
            kernels.wgrad(h_TC, dout_TK, up.gradients, segments, up.ranks, **adding, layout=of_dout)
        for sums, gradients in ((dp_TC, self._down_gradient), (dout_TK, self._up_gradient)):
            if gradients is not None:
                own.add_sums(sums, gradients, segments, self._launches)
        return dy

    def _drawing(self, part: _Matrices, places: torch.Tensor, layout: int | None) -> dict[str, Any]:
        # Launches that draw check the places of every pass, and so all of its layout.
        if not part.ranks.has_dropout:
            return {"layout": layout}
        return {"places": places, "module_seed": self._module_seed}


def _downs(adapters: Sequence[Adapter | None]) -> _Matrices | None:
    dropouts = [0.0 if adapter is None else adapter.dropout for adapter in adapters]
    return _matrices([None if adapter is None else adapter.down for adapter in adapters], dropouts)


def _matrices(parts: Sequence[Trained | None], dropouts: Sequence[float] | None = None) -> _Matrices | None:
    """Return what launches need of the matrices of one kind; `None` where no segment has one."""
    values = [None if part is None else part.values for part in parts]
    first = next((value for value in values if value is not None), None)
    if first is None:
        return None
    ranks = [0 if value is None else len(value) for value in values]
    table = RankTable(ranks, [1.0] * len(ranks), dropouts=dropouts, device=first.device)
    gradients = [None if part is None else part.gradient for part in parts]
    is_trained = all(value is None or gradient is not None for value, gradient in zip(values, gradients, strict=True))
    width = first.shape[1]
    return _Matrices(table, Factors(values, width), Factors(gradients, width) if is_trained else None)


def _values(biases: Sequence[Trained | None], spare: torch.Tensor) -> Biases:
    return biases_of([None if bias is None else bias.values for bias in biases], spare)


def _gradients(biases: Sequence[Trained | None]) -> Biases | None:
    """Return where the gradients of biases lie; `None` where there is none, or not one for each bias."""
    found = [bias.gradient for bias in biases if bias is not None]
    present = [gradient for gradient in found if gradient is not None]
    if not present or len(present) < len(found):
        return None
    return biases_of([None if bias is None else bias.gradient for bias in biases], present[0])
