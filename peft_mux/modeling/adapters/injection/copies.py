"""When the adapter of a task is a copy of another one's, but for its id, its seed and its scaling."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from peft import LoraConfig, PeftConfig
from peft.tuners.lora import LoraLayer
from torch import nn

_ENTERED = (
    *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "use_rslora", "init_lora_weights"),
    *("layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "fan_in_fan_out"),
)
"""Fields of a `LoraConfig` that decide entries of tuned layers and nothing else."""

_DRAWN = (True, False, "gaussian", "orthogonal")
"""Values of `init_lora_weights` that draw numbers, and leave the backbone's weights alone."""


def can_be_copied(config: PeftConfig) -> bool:
    """Whether all that PEFT makes of a configuration are entries of tuned layers under the adapter's id.

    Then the adapter of a second task with this configuration and seed is a copy of the first one's
    (`HiddenAdapters.copy`): what PEFT would give it has the same shapes and numbers.

    Args:
        config: the configuration, as PEFT completed it; with any field beside those of plain LoRA the answer is no.
    """
    if type(config) is not LoraConfig or config.init_lora_weights not in _DRAWN:
        return False
    plain, own = LoraConfig(), vars(config)
    return all(own[field] == getattr(plain, field) for field in own.keys() & vars(plain).keys() - {*_ENTERED})


def are_drawn_alike(given: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether PEFT makes adapters of the same shapes of two configurations, drawn alike from one seed.

    Args:
        given: the fields of one, as it was given; `can_be_copied` holds for it.
        other: those of the other.
    """
    # What a pattern says of single layers stands against what holds for all others.
    free = set() if given["alpha_pattern"] else {"lora_alpha"}
    return given.keys() == other.keys() and all(given[field] == other[field] for field in given.keys() - free)


def rescale(layers: Iterable[nn.Module], adapter: str, own: Any, given: Any) -> None:
    """Let the copy of an adapter be scaled as its own configuration has it, as PEFT's `update_layer` would.

    Args:
        layers: the tuned layers of the model; some hold the adapter.
        adapter: internal id of the copy.
        own: its configuration, still that of the adapter of which it is a copy; brought up to date.
        given: the configuration that its task was given.
    """
    if own.lora_alpha == given.lora_alpha:
        return
    own.lora_alpha = given.lora_alpha
    for layer in (one for one in layers if isinstance(one, LoraLayer) and adapter in one.scaling):
        rank = layer.r[adapter]
        layer.lora_alpha[adapter] = given.lora_alpha
        layer.scaling[adapter] = given.lora_alpha / (math.sqrt(rank) if layer.use_rslora[adapter] else rank)
