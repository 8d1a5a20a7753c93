"""`Piece`: the part of a task's parameter that lies in one process.

Stages hold some parameters whole and others not at all; tensor parallel ranks hold rows or columns of them. Whatever
sums gradients, counts norms or writes checkpoints over processes asks pieces, and nothing else, what lies where::

    column-parallel    W [K/n, D]    A [R, D] whole, adds     B [K/n, R] rows of B
    row-parallel       W [K, D/n]    A [R, D/n] columns of A  B [K, R] whole, adds
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Piece:
    """What a process holds of one parameter.

    Attributes:
        shape: shape of the whole parameter.
        dim: dimension along which the parameter is cut; 0 where it is whole.
        ranges: the held indices along `dim`, as ascending (start, end) pairs; their order is that of the piece.
        adds: whether this process's gradient is a summand of the whole one; `False` where another rank computes the
            same gradient, and is the one that counts.
    """

    shape: tuple[int, ...]
    dim: int
    ranges: tuple[tuple[int, int], ...]
    adds: bool = True

    @classmethod
    def whole(cls, shape: torch.Size | tuple[int, ...], *, adds: bool = True) -> Piece:
        """Return the piece that is all of a parameter.

        Args:
            shape: shape of the parameter.
            adds: whether this process's gradient is a summand of the whole one.
        """
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
        """Return this piece of a whole tensor; a view where it is one range.

        Args:
            whole: the whole tensor, which has the shape `shape`.
        """
        if self.is_whole:
            return whole
        # Several ranges, as fused layers are cut matrix by matrix (GPT-2's q, k and v).
        parts = [whole.narrow(self.dim, start, end - start) for start, end in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.dim)

    def put(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Write this piece into a whole tensor.

        Args:
            whole: tensor of `shape`, which is written to.
            part: tensor of `part_shape`, which is read.
        """
        if self.is_whole:
            whole.copy_(part)
            return
        first = 0
        for start, end in self.ranges:
            whole.narrow(self.dim, start, end - start).copy_(part.narrow(self.dim, first, end - start))
            first += end - start
