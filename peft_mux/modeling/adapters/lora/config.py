"""What of a `LoraConfig` can be trained: fields, numbers, ranks."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from peft import LoraConfig
from torch import nn

from peft_mux.errors import Fault, shown
from peft_mux.modeling.adapters.field_types import FLAG, INITIALISER, PATTERN, FieldType

FIELDS = frozenset(
    "r target_modules exclude_modules lora_alpha lora_dropout use_rslora init_lora_weights layers_to_transform "
    "layers_pattern rank_pattern alpha_pattern fan_in_fan_out use_dora lora_bias use_bdlora corda_config lora_ga_config modules_to_save trainable_token_indices".split()
)
"""That may be set; any other field that is not at its default is refused by name."""


REASONS = {
    "bias": "it trains biases of the shared backbone",
    "modules_to_save": "it trains a copy of a backbone module; classification heads are added without it",
    "trainable_token_indices": "it trains rows of the shared embedding",
    "use_dora": "DoRA has no multiplexed layer yet",
    "lora_bias": "a bias on lora_B has no multiplexed layer yet",
    "target_parameters": "adapters on bare parameters (experts) have no multiplexed layer yet",
    "layer_replication": "it changes the shared backbone",
}
"""Why some fields may not be set."""


INITIALISERS = (True, False, "gaussian", "orthogonal", "pissa", "olora", "corda", "lora_ga", "pissa_niter_4")
"""Values of `init_lora_weights` that leave the backbone's weights alone."""


TYPES: Mapping[str, FieldType] = {
    "use_rslora": FLAG,
    "fan_in_fan_out": FLAG,
    "init_lora_weights": INITIALISER,
    "rank_pattern": PATTERN,
    "alpha_pattern": PATTERN,
    "modules_to_save": FieldType(
        lambda value: value is None or (isinstance(value, (list, tuple)) and all(isinstance(v, str) for v in value)), "a list of names"
    ),
}
"""Of the fields that only LoRA has; those of its numbers are checked with their ranges."""


def initialiser_faults(config: LoraConfig, where: str) -> list[Fault]:
    """Return a fault for an initialisation that cannot be trained with; what is neither a switch nor a name is not."""
    if not INITIALISER.is_valid(config.init_lora_weights) or config.init_lora_weights in INITIALISERS:
        return []
    return [
        Fault(
            f"{where}.init_lora_weights",
            shown(config.init_lora_weights),
            ", ".join(map(repr, INITIALISERS)),
            "Initialisations that change the backbone's weights would change every other task.",
        )
    ]


_GREATEST_FP32 = 3.4e38
"""What a layer's output is scaled by is held in fp32."""


def number_faults(config: LoraConfig, where: str) -> list[Fault]:
    """Return what is wrong with ranks, alphas and dropout."""
    faults = []
    for name, rank in _ranks(config).items():
        # `True` is an int to Python.
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
            faults.append(Fault(f"{where}.{name}", shown(rank), "an integer of at least 1"))
    alphas = {"lora_alpha": config.lora_alpha, **_by_module(config, "alpha_pattern")}
    for name, alpha in alphas.items():
        if not _is_finite(alpha) or not 0 < alpha <= _GREATEST_FP32:
            faults.append(Fault(f"{where}.{name}", shown(alpha), "a finite number above 0, as fp32 holds it"))
    if not _is_finite(config.lora_dropout) or not 0 <= config.lora_dropout < 1:
        faults.append(Fault(f"{where}.lora_dropout", shown(config.lora_dropout), "a number in [0, 1)"))
    return faults


def rank_faults(config: LoraConfig, matched: Mapping[str, nn.Module], where: str) -> list[Fault]:
    """Return what is wrong with the ranks, given the modules that are adapted."""
    widest = max((max(_shape(module)) for module in matched.values()), default=None)
    if widest is None:
        return []
    allowed = f"at most {widest}, the width of the widest target"
    return [Fault(f"{where}.{name}", repr(rank), allowed) for name, rank in _ranks(config).items() if rank > widest]


def _ranks(config: LoraConfig) -> dict[str, Any]:
    return {"r": config.r, **_by_module(config, "rank_pattern")}


def _by_module(config: LoraConfig, field: str) -> dict[str, Any]:
    """Return what a field says of single modules, by how messages call it; nothing where it is of another type."""
    values = getattr(config, field)
    return {f"{field}[{key!r}]": value for key, value in values.items()} if PATTERN.is_valid(values) else {}


def _is_finite(value: Any) -> bool:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        return False
    # The greatest float is compared with, as an integer may lie beyond all of them.
    return -sys.float_info.max <= value <= sys.float_info.max


def _shape(module: nn.Module) -> tuple[int, ...]:
    return tuple(getattr(module, "weight").shape)  # noqa: B009 - every adaptable module has one
