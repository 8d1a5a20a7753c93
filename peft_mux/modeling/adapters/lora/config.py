"""What of a `LoraConfig` can be trained: fields, numbers, ranks."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

from peft import LoraConfig
from torch import nn

from peft_mux.errors import Fault, shown
from peft_mux.modeling.adapters.field_types import BIAS, FLAG, INITIALISER, MODULES, PATTERN, TOKENS, FieldType
from peft_mux.modeling.adapters.fields import BOOKKEEPING_FIELDS
from peft_mux.modeling.adapters.lora import target_parameters
from peft_mux.modeling.adapters.lora.field_table import FIELD_TABLE, REFUSED_INITIALISERS, Honoured, Refused
from peft_mux.modeling.backbone.modules import frozen_weight

FIELDS = frozenset(
    name for name, entry in FIELD_TABLE.items() if isinstance(entry, Honoured) and name not in BOOKKEEPING_FIELDS
)
"""That may be set; any other field that is not at its default is refused by name."""


REASONS = {
    name: f"{entry.reason}. {entry.instead.rstrip('.')}"
    for name, entry in FIELD_TABLE.items()
    if isinstance(entry, Refused)
}
"""Why some fields may not be set, and what to do instead."""


INITIALISERS = (True, False, "gaussian", "orthogonal", "pissa", "olora", "corda", "lora_ga")
"""Values of `init_lora_weights`; "pissa_niter_16" and the like are read by a pattern."""

_ITERATED = re.compile(r"pissa_niter_\d{1,4}")


TYPES: Mapping[str, FieldType] = {
    "use_rslora": FLAG,
    "use_dora": FLAG,
    "lora_bias": FLAG,
    "fan_in_fan_out": FLAG,
    "init_lora_weights": INITIALISER,
    "rank_pattern": PATTERN,
    "alpha_pattern": PATTERN,
    "target_parameters": target_parameters.NAMES,
    "modules_to_save": MODULES,
    "trainable_token_indices": TOKENS,
    "bias": BIAS,
}
"""Of the fields that only LoRA has; those of its numbers are checked with their ranges."""


def changes_weights(config: LoraConfig) -> bool:
    """Whether the initialisation takes a part of the backbone's weights into the adapter."""
    initialiser = config.init_lora_weights
    return isinstance(initialiser, str) and initialiser.startswith(("pissa", "olora", "corda", "lora_ga"))


def initialiser_faults(config: LoraConfig, where: str) -> list[Fault]:
    """Return a fault for an initialisation that cannot be trained with; what is neither a switch nor a name is not."""
    got: Any = config.init_lora_weights
    if not INITIALISER.is_valid(got):
        return []
    faults = []
    if changes_weights(config):
        # PEFT cannot convert these two into a plain LoRA either.
        for field in ("use_dora", "use_bdlora"):
            if getattr(config, field):
                allowed = "its default beside an initialisation that takes from the weights"
                faults.append(
                    Fault(f"{where}.{field}", shown(getattr(config, field)), allowed, "Leave one of them out.")
                )
    if got in INITIALISERS or _ITERATED.fullmatch(str(got)):
        return faults
    allowed = f"{', '.join(map(repr, INITIALISERS))}, or 'pissa_niter_16' and the like"
    entry = REFUSED_INITIALISERS.get(got)
    fix = f"Not supported: {entry.reason}. {entry.instead}" if isinstance(entry, Refused) else ""
    return [*faults, Fault(f"{where}.init_lora_weights", shown(got), allowed, fix)]


def weight_faults(config: LoraConfig, matched: Mapping[str, nn.Module], where: str) -> list[Fault]:
    """Return a fault for modules whose weights an initialisation cannot take from."""
    if not changes_weights(config):
        return []
    targets = config.target_modules
    if isinstance(targets, str) and targets.lower() == "all-linear":
        matched = {name: module for name, module in matched.items() if not isinstance(module, nn.Embedding)}
    odd = [name for name, module in matched.items() if frozen_weight(module)[0] is None]
    if not odd:
        return []
    fix = f"{odd[0]} is an embedding or quantised; leave it out of target_modules."
    where = f"{where}.init_lora_weights"
    return [Fault(where, shown(config.init_lora_weights), "True, False, or plain linear layers as targets", fix)]


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
