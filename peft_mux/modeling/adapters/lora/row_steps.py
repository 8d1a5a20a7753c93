"""What an adapter does to its task's rows beyond the grouped product `W x + s B A x`.

Most adapters do nothing else, and no layer that holds only such ones pays for the others. Each step works on the rows
of one task, cut out of the stream, so that no other task's numbers take part.

Shape letters: N rows of one task, D input features, K output features, R rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch.nn import functional as F

from peft_mux.modeling.adapters.lora.dora import MagnitudeScale
from peft_mux.modeling.adapters.lora.initial_factors import initial_factors
from peft_mux.modeling.adapters.own.biases import own_bias_added, own_biases

Drop = Callable[[torch.Tensor], torch.Tensor]
"""Returns rows `[N, D]` after the dropout of their task in this layer; the rows themselves where nothing is dropped."""


class RowStep(Protocol):
    """One step over the rows of one task."""

    def __call__(self, x_ND: torch.Tensor, y_NK: torch.Tensor, drop: Drop) -> torch.Tensor:
        """Return the outputs `[N, K]` of the task's rows.

        Args:
            x_ND: inputs of the layer.
            y_NK: its outputs so far.
            drop: the task's dropout on inputs of this layer.
        """
        ...


class AddedBias(NamedTuple):
    """`lora_bias`: a bias on B, which is scaled as B is, and dropped with nothing."""

    layer: Any
    adapter: str

    def __call__(self, x_ND: torch.Tensor, y_NK: torch.Tensor, drop: Drop) -> torch.Tensor:
        """Return the outputs with the bias added."""
        bias = self.layer.lora_B[self.adapter].bias * self.layer.scaling[self.adapter]
        return y_NK + bias.to(y_NK.dtype)


class BlockDiagonal(NamedTuple):
    """`use_bdlora`: one of the factors consists of blocks, so the grouped product leaves the adapter out."""

    layer: Any
    adapter: str

    def __call__(self, x_ND: torch.Tensor, y_NK: torch.Tensor, drop: Drop) -> torch.Tensor:
        """Return the outputs with the adapter's added."""
        a, b = self.layer.lora_A[self.adapter], self.layer.lora_B[self.adapter]
        added = b(a(drop(x_ND).to(a.weight.dtype))) * self.layer.scaling[self.adapter]
        return y_NK + added.to(y_NK.dtype)


class InitialPart(NamedTuple):
    """Initialisations that take `s B0 A0` out of the weight (PiSSA and its like): taken out of the outputs instead.

    So the backbone stays as it is, and every task can have its own: `(W - s B0 A0) x = W x - s B0 A0 x`. What the
    layer's own weight computes sees the input before dropout, and so does this.
    """

    layer: Any
    adapter: str

    def __call__(self, x_ND: torch.Tensor, y_NK: torch.Tensor, drop: Drop) -> torch.Tensor:
        """Return the outputs less those of the initial factors."""
        found = initial_factors(self.layer, self.adapter)
        assert found is not None, "only layers that were initialised so have this step"
        a_RD, b_KR = (factor.to(y_NK.dtype) for factor in found)
        s_NR = F.linear(x_ND.reshape(-1, x_ND.shape[-1]).to(y_NK.dtype), a_RD)
        # Taken out within the product, without another tensor as large as the outputs.
        rows = torch.addmm(y_NK.reshape(-1, y_NK.shape[-1]), s_NR, b_KR.t(), alpha=-self.layer.scaling[self.adapter])
        return rows.view_as(y_NK)


class OwnBias(NamedTuple):
    """`bias`: the task's own in place of the frozen one, which the grouped product has added."""

    layer: Any
    adapter: str

    def __call__(self, x_ND: torch.Tensor, y_NK: torch.Tensor, drop: Drop) -> torch.Tensor:
        """Return the outputs with the task's bias."""
        return own_bias_added(self.layer.get_base_layer(), self.adapter, y_NK)


def steps_of(layer: Any, adapter: str) -> tuple[RowStep, ...]:
    """Return what an adapter of a layer does beyond the grouped product, in order; mostly nothing."""
    steps: list[RowStep] = []
    own = [OwnBias(layer, adapter)] if adapter in own_biases(layer.get_base_layer()) else []
    if adapter not in layer.lora_A:
        return tuple(own)
    if is_block_diagonal(layer, adapter):
        steps.append(BlockDiagonal(layer, adapter))
    if layer.lora_bias.get(adapter, False):
        steps.append(AddedBias(layer, adapter))
    if initial_factors(layer, adapter) is not None:
        steps.append(InitialPart(layer, adapter))
    if adapter in layer.lora_magnitude_vector:
        steps.append(MagnitudeScale(layer, adapter))
    return (*steps, *own)


def is_block_diagonal(layer: Any, adapter: str) -> bool:
    """Whether a factor of an adapter consists of blocks, which the grouped product does not know."""
    return any(not isinstance(part[adapter], torch.nn.Linear) for part in (layer.lora_A, layer.lora_B))
