"""DoRA: each output feature of `W + s B A` is given a length of its own, which the task trains.

    y = m / ||W + s B A|| * (W x + s B A x) + b        the norm of each row is a constant to the gradient (DoRA, 4.3)

The norms come from products of the small factors, without the matrix `B A` of every task::

    ||W + s B A||^2 = ||W||^2 + 2 s <W A^T, B> + s^2 <B (A A^T), B>        row by row

Shape letters: N rows of one task, D input features, K output features, R rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peft.utils.integrations import dequantize_module_weight
from torch.nn import functional as F

from peft_mux.modeling.backbone.modules import frozen_weight


class MagnitudeScale:
    """The step of a DoRA adapter: scales what the grouped product gives, or computes both where inputs are dropped.

    Args:
        layer: PEFT's layer.
        adapter: internal id of the task's adapter.
    """

    def __init__(self, layer: Any, adapter: str) -> None:
        """Start without the squares of the frozen weight, which are added up when they are first needed."""
        self._layer, self._adapter = layer, adapter
        self._squares: tuple[tuple[int, int], torch.Tensor] | None = None

    def __call__(
        self, x_ND: torch.Tensor, y_NK: torch.Tensor, drop: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Return the outputs of the task's rows; see `RowStep`."""
        layer, adapter = self._layer, self._adapter
        magnitude = layer.lora_magnitude_vector[adapter].weight
        weight_KD, bias_K = self._frozen(y_NK.dtype)
        with torch.autocast(y_NK.device.type, enabled=False):
            scale_K = (magnitude / self.norms(weight_KD).to(magnitude.dtype)).to(y_NK.dtype)
            if not drops(layer, adapter):
                # The grouped product has added s B A x already; the frozen bias is not scaled.
                return y_NK * scale_K if bias_K is None else (y_NK - bias_K) * scale_K + bias_K
            # As PEFT has it: the backbone's own part sees the input, and what is added to it sees the dropped one.
            x_ND = drop(x_ND).to(y_NK.dtype)
            a_RD, b_KR = (part[adapter].weight.to(y_NK.dtype) for part in (layer.lora_A, layer.lora_B))
            added = F.linear(F.linear(x_ND, a_RD), b_KR) * layer.scaling[adapter]
            return y_NK + (scale_K - 1) * F.linear(x_ND, weight_KD) + scale_K * added

    @torch.no_grad()
    def norms(self, weight_KD: torch.Tensor) -> torch.Tensor:
        """Return the norms `[K]` of the rows of `W + s B A`, in fp32.

        Args:
            weight_KD: the frozen weight.
        """
        a_RD, b_KR = (part[self._adapter].weight.float() for part in (self._layer.lora_A, self._layer.lora_B))
        scale = self._layer.scaling[self._adapter]
        crossed = (F.linear(a_RD.to(weight_KD.dtype), weight_KD).t().float() * b_KR).sum(dim=1)
        added = (b_KR @ (a_RD @ a_RD.t()) * b_KR).sum(dim=1)
        # Rounding can take a row of zeros below zero.
        return (self._squares_of(weight_KD) + 2 * scale * crossed + scale**2 * added).clamp_min_(0).sqrt_()

    def _squares_of(self, weight_KD: torch.Tensor) -> torch.Tensor:
        frozen = self._layer.get_base_layer().weight
        # Added up once, and again where the backbone was moved, cast or written to.
        key = (frozen.data_ptr(), frozen._version)
        if self._squares is None or self._squares[0] != key:
            self._squares = key, torch.linalg.vector_norm(weight_KD, dim=1, dtype=torch.float32).square()
        return self._squares[1]

    def _frozen(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the frozen weight `[K, D]` and bias `[K]`."""
        base = self._layer.get_base_layer()
        weight, bias = frozen_weight(base)
        if weight is None:
            weight, bias = dequantize_module_weight(base), base.bias
        return weight.to(dtype), None if bias is None else bias.to(dtype)


def drops(layer: Any, adapter: str) -> bool:
    """Whether an adapter drops elements of its input now."""
    # PEFT puts an `Identity`, which has no `p`, where nothing is dropped.
    return layer.training and getattr(layer.lora_dropout[adapter], "p", 0.0) > 0.0


def is_apart(layer: Any, adapter: str) -> bool:
    """Whether the grouped product leaves an adapter out: DoRA that drops, which also scales what was not dropped."""
    return adapter in layer.lora_magnitude_vector and drops(layer, adapter)
