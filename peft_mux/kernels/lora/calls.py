"""The two kinds of `GroupCall`: a group of layers in one pass, through kernels or through products on slices.

Shape letters: T rows of the stream, D features read, K features of a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from peft_mux.kernels.lora.group import Base
from peft_mux.kernels.lora.reference import slices_backward, slices_forward
from peft_mux.kernels.lora.slices import LinearSlice, all_factors
from peft_mux.kernels.lora.tables import SegmentTables


class Tables(Protocol):
    """What the launches of a group of layers need to know, for one set of tasks; `LoraGroup` is that of linear ones."""

    def forward(
        self,
        x: torch.Tensor,
        bases: Sequence[Base],
        segments: SegmentTables,
        places: torch.Tensor,
        *,
        num_columns: int | None,
    ) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Return each layer's output `[..., K]`, and what the backward pass needs besides `x [..., D]`."""
        ...

    def backward(
        self,
        dys: Sequence[torch.Tensor],
        x: torch.Tensor,
        saved: torch.Tensor,
        bases: Sequence[Base],
        segments: SegmentTables,
        places: torch.Tensor,
        *,
        needs_dx: bool,
    ) -> torch.Tensor | None:
        """Add to the gradients of the adapters, and return that of `x`."""
        ...


class KernelCall(NamedTuple):
    """A group in a pass, through the kernels.

    Attributes:
        group: the tables of the group.
        bases: the frozen part of each of its layers.
        segments: which rows of the stream belong to which task.
        places: int64 `[T]`, place of each row in its task's global batch, for dropout.
        num_columns: columns that are kept of each row for the backward pass; by default as many as these tasks need.
    """

    group: Tables
    bases: Sequence[Base]
    segments: SegmentTables
    places: torch.Tensor
    num_columns: int | None = None

    def forward(self, x_TD: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Return each layer's output `[T, K]`, and what the backward pass needs besides `x_TD`."""
        return self.group.forward(x_TD, self.bases, self.segments, self.places, num_columns=self.num_columns)

    def backward(
        self, dys_TK: Sequence[torch.Tensor], x_TD: torch.Tensor, saved: torch.Tensor, *, needs_dx: bool
    ) -> torch.Tensor | None:
        """Add to the gradients of the adapters, and return that of `x_TD` where a layer below needs it."""
        return self.group.backward(dys_TK, x_TD, saved, self.bases, self.segments, self.places, needs_dx=needs_dx)


class SliceCall(NamedTuple):
    """A group in a pass, through products on slices; adds to the parameters' own gradients.

    Attributes:
        slices: the layers of the group with their adapters.
        places: int64 `[T]`, place of each row in its task's global batch, for dropout.
        num_columns: columns that are kept of each row for the backward pass.
    """

    slices: Sequence[LinearSlice]
    places: torch.Tensor
    num_columns: int

    def forward(self, x_TD: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], torch.Tensor]:
        """Return each layer's output `[T, K]`, and what the backward pass needs besides `x_TD`."""
        # As wide as the compiled graph was told, which may be more than these tasks fill.
        saved = x_TD.new_zeros(len(x_TD) * self.num_columns)
        return slices_forward(x_TD, self.slices, self.places, saved), saved

    def backward(
        self, dys_TK: Sequence[torch.Tensor], x_TD: torch.Tensor, saved: torch.Tensor, *, needs_dx: bool
    ) -> torch.Tensor | None:
        """Add to the gradients of the adapters, and return that of `x_TD` where a layer below needs it."""
        factors = all_factors(self.slices)
        dx, gradients = slices_backward(dys_TK, x_TD, self.slices, self.places, saved.reshape(-1), needs_dx=needs_dx)
        for factor, gradient in zip(factors, gradients, strict=True):
            if gradient is not None:
                # By hand, as autograd sees the whole group as one operator without factors.
                factor.grad = gradient if factor.grad is None else factor.grad.add_(gradient)
        return dx
