"""The kinds that entries stand for: `SlicedKind`s, and two that look at more than their own layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peft import PeftType
from torch import nn

from peft_mux.errors import Fault
from peft_mux.modeling.adapters.catalogue.entry import Category, TypeEntry
from peft_mux.modeling.adapters.catalogue.noise import TokenNoise
from peft_mux.modeling.adapters.catalogue.registry import ENTRIES
from peft_mux.modeling.adapters.kind import ReplicaLayout, register_kind
from peft_mux.modeling.adapters.multiplexed import MultiplexedForward
from peft_mux.modeling.adapters.sliced import SlicedKind
from peft_mux.modeling.backbone.modules import adaptable_modules
from peft_mux.modeling.stream import Stream

_REASONS = {
    "bias": "it trains the backbone's own biases, which all tasks share",
    "modules_to_save": "it trains a copy of a backbone module",
}


class CatalogueKind(SlicedKind):
    """A PEFT type that an entry tells of; see `SlicedKind`.

    Args:
        entry: what is known of the type.
    """

    def __init__(self, entry: TypeEntry) -> None:
        """Look the type up in PEFT."""
        super().__init__(
            PeftType[entry.name],
            fields=frozenset({*entry.fields, "fan_in_fan_out"}),
            reasons={**_REASONS, **entry.reasons},
            draws=entry.draws,
        )
        self.entry = entry

    def refusals(self, layout: ReplicaLayout, where: str) -> list[Fault]:
        """Refuse layouts on which a process holds a part of what the type needs whole."""
        reason = self.entry.spans_layers
        if not reason and self.entry.reads_weights:
            reason = "what it begins with is computed from frozen weights, of which a process holds a part"
        return super().refusals(layout, where) if not reason else self.refuse_parts(layout, where, reason)


class NormKind(CatalogueKind):
    """LN tuning, which trains copies of norms."""

    def adaptable(self, backbone: nn.Module) -> Mapping[str, nn.Module]:
        """Return the modules that may be targets: everything small that has a weight and is no linear layer."""
        others = adaptable_modules(backbone)
        return {
            name.replace(".base_layer", ""): module
            for name, module in backbone.named_modules()
            if name.replace(".base_layer", "") not in others and _is_norm(module)
        }


class PveraKind(CatalogueKind):
    """PVeRA, whose layers draw noise for every token."""

    def attach(self, module: nn.Module, name: str, stream: Stream) -> MultiplexedForward | None:
        """Return PEFT's own forward, sliced, with noise that belongs to each task's tokens."""
        forward = super().attach(module, name, stream)
        assert forward is not None, "sliced kinds attach to every layer"
        module._reparametrize = TokenNoise(module, forward.name, stream)  # type: ignore[assignment]
        return forward


class TokenKind(CatalogueKind):
    """Trainable tokens, which tied output heads would have to share."""

    def backbone_faults(self, config: Any, backbone: Any, where: str) -> list[Fault]:
        """Refuse backbones whose head is their embedding, and indices that are no tokens."""
        if getattr(backbone.config.get_text_config(), "tie_word_embeddings", False):
            fix = "Its new rows would have to reach the head as well. Use LORA with target_modules=['embed_tokens']."
            return [Fault(where, "tied embeddings", "a backbone whose head is not its token embedding", fix)]
        size = backbone.get_input_embeddings().weight.shape[0]
        indices = config.token_indices
        is_right = isinstance(indices, list) and bool(indices) and len(set(indices)) == len(indices)
        if is_right and all(isinstance(index, int) and 0 <= index < size for index in indices):
            return []
        return [Fault(f"{where}.token_indices", f"{indices!r:.80}", f"a list of different numbers in [0, {size})")]


def _is_norm(module: nn.Module) -> bool:
    own = dict(module.named_parameters(recurse=False))
    return "weight" in own and own["weight"].dim() == 1 and not list(module.children())


_CLASSES: Mapping[str, type[CatalogueKind]] = {"LN_TUNING": NormKind, "PVERA": PveraKind, "TRAINABLE_TOKENS": TokenKind}

for _entry in ENTRIES.values():
    if _entry.category in (Category.SLICED, Category.WEIGHT_SPACE) and _entry.peft_type and _entry.is_importable:
        register_kind(_CLASSES.get(_entry.name, CatalogueKind)(_entry))
