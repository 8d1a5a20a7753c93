"""`PartSums`: sums and norms of gradients where processes hold parts of the model, whichever parts they are.

    told once     every process: which piece of each parameter, in which page        -> cells, bundles, groups of ranks
    every step    pack | all-reduce of each bundle over its holders, asynchronous | wait | unpack

All processes know the bundles of all, so each begins those that it takes part in, in one common order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from peft_mux.engine.gradient_cells import Bundle, Cell, HeldPage, HeldParameter, Holding, bundles, divide, pieces_of
from peft_mux.engine.layout import ParallelLayout
from peft_mux.engine.processes import Pending, Processes
from peft_mux.errors import ProcessError
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.pieces import Piece


@dataclass(frozen=True, slots=True)
class TaskParts:
    """What a process knows of a task after all have told.

    Attributes:
        rank: of this process.
        own: what this process holds.
        pieces: of this process.
        cells: of the task.
        bundles: that this process takes part in.
        counted_pages: numbers of own pages that this process counts in norms, whole.
        counted_cells: others that it counts.
        in_place: number of the own page that each bundle is, in the order of bundles; `None` for a packed one.
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
    def of(cls, rank: int, own: Holding, cells: tuple[Cell, ...], found: Sequence[Bundle]) -> TaskParts:
        """Return the share of one process; a cell is counted by its owner."""
        pages, counted = [], {cell: None for cell in cells if cell.owner == rank}
        for number, page in enumerate(own):
            names = {parameter.name for parameter in page.parameters}
            held = [cell for cell in cells if cell.name in names and rank in cell.holders]
            if all(cell in counted for cell in held):
                pages.append(number)
                counted = {cell: None for cell in counted if cell.name not in names}
        taken = tuple(bundle for bundle in found if rank in bundle.holders)
        in_place = tuple(None if bundle.page is None else own.index(bundle.page) for bundle in taken)
        return cls(rank, own, pieces_of(own), cells, taken, tuple(pages), tuple(counted), in_place)

    @property
    def num_bytes(self) -> int:
        """That one step sums over this process and others, losses and norms aside."""
        return sum(bundle.num_bytes for bundle in self.bundles)


@dataclass(frozen=True, slots=True)
class PartSum:
    """A bundle whose sum is under way.

    Attributes:
        bundle: that is summed.
        buffer: that holds it.
        pending: the sum.
        gradients: of this process, by parameter.
        pieces: likewise.
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


class PartSums:
    """The sums and norms of all tasks.

    Args:
        model: what of it lies here.
        processes: of the run, connected.
        layout: of the run.

    Example:
        >>> sums = PartSums(model, processes, ParallelLayout.parse("<2,1>, <1,1>x2"))  # doctest: +SKIP
        >>> sums.learn(["sst2"])  # every process  # doctest: +SKIP
        >>> for one in sums.begin("sst2"): one.wait()  # doctest: +SKIP
    """

    def __init__(self, model: MultiTaskPeftModel, processes: Processes, layout: ParallelLayout) -> None:
        """Know no task yet."""
        self.model, self.processes, self.layout = model, processes, layout
        self._tasks: dict[str, tuple[str, TaskParts]] = {}

    def learn(self, names: Sequence[str]) -> None:
        """Tell what this process holds of tasks that are new; every process calls this with the same names.

        Raises:
            ProcessError: if the processes do not hold a task together.
        """
        adapters = {name: self.model.adapter_of(name) for name in names}
        self._tasks = {name: known for name, known in self._tasks.items() if name in self.model.tasks}
        new = [name for name, adapter in adapters.items() if self._tasks.get(name, ("",))[0] != adapter]
        if not new:
            return
        told = self.processes.gather({name: holding_of(self.model, name) for name in new})
        groups: dict[tuple[int, ...], None] = {}
        for name in new:
            holdings = tuple(own[name] for own in told)
            try:
                cells = divide([pieces_of(holding) for holding in holdings])
                found = bundles(cells, holdings)
            except ValueError as error:
                raise ProcessError(f'task "{name}", {error}') from error
            self._check_replicas(name, cells)
            groups |= dict.fromkeys(bundle.holders for bundle in found)
            rank = self.processes.rank
            self._tasks[name] = adapters[name], TaskParts.of(rank, holdings[rank], cells, found)
        self.processes.meet(groups)

    def of(self, name: str) -> TaskParts:
        """Return what is known of a task."""
        return self._tasks[name][1]

    def begin(self, name: str) -> list[PartSum]:
        """Begin the sums of a task, whose gradients are bound and complete here."""
        parts, slab = self.of(name), self.model.task_slab(name)
        gradients = self._gradients(name)
        begun = []
        for bundle, number in zip(parts.bundles, parts.in_place, strict=True):
            if number is None:
                buffer = bundle.pack(parts.rank, gradients, parts.pieces)
            else:
                gradient = slab.pages[number].values.grad
                assert gradient is not None, "gradients are bound before a step"
                buffer = gradient
            begun.append(PartSum(bundle, buffer, self.processes.sum(buffer, bundle.holders), gradients, parts.pieces))
        return begun

    @torch.no_grad()
    def squared_norms(self, names: Sequence[str]) -> torch.Tensor:
        """Return `[N]` squared norms of what of each task's gradient is counted here, in float64.

        Every cell is counted by one process, so that these add up to the squares of the whole gradients.
        """
        device = self.processes.device
        squares_N = torch.zeros(len(names), dtype=torch.float64, device=device)
        for index, name in enumerate(names):
            parts, slab, gradients = self.of(name), self.model.task_slab(name), self._gradients(name)
            regions = [cell.view(gradients[cell.name], parts.pieces[cell.name]) for cell in parts.counted_cells]
            regions += [grad for page in parts.counted_pages if (grad := slab.pages[page].values.grad) is not None]
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
        """Hold every replica to having all of a task."""
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
    """Return what a process holds of a task."""
    parameters, pieces = model.task_parameters(name), model.task_pieces(name)
    pages = []
    for page in model.task_slab(name).pages:
        storage = page.values.untyped_storage().data_ptr()
        members = [
            HeldParameter(key, int(item.storage_offset()), tuple(item.stride()), pieces[key])
            for key, item in parameters.items()
            if item.untyped_storage().data_ptr() == storage
        ]
        members.sort(key=lambda member: member.offset)
        pages.append(HeldPage(page.values.dtype, page.values.numel(), tuple(members)))
    return tuple(pages)
