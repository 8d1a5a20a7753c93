"""Sums of gradients over processes that hold parts of a model: `CellSync`.

The processes exchange once per task which piece of each parameter they hold. The boundaries of all pieces divide a
parameter into cells: a process holds a cell entirely or not at all; the gradient of a cell is summed over exactly its
holders. B `[8, R]` of a column-parallel layer for <2,1>, <1,1>, <1,1>::

    rank 0 (tp rank 0)   | 0 1 2 3 |                     cell      holders
    rank 1 (tp rank 1)             | 4 5 6 7 |           0:4       0, 2, 3
    ranks 2, 3           | 0 1 2 3   4 5 6 7 |           4:8       1, 2, 3

All cells of a task with the same holders form a `Bundle`, which is one flat buffer. This rule covers data parallelism,
the partial sums of tensor parallelism, pipelines, their combinations, and replicas with different layouts (L section
4.1). All processes know all bundles and start theirs in one common order, which prevents deadlocks between overlapping
groups of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch

from peft_mux.engine.gradients import GradientSync
from peft_mux.engine.processes import Processes
from peft_mux.engine.work import StepWork
from peft_mux.errors import ProcessError
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.pieces import Piece
from peft_mux.scheduler.parallel_layout import ParallelLayout

# ------------------------------------------------------------------ who holds what


class HeldParameter(NamedTuple):
    """The position of a parameter in a page.

    Attributes:
        name: name of the parameter.
        offset: number of elements of the page before the parameter.
        stride: strides of the parameter as a view of the page, in elements.
        piece: which part of the parameter the process holds.
    """

    name: str
    offset: int
    stride: tuple[int, ...]
    piece: Piece


class HeldPage(NamedTuple):
    """One page of a task, as a process describes it to the others.

    Attributes:
        dtype: dtype of the weights in the page.
        num_elements: number of elements of the page, including gaps between parameters.
        parameters: the parameters in the page, by offset.
    """

    dtype: torch.dtype
    num_elements: int
    parameters: tuple[HeldParameter, ...]


Holding = tuple[HeldPage, ...]
"""All pages of a task in a process; empty if the process has no adapter of the task."""


def holding_of(model: MultiTaskPeftModel, name: str) -> Holding:
    """Return the pages of a task in this process.

    Args:
        model: the part of the model in this process.
        name: name of the task.
    """
    parameters, pieces = model.task_parameters(name), model.registry.pieces_of(name)
    pages = []
    for page in model.registry.slab_of(name).pages:
        # By address, because a parameter is a view of its page without a reference to it.
        storage = page.values.untyped_storage().data_ptr()
        members = [
            HeldParameter(key, int(item.storage_offset()), tuple(item.stride()), pieces[key])
            for key, item in parameters.items()
            if item.untyped_storage().data_ptr() == storage
        ]
        # Sorted, so that equal pages compare equal regardless of the order in which parameters were registered.
        members.sort(key=lambda member: member.offset)
        pages.append(HeldPage(page.values.dtype, page.values.numel(), tuple(members)))
    return tuple(pages)


def pieces_of(holding: Holding) -> dict[str, Piece]:
    """Return which part of each parameter a process holds, by parameter name."""
    return {parameter.name: parameter.piece for page in holding for parameter in page.parameters}


# ------------------------------------------------------------------ cells and bundles


@dataclass(frozen=True, slots=True)
class Cell:
    """A region of a parameter that each process holds entirely or not at all.

    Attributes:
        name: name of the parameter.
        dim: dimension along which the parameter is cut.
        start: first index of the region along `dim`.
        end: one past the last index along `dim`.
        num_elements: number of elements of the region.
        holders: ranks that hold the region, ascending; the first one counts it in gradient norms.
        adders: holders whose gradients are added; the others have copies of the same gradient.
    """

    name: str
    dim: int
    start: int
    end: int
    num_elements: int
    holders: tuple[int, ...]
    adders: tuple[int, ...]

    def view(self, part: torch.Tensor, piece: Piece) -> torch.Tensor:
        """Return this cell's region of a holder's tensor.

        Args:
            part: tensor of `piece.part_shape`, such as the holder's gradient.
            piece: which part of the parameter the holder has.
        """
        if part.numel() == self.num_elements:
            return part
        if piece.is_whole:
            return part.narrow(self.dim, self.start, self.end - self.start)
        # The ranges are consecutive in the part, as with q, k and v of a fused projection.
        before = 0
        for start, end in piece.ranges:
            if start <= self.start and self.end <= end:
                return part.narrow(self.dim, before + self.start - start, self.end - self.start)
            before += end - start
        raise AssertionError(f"{self} is in none of the ranges {piece.ranges}")


@dataclass(frozen=True, slots=True)
class Bundle:
    """Cells that are summed by one all-reduce.

    Attributes:
        holders: ranks that take part in the all-reduce, at least two.
        dtype: dtype of the gradients.
        cells: the cells, in buffer order.
        page: page that is identical on all holders and is summed in place; `None` if cells are packed into a buffer.
    """

    holders: tuple[int, ...]
    dtype: torch.dtype
    cells: tuple[Cell, ...]
    page: HeldPage | None = None

    @property
    def num_bytes(self) -> int:
        """Size of the buffer in bytes."""
        count = sum(cell.num_elements for cell in self.cells) if self.page is None else self.page.num_elements
        return count * self.dtype.itemsize

    def pack(self, rank: int, gradients: Mapping[str, torch.Tensor], pieces: Mapping[str, Piece]) -> torch.Tensor:
        """Return a holder's summand, flat; zeros for cells whose gradient it does not add.

        Args:
            rank: rank of the holder.
            gradients: gradients of the parts that it holds, by parameter name.
            pieces: which part of each parameter it holds, by parameter name.
        """
        parts = []
        for cell in self.cells:
            region = cell.view(gradients[cell.name], pieces[cell.name]).reshape(-1)
            # Zeros, because this holder has the same gradient as another one, but also needs the sum.
            parts.append(region if rank in cell.adders else torch.zeros_like(region))
        return torch.cat(parts)

    def unpack(self, total: torch.Tensor, gradients: Mapping[str, torch.Tensor], pieces: Mapping[str, Piece]) -> None:
        """Overwrite a holder's own gradients with the sums.

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
        ValueError: if the pieces of a parameter do not fit together, or if no process holds or adds a region of it.
    """
    # By rank and then by the holder's own order. All processes have the same pieces and therefore get the same order.
    held_by: dict[str, dict[int, Piece]] = {}
    for rank, held in enumerate(pieces):
        for name, piece in held.items():
            held_by.setdefault(name, {})[rank] = piece
    cells = []
    for name, held in held_by.items():
        shapes = {piece.shape for piece in held.values()}
        dims = {piece.dim for piece in held.values() if not piece.is_whole}
        if len(shapes) > 1 or len(dims) > 1:
            raise ValueError(
                f"{name} must have one shape and be cut along one dimension in all processes, got shapes "
                f"{sorted(shapes)}, cut along dimensions {sorted(dims)}. Load the same model and adapter in each."
            )
        shape, dim = shapes.pop(), dims.pop() if dims else 0
        size = shape[dim] if shape else 1
        ranges = {rank: ((0, size),) if piece.is_whole else piece.ranges for rank, piece in held.items()}
        # Cut at the boundaries of all processes: between two of them each process holds all or nothing (L 4.1).
        cuts = sorted({0, size}.union(*(edge for parts in ranges.values() for edge in parts)))
        for start, end in zip(cuts, cuts[1:], strict=False):
            holders = tuple(
                sorted(rank for rank, parts in ranges.items() if any(a <= start and end <= b for a, b in parts))
            )
            adders = tuple(rank for rank in holders if held[rank].adds)
            if not adders:
                raise ValueError(
                    f"{name}: each index must be held by at least one process that adds its gradient, got indices "
                    f"{start} to {end - 1} of {size} along dimension {dim} that {'no adding' if holders else 'no'} "
                    "process holds."
                )
            num_elements = torch.Size(shape).numel() // size * (end - start)
            cells.append(Cell(name, dim, start, end, num_elements, holders, adders))
    return tuple(cells)


def bundles(cells: Sequence[Cell], holdings: Sequence[Holding]) -> tuple[Bundle, ...]:
    """Return the all-reduces of a task, in one order for all processes; cells of one holder need none.

    A page that is identical on all its holders, and to which all of them add, is summed in place.

    Args:
        cells: all cells of the task, from `divide`.
        holdings: for each rank, the pages of the task that it holds.

    Raises:
        ValueError: if a parameter has different dtypes in different processes.
    """
    dtypes: dict[str, torch.dtype] = {}
    ranks_of_page: dict[HeldPage, tuple[int, ...]] = {}
    for rank, holding in enumerate(holdings):
        for page in holding:
            ranks_of_page[page] = (*ranks_of_page.get(page, ()), rank)
            for parameter in page.parameters:
                known = dtypes.setdefault(parameter.name, page.dtype)
                if known != page.dtype:
                    raise ValueError(
                        f"{parameter.name} must have one dtype in all processes, got {known} and {page.dtype}. Load "
                        "the same model and adapter in each."
                    )
    by_name: dict[str, list[Cell]] = {}
    for cell in cells:
        by_name.setdefault(cell.name, []).append(cell)
    all_bundles: list[Bundle] = []
    in_place: set[str] = set()
    for page, ranks in ranks_of_page.items():
        page_cells = [cell for parameter in page.parameters for cell in by_name[parameter.name]]
        # Then the flat page itself is the buffer, without a copy.
        if len(ranks) > 1 and page_cells and all(cell.holders == cell.adders == ranks for cell in page_cells):
            all_bundles.append(Bundle(ranks, page.dtype, tuple(page_cells), page))
            in_place.update(cell.name for cell in page_cells)
    packed: dict[tuple[tuple[int, ...], torch.dtype], list[Cell]] = {}
    for cell in cells:
        if len(cell.holders) > 1 and cell.name not in in_place:
            # One buffer for all cells with the same holders, to pay the latency of an all-reduce only once.
            packed.setdefault((cell.holders, dtypes[cell.name]), []).append(cell)
    all_bundles += [Bundle(ranks, dtype, tuple(members)) for (ranks, dtype), members in packed.items()]
    return tuple(all_bundles)


@dataclass(frozen=True, slots=True)
class TaskCells:
    """The cells of a task from the view of one process, after all processes have exchanged their holdings.

    Attributes:
        rank: rank of this process.
        pieces: which part of each parameter this process holds, by parameter name.
        cells: all cells of the task, over all processes.
        bundles: the bundles that this process takes part in, in the common order.
        counted_pages: numbers of the pages that this process counts completely in gradient norms.
        counted_cells: the cells that this process counts in gradient norms in addition to those pages.
        in_place: for each bundle, the number of the page that is summed in place; `None` for a packed bundle.
    """

    rank: int
    pieces: dict[str, Piece]
    cells: tuple[Cell, ...]
    bundles: tuple[Bundle, ...]
    counted_pages: tuple[int, ...]
    counted_cells: tuple[Cell, ...]
    in_place: tuple[int | None, ...]

    @classmethod
    def of(cls, rank: int, holding: Holding, cells: tuple[Cell, ...], all_bundles: Sequence[Bundle]) -> TaskCells:
        """Return the view of one process; the first holder of a cell counts it.

        Args:
            rank: rank of the process.
            holding: pages of the task that the process holds.
            cells: all cells of the task, over all processes.
            all_bundles: all bundles of the task, over all processes.
        """
        pages, counted = [], {cell: None for cell in cells if cell.holders[0] == rank}
        for number, page in enumerate(holding):
            names = {parameter.name for parameter in page.parameters}
            held = [cell for cell in cells if cell.name in names and rank in cell.holders]
            # A page that is counted completely needs one norm; its cells would need one kernel each.
            if all(cell in counted for cell in held):
                pages.append(number)
                counted = {cell: None for cell in counted if cell.name not in names}
        taken = tuple(bundle for bundle in all_bundles if rank in bundle.holders)
        in_place = tuple(None if bundle.page is None else holding.index(bundle.page) for bundle in taken)
        return cls(rank, pieces_of(holding), cells, taken, tuple(pages), tuple(counted), in_place)


# ------------------------------------------------------------------ the sums of a step


class CellSync(GradientSync):
    """Sums the gradients of processes that hold parts of a model, bundle by bundle.

    Args:
        model: the part of this process; the gradients of its tasks are in flat pages.
        processes: the processes of the run.
        layout: which process holds which part of which replica.
        is_deferred: start all sums after the passes of this process; see `GradientSync`.
        reduce_dtype: dtype in which gradients are sent and summed; by default their own.
    """

    holds_parts = True

    def __init__(
        self,
        model: MultiTaskPeftModel,
        processes: Processes,
        layout: ParallelLayout,
        *,
        is_deferred: bool = False,
        reduce_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(model, processes, is_deferred=is_deferred, reduce_dtype=reduce_dtype)
        self.layout, self.num_replicas = layout, layout.num_replicas
        self.is_leader = processes.rank in layout.leaders
        # Keyed by adapter id, because a task that was removed and registered again has other tensors.
        self._tasks: dict[str, tuple[str, TaskCells]] = {}

    def begin(self, work: StepWork) -> None:
        """Prepare every task of the step; new tasks are exchanged first. See `GradientSync.begin`."""
        self.exchange_holdings(work.sync_order or work.tasks)
        super().begin(work)

    def exchange_holdings(self, names: Sequence[str]) -> None:
        """Exchange what each process holds of new tasks; all processes must call this with the same names.

        Raises:
            ProcessError: if the parts of a task on all processes do not make up the whole task.
        """
        adapters = {name: self.model.adapter_of(name) for name in names}
        self._tasks = {name: known for name, known in self._tasks.items() if name in self.model.tasks}
        new = [name for name, adapter in adapters.items() if self._tasks.get(name, ("",))[0] != adapter]
        if not new:
            return
        rank, layout = self.processes.rank, self.layout
        replica_of_rank = [layout.place(number).replica for number in range(layout.world_size)]
        # Once per task, not per step: holdings change only when a task is registered again.
        everywhere = self.processes.gather({name: holding_of(self.model, name) for name in new})
        groups: dict[tuple[int, ...], None] = {}
        for name in new:
            holdings = [held[name] for held in everywhere]
            try:
                cells = divide([pieces_of(holding) for holding in holdings])
                task_bundles = bundles(cells, holdings)
            except ValueError as error:
                raise ProcessError(f'task "{name}", {error}') from error
            for cell in cells:
                missing = set(range(layout.num_replicas)) - {replica_of_rank[adder] for adder in cell.adders}
                if missing:
                    raise ProcessError(
                        f'task "{name}", {cell.name}: each replica must have the whole gradient, got none of indices '
                        f"{cell.start} to {cell.end - 1} along dimension {cell.dim} in replicas {sorted(missing)} of "
                        f"{layout}. Load the same model and adapter in each."
                    )
            # Includes bundles of other processes, because `new_group` is collective over the run. A dict keeps the
            # same order everywhere.
            groups |= dict.fromkeys(bundle.holders for bundle in task_bundles)
            self._tasks[name] = adapters[name], TaskCells.of(rank, holdings[rank], cells, task_bundles)
        self.processes.create_groups(groups)

    def cells_of(self, name: str) -> TaskCells:
        """Return the cells of a task whose holdings were exchanged."""
        return self._tasks[name][1]

    @torch.no_grad()
    def gradient_norms(self, tasks: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return the 2-norm of the whole gradient of each task; see `GradientSync.gradient_norms`."""
        squares_N = self.squared_norms(tasks)
        self.num_bytes += squares_N.nbytes
        self.processes.all_reduce(squares_N).wait()
        return dict(zip(tasks, squares_N.sqrt().float().unbind(), strict=True))

    @torch.no_grad()
    def squared_norms(self, names: Sequence[str]) -> torch.Tensor:
        """Return `[N]` squared norms of the regions of each task's gradient that this process counts, in float64.

        Every cell is counted by one process, so these add up to the squared norms of the whole gradients. In float64,
        so that the layout changes the sum over processes by less than fp32 precision.
        """
        squares_N = torch.zeros(len(names), dtype=torch.float64, device=self.processes.device)
        for index, name in enumerate(names):
            known, slab, gradients = self.cells_of(name), self.model.registry.slab_of(name), self._gradients(name)
            regions = [cell.view(gradients[cell.name], known.pieces[cell.name]) for cell in known.counted_cells]
            regions += [grad for page in known.counted_pages if (grad := slab.pages[page].values.grad) is not None]
            if regions:
                norms = torch._foreach_norm(regions, 2, dtype=torch.float64)
                squares_N[index] = torch.stack(norms).square().sum()
        return squares_N

    def gather(self, value: Any) -> list[Any]:
        """Gather a small plain value from every process, by rank.

        Raises:
            ProcessError: if another process has failed, died or hangs.
        """
        return self.processes.gather(value)

    def _begin_task(self, name: str) -> None:
        """Start summing the gradients of a task, bundle by bundle."""
        known, slab, gradients = self.cells_of(name), self.model.registry.slab_of(name), self._gradients(name)
        for bundle, page in zip(known.bundles, known.in_place, strict=True):
            begin = partial(self.processes.all_reduce, ranks=bundle.holders)
            if page is None:
                buffer = bundle.pack(known.rank, gradients, known.pieces)
                unpack_sum = partial(bundle.unpack, buffer, gradients, known.pieces)
                self._begin_sum(buffer, begin, unpack_sum, dtype=self.reduce_dtype)
            else:
                gradient = slab.pages[page].values.grad
                assert gradient is not None, "gradients are bound before a step"
                self._begin_sum(gradient, begin, dtype=self.reduce_dtype)

    def _gradients(self, name: str) -> dict[str, torch.Tensor]:
        """Return the gradients of this process by parameter."""
        gradients = {}
        for key, parameter in self.model.task_parameters(name).items():
            assert parameter.grad is not None, "gradients are bound before a step"
            gradients[key] = parameter.grad
        return gradients
