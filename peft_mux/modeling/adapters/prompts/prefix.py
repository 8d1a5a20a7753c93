"""Prompts of keys and values in every layer: PREFIX_TUNING and CARTRIDGE."""

from __future__ import annotations

from typing import Any

from peft import PeftType
from peft.utils.constants import TRANSFORMERS_MODELS_TO_PREFIX_TUNING_POSTPROCESS_MAPPING

from peft_mux.errors import Fault, shown
from peft_mux.modeling.adapters.field_types import FLAG, FieldType
from peft_mux.modeling.adapters.kind import register_kind
from peft_mux.modeling.adapters.prompts.kind import PromptKind, is_at_least

_UNEVEN_FIELDS = ("global_head_dim", "per_layer_config", "num_kv_shared_layers")
"""Fields of a backbone whose layers differ in their heads, or share keys."""
_WIDTH = FieldType(lambda value: value is None or is_at_least(1).is_valid(value), "an integer of at least 1, or None")


class PrefixKind(PromptKind):
    """Prompts that no token stands for: their keys and values come before those of the first token, in every layer."""

    def faults(self, config: Any, where: str) -> list[Fault]:
        """Return the faults of all prompts, and one where no token of a cartridge would be trained."""
        faults = super().faults(config, where)
        frozen, count = getattr(config, "num_frozen_tokens", 0), config.num_virtual_tokens
        if is_at_least(0).is_valid(frozen) and is_at_least(1).is_valid(count) and frozen >= count:
            allowed = f"less than num_virtual_tokens, which are {count}"
            faults.append(Fault(f"{where}.num_frozen_tokens", shown(frozen), allowed, "Else nothing is trained."))
        return faults

    def backbone_faults(self, config: Any, backbone: Any, where: str) -> list[Fault]:
        """Return what does not fit the backbone: layers whose keys are not all of one shape."""
        # As written to files: as attributes, every configuration has some of them.
        text = backbone.config.get_text_config().to_dict()
        odd = next((name for name in _UNEVEN_FIELDS if text.get(name)), None)
        if backbone.config.model_type in TRANSFORMERS_MODELS_TO_PREFIX_TUNING_POSTPROCESS_MAPPING:
            odd = "keys in a layout of its own"
        if odd is None:
            return super().backbone_faults(config, backbone, where)
        got = f"{self.title} on a {type(backbone).__name__} with {odd}"
        return [Fault(where, got, "backbones whose layers all have the same heads", "Use PROMPT_TUNING.")]


register_kind(
    PrefixKind(
        PeftType.PREFIX_TUNING,
        {
            "encoder_hidden_size": _WIDTH,
            "prefix_projection": FLAG,
            "init_weights": FieldType(lambda value: value in (None, "zero"), "None or 'zero'"),
        },
    )
)
register_kind(PrefixKind(PeftType.CARTRIDGE, {"num_frozen_tokens": is_at_least(0)}))
