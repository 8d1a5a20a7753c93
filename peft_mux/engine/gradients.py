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

# MERGED: `BundledAllReduce`: sums and norms of gradients where processes hold parts of the model, whichever parts
# MERGED: they are.
# MERGED: once a task   gather from every process: which piece of each parameter, in which page  -> cells, bundles,
# MERGED: groups
# MERGED:     every step    pack | all-reduce of each bundle over its holders, asynchronous | wait | unpack
# MERGED: All processes know the bundles of all, so each begins those that it takes part in, in one common order. That
# MERGED: order is
# MERGED: what keeps overlapping groups of ranks from waiting for one another in a circle.
# MERGED: Gradient sync over adapters: every replica takes its share of each global batch; gradients of a task are
# MERGED: summed.
# MERGED: Losses are divided by the number of targets of the global batch before anything is divided among replicas,
# MERGED: so the sum
# MERGED: of what the replicas compute is what one process would. Frozen weights are never sent.
# MERGED:     rank 0   pass of hTask 1 | pass of hTask 2 | ...
# MERGED: all-reduce                 ~~ hTask 1 ~~~~~  ~~ hTask 2 ~~      each task: one flat buffer a page, or a
# MERGED: bundle

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from peft_mux.data.batch import MuxBatch
from peft_mux.engine.layout import ParallelLayout
from peft_mux.engine.processes import Pending, Processes
from peft_mux.engine.work import StepResult, StepWork, pack, unpack
from peft_mux.errors import ProcessError
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.objectives.objective import OWN
from peft_mux.modeling.sharding import Piece


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


@dataclass(frozen=True, slots=True)
class TaskCells:
    """What a process knows of a task after all processes have exchanged what they hold of it.

    Attributes:
        rank: rank of this process.
        own: pages of the task that this process holds.
        pieces: what of each parameter this process holds, by parameter name.
        cells: all cells of the task, over all processes.
        bundles: the bundles that this process takes part in, in the common order.
        counted_pages: numbers of the pages that this process counts in gradient norms as a whole.
        counted_cells: the cells that this process counts in gradient norms beside those pages.
        in_place: for each bundle, the number of the page that is summed as it lies; `None` for a packed bundle.
    """

    rank: int
    own: Holding
    pieces: dict[str, Piece]
    cells: tuple[Cell, ...]
    bundles: tuple[Bundle, ...]
    counted_pages: tuple[int, ...]
    counted_cells: tuple[Cell, ...]
    in_place: tuple[int | None, ...]

    @classmethod
    def of(cls, rank: int, own: Holding, cells: tuple[Cell, ...], found: Sequence[Bundle]) -> TaskCells:
        """Return what one process knows of a task; a cell is counted by its owner.

        Args:
            rank: rank of the process.
            own: pages of the task that the process holds.
            cells: all cells of the task, over all processes.
            found: all bundles of the task, over all processes.
        """
        pages, counted = [], {cell: None for cell in cells if cell.owner == rank}
        for number, page in enumerate(own):
            names = {parameter.name for parameter in page.parameters}
            held = [cell for cell in cells if cell.name in names and rank in cell.holders]
            # A page that is counted whole becomes one norm; its cells one by one would be a kernel for each.
            if all(cell in counted for cell in held):
                pages.append(number)
                counted = {cell: None for cell in counted if cell.name not in names}
        taken = tuple(bundle for bundle in found if rank in bundle.holders)
        in_place = tuple(None if bundle.page is None else own.index(bundle.page) for bundle in taken)
        return cls(rank, own, pieces_of(own), cells, taken, tuple(pages), tuple(counted), in_place)

    @property
    def num_bytes(self) -> int:
        """Bytes that one step sums over this process and others, losses and norms aside."""
        return sum(bundle.num_bytes for bundle in self.bundles)


@dataclass(frozen=True, slots=True)
class PendingBundle:
    """A bundle whose all-reduce is under way.

    Attributes:
        bundle: the bundle that is summed.
        buffer: flat tensor that is summed in place: a page of gradients, or packed cells.
        pending: the all-reduce to wait for.
        gradients: gradients of this process, by parameter name.
        pieces: what of each parameter this process holds, by parameter name.
    """

    bundle: Bundle
    buffer: torch.Tensor
    pending: Pending
    gradients: dict[str, torch.Tensor]
    pieces: dict[str, Piece]

    def wait(self) -> None:
        """Wait for the sum, and write it over the gradients.

        Raises:
            ProcessError: if another process has failed, died or hangs.
        """
        self.pending.wait()
        if self.bundle.page is None:
            self.bundle.unpack(self.buffer, self.gradients, self.pieces)


class BundledAllReduce:
    """All-reduces of the gradients of all tasks, and the norms of these gradients.

    Args:
        model: the part of the model that lies in this process.
        processes: the processes of the run, connected.
        layout: which process holds which part of which replica.

    Example:
        >>> sums = BundledAllReduce(model, processes, ParallelLayout.parse("<2,1>, <1,1>x2"))  # doctest: +SKIP
        >>> sums.exchange_holdings(["sst2"])  # every process  # doctest: +SKIP
        >>> for one in sums.begin("sst2"): one.wait()  # doctest: +SKIP
    """

    def __init__(self, model: MultiTaskPeftModel, processes: Processes, layout: ParallelLayout) -> None:
        """Know no task yet."""
        self.model, self.processes, self.layout = model, processes, layout
        # With the adapter id: a task that was removed and came again under its name has other tensors.
        self._tasks: dict[str, tuple[str, TaskCells]] = {}

    def exchange_holdings(self, names: Sequence[str]) -> None:
        """Exchange what each process holds of tasks that are new; every process calls this with the same names.

        Args:
            names: the tasks of the step; those that are known already cost nothing.

        Raises:
            ProcessError: if the processes do not hold a task together.
        """
        adapters = {name: self.model.adapter_of(name) for name in names}
        self._tasks = {name: known for name, known in self._tasks.items() if name in self.model.tasks}
        new = [name for name, adapter in adapters.items() if self._tasks.get(name, ("",))[0] != adapter]
        if not new:
            return
        # Once a task, not a step: what a process holds of it changes only when the task comes anew.
        everywhere = self.processes.gather({name: holding_of(self.model, name) for name in new})
        groups: dict[tuple[int, ...], None] = {}
        for name in new:
            holdings = tuple(own[name] for own in everywhere)
            try:
                cells = divide([pieces_of(holding) for holding in holdings])
                found = bundles(cells, holdings)
            except ValueError as error:
                raise ProcessError(f'task "{name}", {error}') from error
            self._check_replicas(name, cells)
            # Of all bundles, also those of others: `new_group` is collective over the whole run. A dict keeps one order
            # everywhere.
            groups |= dict.fromkeys(bundle.holders for bundle in found)
            rank = self.processes.rank
            self._tasks[name] = adapters[name], TaskCells.of(rank, holdings[rank], cells, found)
        self.processes.create_groups(groups)

    def cells_of(self, name: str) -> TaskCells:
        """Return what this process knows of a task whose holdings were exchanged."""
        return self._tasks[name][1]

    def begin(self, name: str) -> list[PendingBundle]:
        """Begin the all-reduces of a task whose gradients are bound and complete in this process."""
        known, slab = self.cells_of(name), self.model.registry.slab_of(name)
        gradients = self._gradients(name)
        begun = []
        for bundle, number in zip(known.bundles, known.in_place, strict=True):
            if number is None:
                buffer = bundle.pack(known.rank, gradients, known.pieces)
            else:
                gradient = slab.pages[number].values.grad
                assert gradient is not None, "gradients are bound before a step"
                buffer = gradient
            pending = self.processes.all_reduce(buffer, bundle.holders)
            begun.append(PendingBundle(bundle, buffer, pending, gradients, known.pieces))
        return begun

    @torch.no_grad()
    def squared_norms(self, names: Sequence[str]) -> torch.Tensor:
        """Return `[N]` squared norms of what of each task's gradient is counted in this process, in float64.

        Every cell is counted by one process, so that these add up to the squares of the whole gradients. In float64,
        as the sum over processes must not depend on how the layout cut a parameter by more than fp32 shows.

        Args:
            names: the names of the N tasks.
        """
        device = self.processes.device
        squares_N = torch.zeros(len(names), dtype=torch.float64, device=device)
        for index, name in enumerate(names):
            known, slab, gradients = self.cells_of(name), self.model.registry.slab_of(name), self._gradients(name)
            regions = [cell.view(gradients[cell.name], known.pieces[cell.name]) for cell in known.counted_cells]
            regions += [grad for page in known.counted_pages if (grad := slab.pages[page].values.grad) is not None]
            if regions:
                norms = torch._foreach_norm(regions, 2, dtype=torch.float64)
                squares_N[index] = torch.stack(norms).square().sum()
        return squares_N

    def _gradients(self, name: str) -> dict[str, torch.Tensor]:
        """Return the gradients of this process by parameter."""
        found = {}
        for key, parameter in self.model.task_parameters(name).items():
            assert parameter.grad is not None, "gradients are bound before a step"
            found[key] = parameter.grad
        return found

    def _check_replicas(self, name: str, cells: Sequence[Cell]) -> None:
        """Require that the processes of every replica hold all of a task among them."""
        of_rank = [self.layout.place(rank).replica for rank in range(self.layout.world_size)]
        for cell in cells:
            missing = set(range(self.layout.num_replicas)) - {of_rank[rank] for rank in cell.adders}
            if missing:
                raise ProcessError(
                    f'task "{name}", {cell.name}: got no gradient of indices {cell.start} to {cell.end - 1} along'
                    f" dimension {cell.dim} in replicas {sorted(missing)} of {self.layout}; allowed: all of it in each"
                    " replica. Load the same model and adapter in each."
                )


def holding_of(model: MultiTaskPeftModel, name: str) -> Holding:
    """Return the pages of a task that a process holds, as other processes have to know them.

    Args:
        model: the part of the model that lies in the process.
        name: name of the task.
    """
    parameters, pieces = model.task_parameters(name), model.registry.pieces_of(name)
    pages = []
    for page in model.registry.slab_of(name).pages:
        # By address, as a parameter is a view of its page and knows nothing of it.
        storage = page.values.untyped_storage().data_ptr()
        members = [
            HeldParameter(key, int(item.storage_offset()), tuple(item.stride()), pieces[key])
            for key, item in parameters.items()
            if item.untyped_storage().data_ptr() == storage
        ]
        # Sorted, so that equal pages compare equal whatever order a process registered the parameters in.
        members.sort(key=lambda member: member.offset)
        pages.append(HeldPage(page.values.dtype, page.values.numel(), tuple(members)))
    return tuple(pages)


class GradientSync:
    """Sums the gradients and losses of all replicas while passes are still running.

    Args:
        model: the model of this process, whole or a part; the gradients of its tasks lie in flat pages.
        processes: the processes of the run.
        layout: which process holds which part of which replica; by default each process holds the whole model.

    Attributes:
        num_tokens: tokens that went through the backbone of this process, over all steps.
        num_bytes: bytes of the gradients, losses and norms that this process summed with others in the last step; 0
            for a process that is alone.
        bundled: the all-reduces of a layout whose processes hold parts of the model; `None` where each holds all of it.
    """

    def __init__(self, model: MultiTaskPeftModel, processes: Processes, layout: ParallelLayout | None = None) -> None:
        """Remember the model and the processes; communicate with nobody yet."""
        self.model, self.processes = model, processes
        self.num_tokens, self.num_bytes = 0, 0
        self.bundled = None
        if layout is not None and not layout.is_data_parallel:
            self.bundled = BundledAllReduce(model, processes, layout)
        self._counts_losses = layout is None or processes.rank in layout.leaders
        self._order: list[str] = []
        self._passes_left: Counter[str] = Counter()
        self._pending: list[Pending | PendingBundle] = []

    def begin(self, work: StepWork) -> None:
        """Make every task of the step ready, also those of which this process has no rows: it adds zeros.

        Args:
            work: the step that is about to run.

        Raises:
            ProcessError: if the processes do not hold the tasks together.
        """
        self._passes_left = Counter(name for micro_batch in work.micro_batches for name in micro_batch.task_names)
        self._order, self._pending, self.num_bytes = list(work.sync_order or work.tasks), [], 0
        if self.processes.is_alone:
            return
        if self.bundled is not None:
            self.bundled.exchange_holdings(self._order)
        for name in self._order:
            # Also of tasks without rows here: all-reduces are collective, so this process takes part, with zeros.
            self.model.registry.slab_of(name).bind_gradients()

    def after_backward(self, micro_batch: MuxBatch) -> None:
        """Begin the all-reduces of the tasks whose gradients are complete in this process.

        Args:
            micro_batch: the micro-batch whose backward is done in all layers that lie here.
        """
        self.num_tokens += micro_batch.num_tokens
        self._passes_left.subtract(micro_batch.task_names)
        # In the order of the plan, whatever completes first: a backend matches collectives by the order in which each
        # process begins them, and processes finish their tasks in different orders.
        while self._order and self._passes_left[self._order[0]] == 0:
            self._begin_all_reduce(self._order.pop(0))

    def finish(self, result: StepResult) -> StepResult:
        """Wait for all all-reduces; return the losses over the rows of all replicas, the same bits on every process.

        Args:
            result: the result of this process, with the losses over the rows of its replica.

        Returns:
            The result with the losses over all rows; and with gradient norms, where processes hold parts of the model.

        Raises:
            ProcessError: if another process has failed, died or hangs.
        """
        while self._order:
            self._begin_all_reduce(self._order.pop(0))
        if self.processes.is_alone or not result.losses:
            return result
        figures = pack(result.losses, result.statistics)
        # All processes of a replica have the same losses, which must be counted once: by the leader.
        if not self._counts_losses:
            figures = torch.zeros_like(figures)
        # Begun before the waits, so that it travels beside the last gradients.
        self._sum(figures)
        for pending in self._pending:
            pending.wait()
        self._pending = []
        # After the waits, as norms are of sums. A process that holds all of a task takes them from its own pages later.
        norms = None if self.bundled is None else self.gradient_norms(list(result.losses))
        losses, statistics = unpack(figures, result.losses, result.statistics)
        failures = self._all_failures(result)
        return replace(result, losses=losses, statistics=statistics, norms=norms, loss_failures=failures)

    def _all_failures(self, result: StepResult) -> dict[str, str]:
        """Return why losses of tasks' own have failed on any process, the same on all."""
        # Only a process with rows of a task can see its function fail, and all must tell the same of it.
        if not any(self.model.objectives.of(name).name == OWN for name in result.losses):
            return result.loss_failures
        found: dict[str, str] = {}
        for own in self.processes.gather(result.loss_failures):
            found = {**own, **found}
        return found

    def total(self, values: torch.Tensor) -> torch.Tensor:
        """Return the sum over the replicas of values that all processes of a replica have alike; all call this.

        Args:
            values: numbers of this replica; not changed.

        Raises:
            ProcessError: if another process has failed, died or hangs.
        """
        if self.processes.is_alone:
            return values
        summed = values.float().clone() if self._counts_losses else torch.zeros_like(values, dtype=torch.float32)
        self.processes.all_reduce(summed).wait()
        return summed

    @torch.no_grad()
    def gradient_norms(self, tasks: Sequence[str]) -> dict[str, torch.Tensor]:
        """Return the 2-norm of the whole gradient of each task, the same bits on every process; after `finish`.

        Args:
            tasks: names of the tasks, the same on every process; all processes call this.

        Raises:
            ProcessError: if another process has failed, died or hangs.
        """
        if self.bundled is None or self.processes.is_alone or not tasks:
            return {name: nn.utils.get_total_norm(self._page_gradients(name)) for name in tasks}
        squares_N = self.bundled.squared_norms(tasks)
        self.num_bytes += squares_N.nbytes
        self.processes.all_reduce(squares_N).wait()
        return dict(zip(tasks, squares_N.sqrt().float().unbind(), strict=True))

    def gather(self, value: Any) -> list[Any]:
        """Return what every process has given, by rank, where processes hold parts; otherwise this one's alone.

        Args:
            value: a small plain value of this process.

        Raises:
            ProcessError: if another process has failed, died or hangs.
        """
        return [value] if self.bundled is None else self.processes.gather(value)

    def bytes_per_step(self, tasks: Sequence[str]) -> int:
        """Return what `num_bytes` is after a step of these tasks and their norms.

        For each task the elements that this process holds together with others, in their dtype (of a page that is
        summed as it lies, all elements), 4 bytes for its loss and for each of its statistics, and 8 for its norm where
        processes hold parts.

        Args:
            tasks: names of the tasks; where processes hold parts, of tasks that took part in a step before.
        """
        if self.processes.is_alone or not tasks:
            return 0
        if self.bundled is not None:
            return (
                sum(self.bundled.cells_of(name).num_bytes for name in tasks) + 12 * len(tasks) + self._statistics(tasks)
            )
        pages = [page for name in tasks for page in self.model.registry.slab_of(name).pages]
        return sum(page.values.nbytes for page in pages) + 4 * len(tasks) + self._statistics(tasks)

    def _statistics(self, tasks: Sequence[str]) -> int:
        """Return the bytes of what is logged beside the losses of tasks."""
        return 4 * sum(len(self.model.objectives.statistic_names(name)) for name in tasks)

    def _begin_all_reduce(self, name: str) -> None:
        """Begin to sum the gradients of a task, as pages or as bundles."""
        if self.bundled is None:
            for gradient in self._page_gradients(name):
                self._sum(gradient)
        elif not self.processes.is_alone:
            begun = self.bundled.begin(name)
            self.num_bytes += sum(one.bundle.num_bytes for one in begun)
            self._pending += begun

    def _page_gradients(self, name: str) -> list[torch.Tensor]:
        pages = self.model.registry.slab_of(name).pages
        return [page.values.grad for page in pages if page.values.grad is not None]

    def _sum(self, tensor: torch.Tensor) -> None:
        if self.processes.is_alone:
            return
        self.num_bytes += tensor.numel() * tensor.element_size()
        self._pending.append(self.processes.all_reduce(tensor))
