"""`TaskSlab`: all trainable weights of a task in one flat buffer, and their gradients in another.

PEFT's parameters become views of the buffers, so names, saving and loading stay PEFT's, while the optimizer, the norm,
the clipping and the copies of a task are each one operation over one tensor. A of the layers that read the same
activations lie side by side, so that they are one matrix without a copy; B lies transposed (`[R, K]`), as it is used.

    page   | q.A | k.A | v.A | o.A | q.B^T | k.B^T | v.B^T | o.B^T | gate.A | ...

Kernels read a factor in words of 16 bytes and the columns of S in groups of eight ranks. So A takes whole groups of
eight rows, and every parameter a multiple of eight elements; what is left over stays zero in weights and gradients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn

GROUP = 8
"""Rows of A, and elements of any parameter, that a page is laid out in."""


class _Entry(NamedTuple):
    parameter: nn.Parameter
    offset: int
    is_transposed: bool

    def rows_of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this parameter's part of a flat buffer as it lies there: contiguous, B transposed."""
        shape = self.parameter.shape[::-1] if self.is_transposed else self.parameter.shape
        return flat[self.offset : self.offset + self.parameter.numel()].view(shape)

    def view_of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this parameter's part of a flat buffer, in the parameter's shape."""
        rows = self.rows_of(flat)
        return rows.t() if self.is_transposed else rows


class Factor(NamedTuple):
    """Where kernels find A or B transposed of one adapter.

    Attributes:
        values: `[R, width]` in the dtype that was asked for.
        gradient: `[R, width]` in the dtype of the weights; `None` where none is bound.
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
        self, parameters: Mapping[str, nn.Parameter], *, decays: bool, device: torch.device | None = None
    ) -> None:
        """Copy the weights into a flat buffer and make the parameters views of it."""
        self.decays = decays
        self.num_bindings = 0
        self._shadows: dict[torch.dtype, torch.Tensor] = {}
        first = next(iter(parameters.values()), torch.zeros(0, device=device))
        size = sum(_size(name, item) for name, item in parameters.items()) or GROUP
        flat = first.new_zeros(size, requires_grad=False)
        self._entries: dict[int, _Entry] = {}
        offset = 0
        for name, parameter in parameters.items():
            entry = _Entry(parameter, offset, _is_b(name, parameter))
            view = entry.view_of(flat)
            view.copy_(parameter.data)
            parameter.data = view
            self._entries[id(parameter)] = entry
            offset += _size(name, parameter)
        self.values = nn.Parameter(flat)

    def factor(self, parameter: nn.Parameter, dtype: torch.dtype) -> Factor | None:
        """Return where a factor lies, in a dtype; `None` for a parameter that is not of this page."""
        entry = self._entries.get(id(parameter))
        if entry is None:
            return None
        gradient = None if self.values.grad is None else entry.rows_of(self.values.grad)
        return Factor(entry.rows_of(self._values_in(dtype)), gradient)

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
        parameters = (entry.parameter for entry in self._entries.values())
        return [id(p) for p in parameters if p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None)]

    def bind_gradients(self) -> None:
        """See to it that every parameter has a gradient that is a view of one flat buffer; new ones are zero."""
        if self.values.grad is None:
            self.num_bindings += 1
            self.values.grad = torch.zeros_like(self.values)
            for entry in self._entries.values():
                if entry.parameter.grad is not None:  # of a pass before the weights were laid out anew
                    view = entry.view_of(self.values.grad)
                    view.copy_(entry.parameter.grad)
                    entry.parameter.grad = view
        elif all(entry.parameter.grad is not None for entry in self._entries.values()):
            return
        for entry in self._entries.values():
            if entry.parameter.grad is None:
                view = entry.view_of(self.values.grad)
                view.zero_()
                entry.parameter.grad = view

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
        device: of that page.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], device: torch.device | None = None) -> None:
        """Lay the weights out."""
        kinds: dict[tuple[torch.dtype, bool], dict[str, nn.Parameter]] = {}
        for name in _laid_out(parameters):
            kinds.setdefault((parameters[name].dtype, decays(name)), {})[name] = parameters[name]
        with torch.no_grad():
            self.pages = [Page(members, decays=does_decay) for (_, does_decay), members in kinds.items()]
            self.pages = self.pages or [Page({}, decays=True, device=device)]

    @property
    def num_bindings(self) -> int:
        """Changes whenever gradients lie somewhere else than before."""
        return sum(page.num_bindings for page in self.pages)

    def factor(self, parameter: nn.Parameter, dtype: torch.dtype) -> Factor | None:
        """Return where kernels find A or B transposed of one adapter.

        Args:
            parameter: of this task.
            dtype: of the values; a copy is made where it is not that of the weights.
        """
        found = (page.factor(parameter, dtype) for page in self.pages)
        return next((factor for factor in found if factor is not None), None)

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


def _is_b(name: str, parameter: nn.Parameter) -> bool:
    return ".lora_B." in f".{name}" and parameter.dim() == 2


def _size(name: str, parameter: nn.Parameter) -> int:
    """Return how many elements of a page a parameter takes."""
    if ".lora_A." in f".{name}" and parameter.dim() == 2:
        return round_up(len(parameter)) * parameter.shape[1]
    return round_up(parameter.numel())


def round_up(count: int) -> int:
    """Return the next multiple of `GROUP`."""
    return -(-count // GROUP) * GROUP


def decays(name: str) -> bool:
    """Whether weight decay applies to a parameter, as Trainer has it: not to biases and norms."""
    return not name.endswith("bias") and "norm" not in name.lower()


def _laid_out(parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """Return the names so that, within each block of the model, all A come before all B."""
    blocks: dict[str, int] = {}
    keys = {}
    for number, name in enumerate(parameters):
        block = name.split(".lora_")[0].rpartition(".")[0]
        keys[name] = (blocks.setdefault(block, len(blocks)), ".lora_B." in name, number)
    return sorted(parameters, key=keys.__getitem__)
