"""`TaskSlab`: all trainable weights of a task in one flat buffer, and their gradients in another.

PEFT's parameters become views of the buffers, so names, saving and loading stay PEFT's, while the optimizer, the norm,
the clipping and the copies of a task are each one operation over one tensor. A of the layers that read the same
activations lie side by side, so that they are one matrix without a copy; B lies transposed (`[R, K]`), as it is used.

    page   | q.A | k.A | v.A | o.A | q.B^T | k.B^T | v.B^T | o.B^T | gate.A | ...
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import nn


class _Entry(NamedTuple):
    parameter: nn.Parameter
    offset: int
    is_transposed: bool

    def view_of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return this parameter's part of a flat buffer, in the parameter's shape."""
        shape = self.parameter.shape
        part = flat[self.offset : self.offset + self.parameter.numel()]
        return part.view(shape[1], shape[0]).t() if self.is_transposed else part.view(shape)


class Page:
    """Weights of one dtype that are treated alike by weight decay.

    Attributes:
        decays: whether weight decay applies to them.
        values: 1-D, a leaf for optimizers.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, decays: bool) -> None:
        """Copy the weights into a flat buffer and make the parameters views of it."""
        self.decays = decays
        first = next(iter(parameters.values()))
        flat = first.new_empty(sum(parameter.numel() for parameter in parameters.values()), requires_grad=False)
        self._entries = []
        offset = 0
        for name, parameter in parameters.items():
            entry = _Entry(parameter, offset, ".lora_B." in f".{name}" and parameter.dim() == 2)
            view = entry.view_of(flat)
            view.copy_(parameter.data)
            parameter.data = view
            self._entries.append(entry)
            offset += parameter.numel()
        self.values = nn.Parameter(flat)

    def bind_gradients(self) -> None:
        """See to it that every parameter has a gradient that is a view of one flat buffer; new ones are zero."""
        if self.values.grad is None:
            self.values.grad = torch.zeros_like(self.values)
        elif all(entry.parameter.grad is not None for entry in self._entries):
            return
        for entry in self._entries:
            if entry.parameter.grad is None:
                view = entry.view_of(self.values.grad)
                view.zero_()
                entry.parameter.grad = view

    def drop_gradients(self) -> None:
        """Free the gradients."""
        self.values.grad = None
        for entry in self._entries:
            entry.parameter.grad = None


class TaskSlab:
    """The pages of one task.

    Args:
        parameters: the task's own, by their PEFT names.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Lay the weights out."""
        kinds: dict[tuple[torch.dtype, bool], dict[str, nn.Parameter]] = {}
        for name in _laid_out(parameters):
            kinds.setdefault((parameters[name].dtype, decays(name)), {})[name] = parameters[name]
        with torch.no_grad():
            self.pages = [Page(members, decays=does_decay) for (_, does_decay), members in kinds.items()]

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
    return not name.endswith("bias") and "norm" not in name.lower()


def _laid_out(parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """Return the names so that, within each block of the model, all A come before all B."""
    blocks: dict[str, int] = {}
    keys = {}
    for number, name in enumerate(parameters):
        block = name.split(".lora_")[0].rpartition(".")[0]
        keys[name] = (blocks.setdefault(block, len(blocks)), ".lora_B." in name, number)
    return sorted(parameters, key=keys.__getitem__)
