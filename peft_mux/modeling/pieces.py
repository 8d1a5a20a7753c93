"""`Piece`: the part of a task's parameter that lies in one process.

Stages hold some parameters whole and others not at all; shards hold rows or columns of them. Whatever adds gradients
up, counts norms or writes checkpoints over processes asks pieces, and nothing else, what lies where::

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
        shape: of the whole parameter.
        dim: along which it is cut; 0 where it is whole.
        ranges: the held indices along `dim`, as ascending (start, end) pairs; their order is that of the piece.
        adds: whether this process's gradient is a summand of the whole one; otherwise another shard's has it already.
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
        """Whether nothing is missing."""
        return self.ranges == ((0, self.shape[self.dim] if self.shape else 1),)

    @property
    def part_shape(self) -> tuple[int, ...]:
        """Shape of what is held."""
        if self.is_whole:
            return self.shape
        size = sum(end - start for start, end in self.ranges)
        return (*self.shape[: self.dim], size, *self.shape[self.dim + 1 :])

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """Return this piece of a whole tensor; a view where it is one range."""
        if self.is_whole:
            return whole
        parts = [whole.narrow(self.dim, start, end - start) for start, end in self.ranges]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=self.dim)

    def put(self, whole: torch.Tensor, part: torch.Tensor) -> None:
        """Write this piece into a whole tensor."""
        if self.is_whole:
            whole.copy_(part)
            return
        first = 0
        for start, end in self.ranges:
            whole.narrow(self.dim, start, end - start).copy_(part.narrow(self.dim, first, end - start))
            first += end - start
