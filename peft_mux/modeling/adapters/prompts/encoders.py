"""Which configurations are of prompts, and where PEFT keeps their encoders."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peft import PeftConfig
from torch import nn

from peft_mux.modeling.adapters.kind import kind_of
from peft_mux.modeling.adapters.prompts.kind import PromptKind


def prompt_kind_of(config: PeftConfig) -> PromptKind | None:
    """Return the kind of a configuration that was checked, if it is one of prompts."""
    kind = kind_of(config)
    return kind if isinstance(kind, PromptKind) else None


def encoders_of(model: Any) -> Mapping[str, nn.Module]:
    """Return the prompt encoders of a model, by the internal ids of their adapters."""
    # Not by attribute, as PEFT would look through the whole model for one that is not there.
    return model._modules.get("prompt_encoder") or {}
