"""`Units`: the modules of a backbone that are gathered together, and in which order a pass gathers them.

A process that holds the whole backbone has one part that passes go through; a stage of a pipeline has one for each of
its virtual stages. Of the ends, a stage has what lies there: the first one the embedding, the last one the head::

    forward     rest  embedding  layer 0  layer 1 ... layer L-1  head
    backward    (head, where a task adapts it)  rest  layer L-1 ... layer 0
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from peft_mux.errors import UnsupportedModelError
from peft_mux.modeling.backbone.modules import language_model
from peft_mux.modeling.sharding.pass_through import PassThrough


class PassPart(NamedTuple):
    """The part of a backbone that a pass goes through.

    Attributes:
        layers: numbers of the decoder layers, in order.
        is_first: whether it begins with the embedding.
        is_last: whether it ends with the output head.
    """

    layers: Sequence[int]
    is_first: bool
    is_last: bool


class Units(NamedTuple):
    """Modules that are gathered together.

    Attributes:
        base: the base model, whose unit holds what is in no other one: final norm, learned positions.
        embedding: the token embedding, its base layer where a task adapts it; `None` where it lies elsewhere.
        layers: the decoder layers that lie here, by their numbers, in order.
        head: the output head of a language model; `None` where it stays whole, or lies elsewhere.
    """

    base: Any
    embedding: Any | None
    layers: Mapping[int, Any]
    head: Any | None

    def all(self) -> tuple[Any, ...]:
        """Return every unit once."""
        return (self.base, *self.ends(), *self.layers.values())

    def ends(self) -> tuple[Any, ...]:
        """Return the units that FSDP2 does not free by itself: embedding and head, as far as they are here."""
        return tuple(unit for unit in (self.embedding, self.head) if unit is not None)

    def whole(self) -> PassPart:
        """Return the part of a process that holds all of a backbone."""
        return PassPart(tuple(self.layers), is_first=True, is_last=True)

    def forward_order(self, part: PassPart) -> list[Any]:
        """Return the units that a forward gathers, in order.

        Args:
            part: the part of the backbone that the pass goes through.
        """
        embedding = [self.embedding] if part.is_first and self.embedding is not None else []
        return [self.base, *embedding, *(self.layers[number] for number in part.layers), *self._head_of(part)]

    def backward_order(self, part: PassPart, *, adapts_head: bool) -> list[Any]:
        """Return the units that a backward gathers, in order.

        Args:
            part: the part of the backbone that the pass goes through.
            adapts_head: whether a task adapts the output head; the loss over a frozen one has its gradient already.
        """
        head = self._head_of(part) if adapts_head else []
        return [*head, self.base, *(self.layers[number] for number in reversed(part.layers))]

    def prefetch_in_backward(self, part: PassPart) -> None:
        """Let each unit begin to gather the one that the backward of the same pass comes to next, and no other.

        By itself FSDP2 takes the one that the latest forward has used before: of another pass, where several are in
        flight, so that processes with unlike numbers of passes would gather in unlike orders.

        Args:
            part: the part of the backbone that passes go through.
        """
        order = [self.layers[number] for number in reversed(part.layers)]
        # Who names itself begins nothing, where an empty list would mean FSDP2's own way. The base model does so, as it
        # is one unit of several parts.
        self.base.set_modules_to_backward_prefetch([self.base])
        for unit, following in zip(order, [*order[1:], order[-1]], strict=True):
            unit.set_modules_to_backward_prefetch([following])

    def _head_of(self, part: PassPart) -> list[Any]:
        return [self.head] if part.is_last and self.head is not None else []


def units_of(backbone: Any) -> Units:
    """Return what is gathered together of a backbone, or of the part of one that a stage holds.

    Args:
        backbone: the transformers model.

    Raises:
        UnsupportedModelError: if the decoder layers cannot be told.
    """
    embedding, head = (_innermost(end) for end in (backbone.get_input_embeddings(), backbone.get_output_embeddings()))
    return Units(
        backbone.base_model,
        None if isinstance(embedding, PassThrough) else embedding,
        _decoder_layers(backbone),
        head if type(head) is nn.Linear else None,
    )


def _decoder_layers(backbone: Any) -> dict[int, Any]:
    config = backbone.config.get_text_config()
    count = next((getattr(config, key) for key in ("num_hidden_layers", "n_layer") if hasattr(config, key)), None)
    found = [
        item for item in language_model(backbone).modules() if isinstance(item, nn.ModuleList) and len(item) == count
    ]
    if not found:
        raise UnsupportedModelError(
            f"{type(backbone).__name__} has no list of {count} decoder layers; allowed with shard_backbone=True: "
            "models whose layers are one such list. Set shard_backbone=False."
        )
    return {number: layer for number, layer in enumerate(found[0]) if not isinstance(layer, PassThrough)}


def _innermost(module: Any) -> Any:
    return module.get_base_layer() if isinstance(module, BaseTunerLayer) else module
