"""`Piece` and `PassThrough`: the part that a process holds of a model that is divided among several.

A `Piece` says which part of a task's parameter a process holds: stages hold some parameters whole and others not at
all, tensor parallel ranks hold rows or columns of them. Sums of gradients, norms and checkpoints over processes read
pieces and nothing else::

    column-parallel    W [K/n, D]    A [R, D] whole, adds     B [K/n, R] rows of B
    row-parallel       W [K, D/n]    A [R, D/n] columns of A  B [K, R] whole, adds

A `PassThrough` is in the place of a module that another process holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of one parameter that a process holds.

    Attributes:
        shape: shape of the whole parameter.
        dim: dimension along which the parameter is cut; 0 if it is whole.
        ranges: the held indices along `dim`, as ascending (start, end) pairs, in the order of the piece.
        adds: whether this process's gradient is a summand of the whole one; `False` if another rank computes the same
            gradient, which is then counted once.
    """

    shape: tuple[int, ...]
    dim: int
    ranges: tuple[tuple[int, int], ...]
    adds: bool = True

    @classmethod
    def whole(cls, shape: torch.Size | tuple[int, ...], *, adds: bool = True) -> Piece:
        """Return the piece that is all of a parameter."""
        return cls(tuple(shape), 0, ((0, shape[0] if shape else 1),), adds)

    @property
    def is_whole(self) -> bool:
        """Whether the process holds all of the parameter."""
        return self.ranges == ((0, self.shape[self.dim] if self.shape else 1),)

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of what the process holds."""
        if self.is_whole:
            return self.shape
        size = sum(end - start for start, end in self.ranges)
        return (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this piece of a whole tensor of `shape`; a view if it is one range."""
        if self.is_whole:
            return whole
        # Several ranges, as fused layers are cut matrix by matrix (GPT-2's q, k and v).
        parts = [whole.narrow(self.dim, start, end - start) for start, end in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.dim)

    def put(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Write this piece, a tensor of `part_shape`, into a whole tensor of `shape`."""
        if self.is_whole:
            whole.copy_(part)
            return
        first = 0
        for start, end in self.ranges:
            whole.narrow(self.dim, start, end - start).copy_(part.narrow(self.dim, first, end - start))
            first += end - start


class PassThrough(nn.Module):
    """Takes the place of a module that another process holds: returns its first argument.

    Args:
        like: the module whose place it takes; model code reads plain attributes of layers, such as kinds of attention.
    """

    def __init__(self, like: nn.Module | None = None) -> None:
        super().__init__()
        for name, value in ({} if like is None else vars(like)).items():
            if isinstance(value, (str, int, float, bool)) and not name.startswith("_"):
                setattr(self, name, value)

    def forward(self, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return `hidden_states`."""
        return hidden_states
