"""Many similar adapters in little time: copies instead of injections, and adapters that PEFT does not see.

PEFT goes through all modules many times for each adapter that it injects. If a second task has the configuration of a
first one except for its seed and scaling, its adapter is a copy of the first one's: the same entries of tuned layers
under another id (`HiddenAdapters.copy`), drawn again from its own seed (`Draws`). And while adapters come, those that
are there already are hidden (`HiddenAdapters`), so that registering many tasks does not take time by the square of
their number.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from peft_mux.modeling.backbone.modules import modules_around_adapters


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seed torch's CPU generator, as a user who trains alone would, and restore it afterwards."""
    state = torch.get_rng_state()
    torch.manual_seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(state)


class Draws(TorchDispatchMode):
    """The random numbers that an adapter was made of, in their order; recorded in a `with` block.

    PEFT draws more than it keeps (a linear layer's own values, then those of LoRA), so what another seed gives an
    adapter of the same shapes is found by repeating all that it drew.

    Args:
        seed: the seed that they are drawn from.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        # The function that draws, the form of the tensor that it draws into (if any), and its other arguments.
        self._calls: list[tuple[Any, tuple[torch.Size, torch.dtype] | None, Sequence[Any], Mapping[str, Any]]] = []
        self._are_all: bool | None = None
        # By number of the call: the parameter that holds what it drew, rounded to this dtype.
        self._kept: dict[int, tuple[nn.Parameter, torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record a call if it draws, and make it."""
        options = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:
            into = (args[0].shape, args[0].dtype) if args and isinstance(args[0], torch.Tensor) else None
            self._calls.append((func, into, args[into is not None :], options))
        return func(*args, **options)

    def make(self, parameters: Sequence[nn.Parameter], backbone_dtype: torch.dtype) -> bool:
        """Return whether parameters hold nothing but these numbers and zeros; proven by drawing them once more.

        Args:
            parameters: those of the adapter, as drawn.
            backbone_dtype: that of the backbone, to which PEFT may have rounded them.
        """
        if self._are_all is None:
            drawn = [parameter for parameter in parameters if parameter.any()]
            # Modules are drawn in the order of the model: of each shape, one after another.
            waiting: dict[torch.Size, list[nn.Parameter]] = {}
            for parameter in reversed(drawn):
                waiting.setdefault(parameter.shape, []).append(parameter)
            for number, values in self._drawn(self.seed):
                candidates = waiting.get(values.shape, [])
                for dtype in (values.dtype, backbone_dtype) if candidates else ():
                    if torch.equal(values.to(dtype).to(candidates[-1]), candidates[-1]):
                        self._kept[number] = candidates.pop(), dtype
                        break
            known = {id(parameter) for parameter, _ in self._kept.values()}
            self._are_all = all(id(parameter) in known for parameter in drawn)
        return self._are_all

    @torch.no_grad()
    def repeat(self, seed: int, copies: Mapping[int, nn.Parameter]) -> None:
        """Draw from another seed into copies of the parameters, by `id` of those that were drawn at first."""
        for number, values in self._drawn(seed):
            if number in self._kept:
                parameter, dtype = self._kept[number]
                copies[id(parameter)].copy_(values.to(dtype))

    @torch.no_grad()
    def _drawn(self, seed: int) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the number of each call, and what it draws, which is valid until the next."""
        forms = [into for _, into, _, _ in self._calls if into is not None]
        longest = max((shape.numel() for shape, _ in forms), default=0)
        # On the CPU, where PEFT draws; all are drawn into the same memory.
        memory = {dtype: torch.empty(longest, dtype=dtype) for dtype in {dtype for _, dtype in forms}}
        with seeded(seed):
            for number, (function, into, args, options) in enumerate(self._calls):
                given = () if into is None else (memory[into[1]][: into[0].numel()].view(into[0]),)
                yield number, function(*given, *args, **options)


_ENTRIES = ("_modules", "_parameters", "_keys")
"""The attributes in which torch's dictionaries of modules and parameters hold their contents."""


def _tuned_layers(model: nn.Module) -> list[BaseTunerLayer]:
    return [module for _, module in modules_around_adapters(model) if isinstance(module, BaseTunerLayer)]


class HiddenAdapters:
    """Takes the adapters out of all tuned layers of a model, and puts them back in their order after the `with` block.

    The dictionaries in which a layer keeps adapters stay its attributes, empty, but no walk over modules meets them.
    Heads of tasks stay.

    Args:
        model: the model, adapters injected.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._entries: dict[nn.Module, dict[str, dict[str, Any]]] = {}
        self._order: dict[Any, list[str]] = {}

    def __enter__(self) -> HiddenAdapters:
        self.hide()
        return self

    @property
    def layers(self) -> list[Any]:
        """The layers whose adapters are hidden."""
        return list(self._order)

    def hide(self) -> None:
        """Hide all adapters, including those added since the last call."""
        layer: Any
        for layer in _tuned_layers(self._model):
            self._order[layer] = list(layer._modules)
            for name, child in list(layer._modules.items()):
                if isinstance(child, nn.ModuleDict | nn.ParameterDict):
                    entries_by_field = self._entries.setdefault(
                        child, {field: {} for field in _ENTRIES if field in child.__dict__}
                    )
                    for field, entries in entries_by_field.items():
                        entries.update(child.__dict__[field])
                        # A `ParameterDict` keeps its keys next to its parameters, so both are emptied.
                        child.__dict__[field].clear()
                    # An attribute as any other: PEFT's layers find it as before.
                    vars(layer)[name] = layer._modules.pop(name)

    def copy(self, adapter: str, new: str) -> dict[int, nn.Parameter]:
        """Add a new adapter to all layers that hold another one, as a hidden copy of it.

        Returns:
            its parameters, by `id` of those that they equal; they share memory until they are laid out.
        """
        parameters: dict[int, nn.Parameter] = {}
        for entries_by_field in self._entries.values():
            for entries in entries_by_field.values():
                if adapter in entries:
                    entries[new] = _copied(entries[adapter], parameters)
        for layer in self._order:
            for value in vars(layer).values():
                if type(value) is dict and adapter in value:  # ranks, scalings and similar, by adapter
                    value[new] = _copied(value[adapter], parameters)
        return parameters

    def show_new(self) -> None:
        """Show `named_modules` the adapters that were added since they were hidden, and no others."""
        for layer, order in self._order.items():
            now = dict(layer._modules)
            now |= {name: layer.__dict__.pop(name) for name in order if name in layer.__dict__}
            layer._modules.clear()
            layer._modules.update({name: now.pop(name) for name in order if name in now} | now)
        self._order.clear()

    def __exit__(self, *_: object) -> None:
        """Put all adapters back."""
        self.show_new()
        for child, entries_by_field in self._entries.items():
            for field, entries in entries_by_field.items():
                entries.update(child.__dict__[field])
                child.__dict__[field].update(entries)
                # The entries that were there before come first, whatever was added meanwhile.
                for key in entries:
                    child.__dict__[field][key] = child.__dict__[field].pop(key)
        self._entries.clear()


def _copied(entry: Any, parameters: dict[int, nn.Parameter]) -> Any:
    """Return a layer's entry of a new adapter: a copy of the other's, whose parameters share its memory."""
    if isinstance(entry, nn.Parameter):
        if id(entry) not in parameters:
            values = entry.detach()
            if entry.is_meta:  # `torch.empty_like` of these runs in Python, which is slow
                values = torch.empty_strided(entry.shape, entry.stride(), dtype=entry.dtype, device="meta")
            parameters[id(entry)] = nn.Parameter(values, requires_grad=entry.requires_grad)
        return parameters[id(entry)]
    if not isinstance(entry, nn.Module):
        return copy.copy(entry)
    new = object.__new__(type(entry))
    # Hooks and buffers are in dictionaries of the module; `copy.copy` of ordered ones takes many times as long.
    new.__dict__.update({key: value.copy() if isinstance(value, dict) else value for key, value in vars(entry).items()})
    for entries in (new._parameters, new._modules):
        entries.update({key: _copied(value, parameters) for key, value in entries.items()})
    return new


@contextmanager
def only_adapter(model: nn.Module, adapter: str) -> Iterator[None]:
    """Remove the adapters of all other tasks from all tuned layers in the `with` block, in which none is added.

    Args:
        model: a model with adapters.
        adapter: internal id of the task whose adapter stays.
    """
    taken: list[tuple[dict[str, Any], dict[str, Any]]] = []
    layer: Any
    for layer in _tuned_layers(model):
        for child in layer.children():
            if isinstance(child, nn.ModuleDict | nn.ParameterDict):
                for entries in [child.__dict__[field] for field in _ENTRIES if field in child.__dict__]:
                    taken.append((entries, dict(entries)))
                    for key in taken[-1][1].keys() - {adapter}:
                        del entries[key]
    try:
        yield
    finally:
        # The last first, because tied layers share what they keep, which was taken twice then.
        for entries, before in reversed(taken):
            entries.clear()  # so that all are in their order again
            entries.update(before)
