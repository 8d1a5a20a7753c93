"""`TaskSlab`: all trainable weights of a task in one flat buffer, and their gradients in another.

PEFT's parameters become views of the buffers, so names, saving and loading stay PEFT's, while the optimizer, the norm,
the clipping and the copies of a task are each one operation over one tensor. In which order and form parameters lie
there, their kind of adapters says (`SlabLayout`).

Kernels read in words of 16 bytes. So every parameter takes a multiple of eight elements; what is left over stays zero
in weights and gradients.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import nn

GROUP = 8
"""Elements that the size of any parameter in a page is a multiple of."""

_HOOKS = operator.attrgetter("_backward_hooks")
_LATE_HOOKS = operator.attrgetter("_post_accumulate_grad_hooks")


class Slot(NamedTuple):
    """How one parameter lies in its page.

    Attributes:
        block: parameters of one block lie side by side; blocks keep the order of their first parameters.
        order: parameters of a block with a lower number lie first.
        num_elements: elements that it takes, padding included.
        is_transposed: whether it lies column by column.
    """

    block: str
    order: int
    num_elements: int
    is_transposed: bool


SlabLayout = Callable[[str, nn.Parameter], Slot]
"""Returns how a parameter lies, from its PEFT name without the adapter id."""


def round_up_to_group(count: int) -> int:
    """Return the next multiple of `GROUP`."""
    return -(-count // GROUP) * GROUP


def plain_slot(name: str, parameter: nn.Parameter) -> Slot:
    """Lay parameters out as they are, one after another."""
    return Slot("", 0, round_up_to_group(parameter.numel()), False)


class _Entry(NamedTuple):
    parameter: nn.Parameter
    offset: int
    is_transposed: bool

    def rows_of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this parameter's part of a flat buffer as it lies there: contiguous, perhaps transposed."""
        shape = self.parameter.shape[::-1] if self.is_transposed else self.parameter.shape
        return flat[self.offset : self.offset + self.parameter.numel()].view(shape)

    def view_of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this parameter's part of a flat buffer, in the parameter's shape."""
        rows = self.rows_of(flat)
        # PEFT sees the shape that it made, kernels the rows as they lie: one memory, two views.
        return rows.t() if self.is_transposed else rows


class Factor(NamedTuple):
    """Where kernels find one parameter of an adapter, in the form in which it lies.

    Attributes:
        values: the weights (for LoRA `[R, width]`), in the dtype that was asked for.
        gradient: their gradient, in the dtype of the parameter; `None` where none is bound.
    """

    values: torch.Tensor
    gradient: torch.Tensor | None


class Page:
    """Weights of one dtype that are treated alike by weight decay.

    Attributes:
        decays: whether weight decay applies to them.
        values: 1-D, a leaf for optimizers.
        num_bindings: how often a new buffer of gradients was made; addresses taken before are no longer true.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        slots: Mapping[str, Slot],
        *,
        decays: bool,
        device: torch.device | None = None,
    ) -> None:
        """Copy the weights into a flat buffer and make the parameters views of it."""
        self.decays = decays
        self.num_bindings = 0
        self._shadows: dict[torch.dtype, torch.Tensor] = {}
        first = next(iter(parameters.values()), torch.zeros(0, device=device))
        size = sum(slots[name].num_elements for name in parameters) or GROUP
        # Zeros, as padding between parameters takes part in norms and updates and must stay zero.
        flat = first.new_zeros(size, requires_grad=False)
        self._entries: dict[int, _Entry] = {}
        offset = 0
        for name, parameter in parameters.items():
            entry = _Entry(parameter, offset, slots[name].is_transposed)
            view = entry.view_of(flat)
            # PEFT's parameter stays the object that it was, with its name; only its memory moves.
            view.copy_(parameter.data)
            parameter.data = view
            # By identity, as tensors compare by element.
            self._entries[id(parameter)] = entry
            offset += slots[name].num_elements
        self._parameters = [entry.parameter for entry in self._entries.values()]
        self.values = nn.Parameter(flat)

    def factor(self, parameter: nn.Parameter, dtype: torch.dtype) -> Factor | None:
        """Return where a factor lies, in a dtype; `None` for a parameter that is not of this page."""
        entry = self._entries.get(id(parameter))
        if entry is None:
            return None
        # As it lies, since kernels write weights' gradients in the layout of the weights.
        gradient = None if self.values.grad is None else entry.rows_of(self.values.grad)
        return Factor(entry.rows_of(self._values_in(dtype)), gradient)

    @property
    def parameter_ids(self) -> set[int]:
        """Ids of the parameters of the page."""
        return set(self._entries)

    def is_in_place(self, device: torch.device) -> bool:
        """Whether the page is on a device, and every parameter still a view of it.

        Args:
            device: where the weights should be.
        """
        values = self.values.data
        views = ((entry.parameter.data, entry.view_of(values)) for entry in self._entries.values())
        return values.device == device and all(
            data.data_ptr() == view.data_ptr() and data.dtype == view.dtype and data.stride() == view.stride()
            for data, view in views
        )

    def part(self, parameter: nn.Parameter, flat: torch.Tensor) -> torch.Tensor | None:
        """Return the part of a buffer as long as the page that stands for a parameter, in the parameter's shape.

        Returns:
            A view; `None` for a parameter that is not of this page.
        """
        entry = self._entries.get(id(parameter))
        return None if entry is None else entry.view_of(flat)

    def _values_in(self, dtype: torch.dtype) -> torch.Tensor:
        if dtype == self.values.dtype:
            return self.values.detach()
        # Cast once and refreshed before each pass, instead of once in every layer.
        if dtype not in self._shadows:
            self._shadows[dtype] = self.values.detach().to(dtype)
        return self._shadows[dtype]

    @torch.no_grad()
    def refresh_copies(self) -> None:
        """Bring the copies in other dtypes, which kernels read, up to date with the weights."""
        for copy in self._shadows.values():
            copy.copy_(self.values)

    def watched(self) -> list[int]:
        """Return the ids of parameters that have hooks on their gradients."""
        # Every parameter of every task in every pass: without a step of Python for each.
        if not any(map(_HOOKS, self._parameters)) and not any(map(_LATE_HOOKS, self._parameters)):
            return []
        return [id(p) for p in self._parameters if _HOOKS(p) or _LATE_HOOKS(p)]

    def bind_gradients(self) -> None:
        """See to it that every parameter has a gradient that is a view of one flat buffer; new ones are zero."""
        if self.values.grad is None:
            # Tables of kernels hold the old addresses; by this number they are known to be stale.
            self.num_bindings += 1
            self.values.grad = torch.zeros_like(self.values)
            for entry in self._entries.values():
                if entry.parameter.grad is not None:  # of a pass before the weights were laid out anew
                    view = entry.view_of(self.values.grad)
                    view.copy_(entry.parameter.grad)
                    entry.parameter.grad = view
        # Asked of every parameter of every task in every pass, so in the fewest steps of Python.
        for parameter in [p for p in self._parameters if p.grad is None]:
            view = self._entries[id(parameter)].view_of(self.values.grad)
            # `zero_grad` takes a parameter's gradient away, and leaves its numbers in the buffer.
            view.zero_()
            parameter.grad = view

    def drop_gradients(self) -> None:
        """Free the gradients."""
        self.values.grad = None
        for entry in self._entries.values():
            entry.parameter.grad = None


class TaskSlab:
    """The pages of one task.

    Args:
        parameters: the task's own, by their PEFT names. Where there are none (a stage without adapters of the task),
            there is one page of zeros that nothing reads, so that optimizers need no case of their own.
        device: the device on which that page lies.
        layout: tells how each parameter lies in its page.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        device: torch.device | None = None,
        *,
        layout: SlabLayout = plain_slot,
    ) -> None:
        """Lay the weights out."""
        slots = {name: layout(name, parameter) for name, parameter in parameters.items()}
        alike: dict[tuple[torch.dtype, bool], dict[str, nn.Parameter]] = {}
        for name in _in_order(slots):
            # A page is one tensor to an optimizer, which has one dtype and one weight decay for it.
            alike.setdefault((parameters[name].dtype, decays(name)), {})[name] = parameters[name]
        with torch.no_grad():
            self.pages = [Page(members, slots, decays=does_decay) for (_, does_decay), members in alike.items()]
            self.pages = self.pages or [Page({}, {}, decays=True, device=device)]

    @property
    def num_bindings(self) -> int:
        """Changes whenever gradients lie somewhere else than before."""
        return sum(page.num_bindings for page in self.pages)

    def factor(self, parameter: nn.Parameter, dtype: torch.dtype) -> Factor | None:
        """Return where kernels find a parameter, in the form in which it lies; `None` for one that is not here.

        Args:
            parameter: one of this task's.
            dtype: the dtype of the values; a copy is made where it is not that of the weights.
        """
        found = (page.factor(parameter, dtype) for page in self.pages)
        return next((factor for factor in found if factor is not None), None)

    @property
    def parameter_ids(self) -> set[int]:
        """Ids of all parameters of the task."""
        return {number for page in self.pages for number in page.parameter_ids}

    def is_in_place(self, device: torch.device) -> bool:
        """Whether the weights lie on a device as they were laid out: neither moved nor cast since."""
        return all(page.is_in_place(device) for page in self.pages)

    def watched(self) -> list[int]:
        """Return the ids of parameters whose gradients somebody waits to see pass through autograd."""
        return [number for page in self.pages for number in page.watched()]

    def refresh_copies(self) -> None:
        """Bring the copies in other dtypes up to date with the weights; once before every pass."""
        for page in self.pages:
            page.refresh_copies()

    def bind_gradients(self) -> None:
        """Make ready for a backward pass."""
        for page in self.pages:
            page.bind_gradients()

    def drop_gradients(self) -> None:
        """Free the gradients."""
        for page in self.pages:
            page.drop_gradients()


def decays(name: str) -> bool:
    """Whether weight decay applies to a parameter, as Trainer has it: not to biases and norms."""
    # The biases of recurrent layers are numbered: `bias_ih_l0`.
    return "bias" not in name.rpartition(".")[2] and "norm" not in name.lower()


def _in_order(slots: Mapping[str, Slot]) -> list[str]:
    """Return the names block by block, and within each block in their order."""
    blocks: dict[str, int] = {}
    keys = {
        name: (blocks.setdefault(slot.block, len(blocks)), slot.order, number)
        for number, (name, slot) in enumerate(slots.items())
    }
    return sorted(slots, key=keys.__getitem__)
