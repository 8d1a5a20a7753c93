"""Cells: into which regions the pieces of all processes divide a task's parameters, and who holds each of them.

Every process tells once which piece of each parameter it holds, in which page of which dtype. The cut points of all
pieces together divide a parameter into cells, each of which a process holds whole or not at all. The gradient of a
cell is summed over exactly its holders. B `[8, R]` of a column-parallel layer for <2,1>, <1,1>, <1,1>::

    rank 0 (tp rank 0)   | 0 1 2 3 |                     cell      holders
    rank 1 (tp rank 1)             | 4 5 6 7 |           0:4       0, 2, 3
    ranks 2, 3           | 0 1 2 3   4 5 6 7 |           4:8       1, 2, 3

All cells of a task with the same holders make a `Bundle`, one flat buffer. This is one rule for data parallelism, the
partial sums of tensor parallelism, pipelines, their products, and replicas of unequal layouts (L section 4.1). Nothing
here communicates.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from peft_mux.modeling.sharding.pieces import Piece


class HeldParameter(NamedTuple):
    """Where a parameter lies in a page.

    Attributes:
        name: name of the parameter.
        offset: elements of the page that lie before the parameter.
        stride: strides of the parameter as a view of the page, in elements.
        piece: which part of the parameter the process holds.
    """

    name: str
    offset: int
    stride: tuple[int, ...]
    piece: Piece


class HeldPage(NamedTuple):
    """What a process tells the others of one of its pages.

    Attributes:
        dtype: dtype of the weights in the page.
        num_elements: elements of the page, with the gaps between parameters.
        parameters: the parameters that lie in the page, by offset.
    """

    dtype: torch.dtype
    num_elements: int
    parameters: tuple[HeldParameter, ...]


Holding = tuple[HeldPage, ...]
"""All pages of a task in a process; empty where no adapter of the task lies there."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A region of a parameter that each process holds whole or not at all.

    Attributes:
        name: name of the parameter.
        dim: dimension along which the parameter is cut.
        start: first index of the region along `dim`.
        end: index behind the last one along `dim`.
        num_elements: elements of the region.
        holders: ranks that hold the region, ascending.
        adders: ranks among the holders whose gradients are summands; the others would count the same gradient twice.
    """

    name: str
    dim: int
    start: int
    end: int
    num_elements: int
    holders: tuple[int, ...]
    adders: tuple[int, ...]

    @property
    def owner(self) -> int:
        """The one rank that counts this cell where each must be counted once."""
        return self.holders[0]

    def view(self, part: torch.Tensor, piece: Piece) -> torch.Tensor:
        """Return this cell's region of what a holder has.

        Args:
            part: tensor of `piece.part_shape`, such as the holder's gradient.
            piece: which part of the parameter the holder has.
        """
        if part.numel() == self.num_elements:
            return part
        if piece.is_whole:
            return part.narrow(self.dim, self.start, self.end - self.start)
        # The ranges lie one after another in the part, as with q, k and v of a fused projection.
        before = 0
        for start, end in piece.ranges:
            if start <= self.start and self.end <= end:
                return part.narrow(self.dim, before + self.start - start, self.end - self.start)
            before += end - start
        raise AssertionError(f"{self} lies in none of the ranges {piece.ranges}")


@dataclass(frozen=True, slots=True)
class Bundle:
    """Cells that are summed by one all-reduce.

    Attributes:
        holders: ranks that take part in the all-reduce, at least two.
        dtype: dtype of the gradients.
        cells: the cells, in the order in which they lie in the buffer.
        page: page that all holders have alike and sum in place; `None` where cells are packed into a buffer.
    """

    holders: tuple[int, ...]
    dtype: torch.dtype
    cells: tuple[Cell, ...]
    page: HeldPage | None = None

    @property
    def num_elements(self) -> int:
        """Elements of the buffer."""
        return sum(cell.num_elements for cell in self.cells) if self.page is None else self.page.num_elements

    @property
    def num_bytes(self) -> int:
        """Bytes of the buffer."""
        return self.num_elements * self.dtype.itemsize

    def pack(self, rank: int, gradients: Mapping[str, torch.Tensor], pieces: Mapping[str, Piece]) -> torch.Tensor:
        """Return what a holder adds, flat; zeros where its gradient is not a summand.

        Args:
            rank: rank of the holder.
            gradients: gradients of the parts that it holds, by parameter name.
            pieces: which part of each parameter it holds, by parameter name.
        """
        parts = []
        for cell in self.cells:
            region = cell.view(gradients[cell.name], pieces[cell.name]).reshape(-1)
            # Zeros: this holder computed the same gradient as another one, which would count twice, yet it needs the
            # sum.
            parts.append(region if rank in cell.adders else torch.zeros_like(region))
        return torch.cat(parts)

    def unpack(self, total: torch.Tensor, gradients: Mapping[str, torch.Tensor], pieces: Mapping[str, Piece]) -> None:
        """Write the sums over a holder's own gradients.

        Args:
            total: the flat buffer after the all-reduce.
            gradients: gradients of the parts that the holder has, by parameter name.
            pieces: which part of each parameter it holds, by parameter name.
        """
        views = [cell.view(gradients[cell.name], pieces[cell.name]) for cell in self.cells]
        sums = total.split([cell.num_elements for cell in self.cells])
        torch._foreach_copy_(views, [flat.view(view.shape) for flat, view in zip(sums, views, strict=True)])


def divide(pieces: Sequence[Mapping[str, Piece]]) -> tuple[Cell, ...]:
    """Return the cells of all parameters of a task, in one order for all processes.

    Args:
        pieces: for each rank, which part of each parameter it holds, by parameter name.

    Raises:
        ValueError: naming a parameter whose pieces do not fit together, or a region that nobody holds or adds.
    """
    # By rank and then by the holder's own order: all processes gathered the same, so they get one order.
    holders: dict[str, dict[int, Piece]] = {}
    for rank, own in enumerate(pieces):
        for name, piece in own.items():
            holders.setdefault(name, {})[rank] = piece
    return tuple(cell for name, held in holders.items() for cell in _cells(name, held))


def bundles(cells: Sequence[Cell], holdings: Sequence[Holding]) -> tuple[Bundle, ...]:
    """Return the all-reduces of a task, in one order for all processes; cells of one holder need none.

    A page that all its holders have alike, and to which all of them add, is summed as it lies.

    Args:
        cells: all cells of the task, from `divide`.
        holdings: for each rank, the pages of the task that it holds.

    Raises:
        ValueError: if a parameter has other dtypes in other processes.
    """
    dtypes = _dtypes(holdings)
    by_name: dict[str, list[Cell]] = {}
    for cell in cells:
        by_name.setdefault(cell.name, []).append(cell)
    found: list[Bundle] = []
    in_place: set[str] = set()
    for page, ranks in _alike(holdings).items():
        own = [cell for parameter in page.parameters for cell in by_name[parameter.name]]
        # Only then is the flat page itself the sum's buffer, and no copy is made.
        if len(ranks) > 1 and own and all(cell.holders == cell.adders == ranks for cell in own):
            found.append(Bundle(ranks, page.dtype, tuple(own), page))
            in_place.update(cell.name for cell in own)
    packed: dict[tuple[tuple[int, ...], torch.dtype], list[Cell]] = {}
    for cell in cells:
        if len(cell.holders) > 1 and cell.name not in in_place:
            # One buffer for all cells of the same holders: an all-reduce for each would cost the latency of each.
            packed.setdefault((cell.holders, dtypes[cell.name]), []).append(cell)
    return (*found, *(Bundle(ranks, dtype, tuple(own)) for (ranks, dtype), own in packed.items()))


def pieces_of(holding: Holding) -> dict[str, Piece]:
    """Return which part of each parameter a process holds, by parameter name."""
    return {parameter.name: parameter.piece for page in holding for parameter in page.parameters}


def _cells(name: str, held: Mapping[int, Piece]) -> list[Cell]:
    """Divide one parameter at the edges of all ranges that any process holds."""
    shapes = {piece.shape for piece in held.values()}
    dims = {piece.dim for piece in held.values() if not piece.is_whole}
    if len(shapes) > 1 or len(dims) > 1:
        raise ValueError(
            f"{name}: got pieces of shapes {sorted(shapes)}, cut along dimensions {sorted(dims)}; allowed: one shape,"
            " cut along one dimension by all processes. Load the same model and adapter in each."
        )
    shape, dim = shapes.pop(), dims.pop() if dims else 0
    size = shape[dim] if shape else 1
    ranges = {rank: ((0, size),) if piece.is_whole else piece.ranges for rank, piece in held.items()}
    # At every edge of any process: between two neighbouring edges each process holds all or nothing (L section 4.1).
    cuts = sorted({0, size}.union(*(edge for own in ranges.values() for edge in own)))
    cells = []
    for start, end in zip(cuts, cuts[1:], strict=False):
        holders = tuple(sorted(rank for rank, own in ranges.items() if any(a <= start and end <= b for a, b in own)))
        adders = tuple(rank for rank in holders if held[rank].adds)
        if not adders:
            whose = "no adding" if holders else "no"
            raise ValueError(
                f"{name}: got indices {start} to {end - 1} of {size} along dimension {dim} that {whose} process holds;"
                " allowed: every one in at least one process that adds its gradient."
            )
        num_elements = torch.Size(shape).numel() // size * (end - start)
        cells.append(Cell(name, dim, start, end, num_elements, holders, adders))
    return cells


def _alike(holdings: Sequence[Holding]) -> dict[HeldPage, tuple[int, ...]]:
    """Return every page with the ranks that have it, ascending."""
    ranks: dict[HeldPage, list[int]] = {}
    for rank, holding in enumerate(holdings):
        for page in holding:
            ranks.setdefault(page, []).append(rank)
    return {page: tuple(own) for page, own in ranks.items()}


def _dtypes(holdings: Sequence[Holding]) -> dict[str, torch.dtype]:
    """Return the dtype of each parameter."""
    dtypes: dict[str, torch.dtype] = {}
    for holding in holdings:
        for page in holding:
            for parameter in page.parameters:
                known = dtypes.setdefault(parameter.name, page.dtype)
                if known != page.dtype:
                    raise ValueError(
                        f"{parameter.name}: got {known} and {page.dtype} in different processes; allowed: one dtype."
                        " Load the same model and adapter in each."
                    )
    return dtypes
