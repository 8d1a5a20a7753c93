"""Adapters that are out of sight: of walks over modules while others come, and of what one task alone is asked."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from peft_mux.modeling.backbone.modules import modules_around_adapters

_ENTRIES = ("_modules", "_parameters", "_keys")
"""Where torch's dictionaries of modules and parameters hold what is in them."""


class HiddenAdapters:
    """Takes the adapters out of all tuned layers of a model, and puts them back in their order.

    PEFT goes through all modules many times for each adapter that it adds, those of other adapters included, so that
    many tasks would take time by the square of their number; and it has nothing to do with those. What a layer keeps
    adapters in stays its attribute, empty, but no walk over modules meets it. Heads of tasks stay.

    Args:
        model: the model, adapters injected.
    """

    def __init__(self, model: nn.Module) -> None:
        """Hide nothing yet."""
        self._model = model
        self._entries: dict[nn.Module, dict[str, dict[str, Any]]] = {}
        self._order: dict[nn.Module, list[str]] = {}

    @property
    def layers(self) -> list[nn.Module]:
        """The layers whose adapters are hidden."""
        return list(self._order)

    def hide(self) -> None:
        """Hide all adapters, those that have come since too."""
        for layer in [one for _, one in modules_around_adapters(self._model) if isinstance(one, BaseTunerLayer)]:
            self._order[layer] = list(layer._modules)
            for name, child in list(layer._modules.items()):
                if isinstance(child, nn.ModuleDict | nn.ParameterDict):
                    self._take_entries(child)
                    # An attribute as any other: PEFT's layers find it as before.
                    vars(layer)[name] = layer._modules.pop(name)

    def _take_entries(self, child: nn.Module) -> None:
        own = self._entries.setdefault(child, {field: {} for field in _ENTRIES if field in child.__dict__})
        for field, entries in own.items():
            entries.update(child.__dict__[field])
            # A `ParameterDict` keeps its keys beside its parameters, so both are emptied.
            child.__dict__[field].clear()

    def copy(self, adapter: str, new: str) -> dict[int, nn.Parameter]:
        """Enter an adapter into all layers that hold another one, alike to it, and hidden as it is.

        Args:
            adapter: internal id of an adapter that is hidden.
            new: that of the new one.

        Returns:
            its parameters, by `id` of those that they are alike to; they share memory until they are laid out.
        """
        parameters: dict[int, nn.Parameter] = {}
        for own in self._entries.values():
            for entries in own.values():
                if adapter in entries:
                    entries[new] = _copied(entries[adapter], parameters)
        for layer in self._order:
            for value in vars(layer).values():
                if type(value) is dict and adapter in value:  # ranks, scalings and the like, by adapter
                    value[new] = _copied(value[adapter], parameters)
        return parameters

    def show_new(self) -> None:
        """Let walks over modules meet the adapters that have come since they were hidden, and no others."""
        for layer, order in self._order.items():
            now = dict(layer._modules)
            now |= {name: layer.__dict__.pop(name) for name in order if name in layer.__dict__}
            layer._modules.clear()
            layer._modules.update({name: now.pop(name) for name in order if name in now} | now)
        self._order.clear()

    def show_all(self) -> None:
        """Put everything back."""
        self.show_new()
        for child, own in self._entries.items():
            for field, entries in own.items():
                entries.update(child.__dict__[field])
                child.__dict__[field].update(entries)
                # Entries of before come first, whatever was added meanwhile.
                for key in entries:
                    child.__dict__[field][key] = child.__dict__[field].pop(key)
        self._entries.clear()


def _copied(entry: Any, parameters: dict[int, nn.Parameter]) -> Any:
    """Return what a layer shall hold of a new adapter: alike, of parameters that lie where those of the other lie."""
    if isinstance(entry, nn.Parameter):
        if id(entry) not in parameters:
            values = torch.empty_like(entry) if entry.is_meta else entry.detach()
            parameters[id(entry)] = nn.Parameter(values, requires_grad=entry.requires_grad)
        return parameters[id(entry)]
    if not isinstance(entry, nn.Module):
        return copy.copy(entry)
    new = object.__new__(type(entry))
    # Hooks and buffers lie in dictionaries of the module's own; `copy.copy` of ordered ones takes many times as long.
    new.__dict__.update({key: value.copy() if isinstance(value, dict) else value for key, value in vars(entry).items()})
    for entries in (new._parameters, new._modules):
        entries.update({key: _copied(value, parameters) for key, value in entries.items()})
    return new


@contextmanager
def hidden_adapters(model: nn.Module) -> Iterator[HiddenAdapters]:
    """Hide the adapters of all tuned layers of a model for the time of the block.

    Args:
        model: the model, adapters injected.

    Yields:
        what hides those that have come since, too, or shows them alone.
    """
    hidden = HiddenAdapters(model)
    hidden.hide()
    try:
        yield hidden
    finally:
        hidden.show_all()


@contextmanager
def only_adapter(model: nn.Module, adapter: str) -> Iterator[None]:
    """Take the adapters of all others out of all tuned layers for the time of the block, in which none is added.

    As `hidden_adapters`, and for its reason.

    Args:
        model: a model with adapters.
        adapter: internal id of the task whose adapter stays.
    """
    taken: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for layer in [one for _, one in modules_around_adapters(model) if isinstance(one, BaseTunerLayer)]:
        for child in layer.children():
            if isinstance(child, nn.ModuleDict | nn.ParameterDict):
                for entries in [child.__dict__[field] for field in _ENTRIES if field in child.__dict__]:
                    taken.append((entries, dict(entries)))
                    for key in taken[-1][1].keys() - {adapter}:
                        del entries[key]
    try:
        yield
    finally:
        # The last first, as tied layers share what they keep, which was taken twice then.
        for entries, before in reversed(taken):
            entries.clear()  # so that all are in their order again
            entries.update(before)
