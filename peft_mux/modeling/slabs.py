"""`TaskSlab`: all trainable weights of a task in one flat buffer, and their gradients in another.

PEFT's parameters become views of the buffers, so names, saving and loading stay PEFT's, while the optimizer, the norm,
the clipping and the copies of a task are each one operation over one tensor. The kind of
the adapter determines the order and form of its parameters there (`SlabLayout`).

Kernels read in words of 16 bytes. So every parameter takes a multiple of eight elements; the padding stays zero in
weights and gradients.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import torch
from torch import nn

GROUP = 8
"""The size of any parameter in a page is a multiple of so many elements."""

_HOOKS = operator.attrgetter("_backward_hooks")
_LATE_HOOKS = operator.attrgetter("_post_accumulate_grad_hooks")


class Slot(NamedTuple):
    """The layout of one parameter in its page.

    Attributes:
        block: parameters of one block are adjacent; blocks keep the order of their first parameters.
        order: parameters of a block with a lower number come first.
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


_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|\.)norm(?:$|\.)|_norm(?:$|\.)")
"""Parts of the names of parameters without weight decay: the patterns of `Trainer.get_decay_parameter_names`."""


def decays(name: str) -> bool:
    """Return whether weight decay applies to a parameter outside an `nn.LayerNorm`, as in Trainer."""
    return _NO_DECAY.search(name.lower()) is None


PageKind = Callable[[str, nn.Parameter, bool], str]
"""Returns one of `PAGE_KINDS` for a parameter: from its PEFT name without the adapter id, and whether it is part of an
`nn.LayerNorm`, which never decays."""
PAGE_KINDS = ("decays", "stays", "lora_A", "lora_embedding", "lora_B", "lora_B_stays")
"""Parameters with one learning rate and one weight decay; those that end with "stays" have no weight decay."""


def plain_kind(name: str, parameter: nn.Parameter, is_layer_norm: bool) -> str:
    """Return whether weight decay applies; the learning rate is that of the task."""
    return "decays" if decays(name) and not is_layer_norm else "stays"


def loraplus_kind(name: str, parameter: nn.Parameter, is_layer_norm: bool) -> str:
    """Return the group of a parameter in LoRA+ (arXiv 2402.12354), as PEFT's `create_loraplus_optimizer` divides them.

    Factors of embeddings have a rate of their own; B, and all vectors, the multiplied one.
    """
    if "lora_embedding_" in name:
        return "lora_embedding"
    if "lora_B" in name or parameter.dim() == 1:
        return "lora_B_stays" if "bias" in name or is_layer_norm else "lora_B"
    return "lora_A"


class _Entry(NamedTuple):
    parameter: nn.Parameter
    offset: int
    is_transposed: bool

    def rows_of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this parameter's part of a flat buffer with its layout there: contiguous, perhaps transposed."""
        shape = self.parameter.shape[::-1] if self.is_transposed else self.parameter.shape
        return flat[self.offset : self.offset + self.parameter.numel()].view(shape)

    def view_of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this parameter's part of a flat buffer, in the parameter's shape."""
        rows = self.rows_of(flat)
        # PEFT sees the shape that it made, kernels the rows as they lie: one memory, two views.
        return rows.t() if self.is_transposed else rows


class Factor(NamedTuple):
    """One parameter of an adapter in the layout of its buffer, for kernels.

    Attributes:
        values: the weights (for LoRA `[R, width]`), in the requested dtype.
        gradient: their gradient, in the dtype of the parameter; `None` if none is bound.
    """

    values: torch.Tensor
    gradient: torch.Tensor | None


class Page:
    """Weights of one task that have one dtype, one learning rate and one weight decay.

    Parameters become views of the page's flat buffer.

    Attributes:
        kind: one of `PAGE_KINDS`.
        values: 1-D, a leaf for optimizers.
        entries: where each parameter lies, by its id, because tensors compare by element.
        copies: the weights in other dtypes, which kernels read.
        num_bindings: how often a new buffer of gradients was made; older addresses are no longer valid.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        slots: Mapping[str, Slot],
        *,
        kind: str,
        device: torch.device | None = None,
    ) -> None:
        self.kind = kind
        self.num_bindings = 0
        self.copies: dict[torch.dtype, torch.Tensor] = {}
        first = next(iter(parameters.values()), torch.zeros(0, device=device))
        size = sum(slots[name].num_elements for name in parameters) or GROUP
        # Zeros, because padding between parameters takes part in norms and updates and must stay zero.
        flat = first.new_zeros(size, requires_grad=False)
        self.entries: dict[int, _Entry] = {}
        offset = 0
        for name, parameter in parameters.items():
            entry = _Entry(parameter, offset, slots[name].is_transposed)
            view = entry.view_of(flat)
            # PEFT's parameter stays the same object, with its name; only its memory moves.
            view.copy_(parameter.data)
            parameter.data = view
            self.entries[id(parameter)] = entry
            offset += slots[name].num_elements
        self.parameters = [entry.parameter for entry in self.entries.values()]
        self.values = nn.Parameter(flat)

    def part(self, parameter: nn.Parameter, flat: torch.Tensor) -> torch.Tensor | None:
        """Return a parameter's part of a buffer as long as the page, in its shape; `None` if it is not of this page."""
        entry = self.entries.get(id(parameter))
        return None if entry is None else entry.view_of(flat)


class TaskSlab:
    """The pages of one task.

    Args:
        parameters: the task's own, by their PEFT names. If there are none (a stage without adapters of the task), there
            is one page of zeros that nothing reads, so that optimizers need no special case.
        device: the device on which that page lies.
        layout: returns how each parameter is laid out in its page.
        kind_of: returns in which pages each parameter lies.
        layer_norms: names of the parameters that are part of an `nn.LayerNorm`.

    Attributes:
        pages: see above.
        number: greater than the number of every slab before it, so that tasks have an order.
    """

    _numbers = itertools.count()

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        device: torch.device | None = None,
        *,
        layout: SlabLayout = plain_slot,
        kind_of: PageKind = plain_kind,
        layer_norms: Collection[str] = (),
    ) -> None:
        self.number = next(self._numbers)
        slots = {name: layout(name, parameter) for name, parameter in parameters.items()}
        blocks = {slot.block: number for number, slot in reversed([*enumerate(slots.values())])}
        members: dict[tuple[torch.dtype, str], dict[str, nn.Parameter]] = {}
        # Block by block, and within each block in their order.
        for name in sorted(slots, key=lambda name: (blocks[slots[name].block], slots[name].order)):
            # A page is one tensor to an optimizer, which has one dtype, one rate and one weight decay for it.
            kind = kind_of(name, parameters[name], name in layer_norms)
            members.setdefault((parameters[name].dtype, kind), {})[name] = parameters[name]
        with torch.no_grad():
            self.pages = [
                Page(parameters_of_page, slots, kind=kind) for (_, kind), parameters_of_page in members.items()
            ]
            self.pages = self.pages or [Page({}, {}, kind=PAGE_KINDS[0], device=device)]

    @property
    def num_bindings(self) -> int:
        """Changes whenever gradients move."""
        return sum(page.num_bindings for page in self.pages)

    def factor(self, parameter: nn.Parameter, dtype: torch.dtype) -> Factor | None:
        """Return where kernels find a parameter, in the form in which it lies; `None` for one that is not here.

        Args:
            parameter: a parameter of this task.
            dtype: the dtype of the values; a copy is made if it is not that of the weights.
        """
        page = next((page for page in self.pages if id(parameter) in page.entries), None)
        if page is None:
            return None
        values, entry = page.values.detach(), page.entries[id(parameter)]
        if dtype != values.dtype:
            # Cast once and refreshed before each step, instead of once in every layer.
            if dtype not in page.copies:
                page.copies[dtype] = values.to(dtype)
            values = page.copies[dtype]
        # As it lies, since kernels write weights' gradients in the layout of the weights.
        gradient = None if page.values.grad is None else entry.rows_of(page.values.grad)
        return Factor(entry.rows_of(values), gradient)

    def is_in_place(self, device: torch.device) -> bool:
        """Return whether the weights are on a device as they were laid out: neither moved nor cast since."""
        for page in self.pages:
            values = page.values.data
            views = ((entry.parameter.data, entry.view_of(values)) for entry in page.entries.values())
            if values.device != device or not all(
                data.data_ptr() == view.data_ptr() and data.dtype == view.dtype and data.stride() == view.stride()
                for data, view in views
            ):
                return False
        return True

    def watched(self) -> list[int]:
        """Return the ids of parameters that have hooks on their gradients."""
        ids = []
        for page in self.pages:
            # Every parameter of every task in every pass: without a step of Python for each.
            if any(map(_HOOKS, page.parameters)) or any(map(_LATE_HOOKS, page.parameters)):
                ids += [id(item) for item in page.parameters if _HOOKS(item) or _LATE_HOOKS(item)]
        return ids

    @torch.no_grad()
    def refresh_copies(self) -> None:
        """Bring the copies in other dtypes up to date with the weights; once before every step."""
        for page in self.pages:
            for copy in page.copies.values():
                copy.copy_(page.values)

    def bind_gradients(self) -> None:
        """Give every parameter a gradient that is a view of one flat buffer, before a backward pass; new ones are 0."""
        for page in self.pages:
            if page.values.grad is None:
                # Tables of kernels hold the old addresses; by this number they are known to be stale.
                page.num_bindings += 1
                page.values.grad = torch.zeros_like(page.values)
                for entry in page.entries.values():
                    if entry.parameter.grad is not None:  # of a pass before the weights were laid out again
                        view = entry.view_of(page.values.grad)
                        view.copy_(entry.parameter.grad)
                        entry.parameter.grad = view
            # For every parameter of every task in every pass, so in the fewest steps of Python.
            for parameter in [item for item in page.parameters if item.grad is None]:
                view = page.entries[id(parameter)].view_of(page.values.grad)
                # `zero_grad` takes a parameter's gradient away, and leaves its numbers in the buffer.
                view.zero_()
                parameter.grad = view

    def drop_gradients(self) -> None:
        """Free the gradients."""
        for page in self.pages:
            page.values.grad = None
            for parameter in page.parameters:
                parameter.grad = None
