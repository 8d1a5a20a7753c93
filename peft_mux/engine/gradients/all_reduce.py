"""`BundledAllReduce`: sums and norms of gradients where processes hold parts of the model, whichever parts they are.

    once a task   gather from every process: which piece of each parameter, in which page  -> cells, bundles, groups
    every step    pack | all-reduce of each bundle over its holders, asynchronous | wait | unpack

All processes know the bundles of all, so each begins those that it takes part in, in one common order. That order is
what keeps overlapping groups of ranks from waiting for one another in a circle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from peft_mux.engine.gradients.cells import Bundle, Cell, HeldPage, HeldParameter, Holding, bundles, divide, pieces_of
from peft_mux.engine.processes.processes import Pending, Processes
from peft_mux.engine.replicas.layout import ParallelLayout
from peft_mux.errors import ProcessError
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.sharding.pieces import Piece


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
