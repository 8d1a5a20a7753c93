"""The decoder layers of a backbone: where their list is, which of them are alike, and how to do with the first few.

What is asked of every kind of layer need not be asked of all layers: the packing probe and the count of what a pass
keeps look at the first layers, as many as it takes to have one of each kind. Layers are of one kind where their code,
their own numbers and flags, their parameters' shapes and their adapters are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from peft_mux.modeling.backbone.modules import language_model

_PLACES = frozenset({"layer_idx", "layer_id", "layer_index", "layer_number", "idx", "index", "training"})
"""Attributes that say where a layer is, not what it does."""
_PLAIN = (bool, int, float, str, type(None))


class LayerList(NamedTuple):
    """A list of layers, and where it hangs.

    Attributes:
        parent: the module that holds the list.
        name: its name there.
        layers: the layers, in order.
    """

    parent: nn.Module
    name: str
    layers: nn.ModuleList


def find_layers(backbone: Any) -> LayerList | None:
    """Return the list of the layers that rows of text go through; `None` where they are not in one list.

    Args:
        backbone: a transformers model, possibly with adapters.
    """
    count = getattr(backbone.config.get_text_config(), "num_hidden_layers", None)
    for parent in language_model(backbone).modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return LayerList(parent, name, child)
    return None


def kinds_of_layers(backbone: Any, layers: Sequence[nn.Module]) -> list[int]:
    """Return a number for each layer, the same for those that are alike.

    Args:
        backbone: the model that they are of, whose configuration may tell their types.
        layers: its layers, in order, with the adapters that they have.
    """
    types = getattr(backbone.config.get_text_config(), "layer_types", None) or [None] * len(layers)
    numbers: dict[Any, int] = {}
    return [
        numbers.setdefault((kind, _signature(layer)), len(numbers)) for kind, layer in zip(types, layers, strict=True)
    ]


def num_telling_layers(kinds: Sequence[int]) -> int:
    """Return how many of the first layers it takes to have one of each kind, and not the first where there is another.

    The first layer is left out as it may be unlike others of its kind in what it is given.

    Args:
        kinds: a number for each layer, the same for those that are alike.

    Example:
        >>> num_telling_layers([0, 0, 0, 0]), num_telling_layers([0, 1, 0, 1]), num_telling_layers([0, 1, 1, 1])
        (2, 3, 3)
    """
    seen: set[int] = set()
    for count in range(1, len(kinds)):
        if set(kinds[count:]) <= seen:
            return count
        seen.add(kinds[count])
    return len(kinds)


@contextmanager
def first_layers(backbone: Any, count: int) -> Iterator[None]:
    """Let a backbone have its first layers only, for the time of the block.

    Args:
        backbone: a transformers model, possibly with adapters.
        count: how many of its layers stay; 0 for all, which stay as well where they are not in one list.
    """
    found = find_layers(backbone)
    if found is None or not 0 < count < len(found.layers):
        yield
        return
    with _with_layers(backbone, found, found.layers[:count]):
        yield


@contextmanager
def last_layer_alone(backbone: Any) -> Iterator[None]:
    """Let a backbone have its last layer only, for the time of the block; all where they are not in one list.

    Args:
        backbone: a transformers model, possibly with adapters.
    """
    found = find_layers(backbone)
    if found is None:
        yield
        return
    with _with_layers(backbone, found, found.layers[-1:]):
        yield


@contextmanager
def _with_layers(backbone: Any, found: LayerList, layers: Iterable[nn.Module]) -> Iterator[None]:
    config, kept = backbone.config.get_text_config(), nn.ModuleList(layers)
    setattr(found.parent, found.name, kept)
    config.num_hidden_layers = len(kept)
    try:
        yield
    finally:
        config.num_hidden_layers = len(found.layers)
        setattr(found.parent, found.name, found.layers)


def _signature(module: nn.Module) -> tuple[Any, ...]:
    """Return what a module computes, as far as attributes tell it."""
    own = vars(module)
    plain = [(key, value) for key, value in own.items() if key not in _PLACES and isinstance(value, _PLAIN)]
    children: list[Any] = [(name, child) for name, child in module.named_children()]
    if isinstance(module, BaseTunerLayer):
        # Of adapters their numbers (ranks, scales) tell all, and there may be many.
        plain += [(key, _plain_items(value)) for key, value in own.items() if isinstance(value, dict)]
        plain += [(name, tuple(child.keys())) for name, child in children if isinstance(child, nn.ModuleDict)]
        children = [(name, child) for name, child in children if name == "base_layer"]
    parameters = [(name, tuple(value.shape)) for name, value in own["_parameters"].items() if value is not None]
    inside = [(name, _signature(child)) for name, child in children]
    return (type(module), tuple(sorted(plain, key=str)), tuple(parameters), tuple(inside))


def _plain_items(values: dict[Any, Any]) -> tuple[Any, ...]:
    # No words: among them are the names of the modules.
    return tuple((key, value) for key, value in values.items() if isinstance(value, (bool, int, float)))
