"""Checks of `target_parameters`, which name bare parameters such as experts of a mixture, before PEFT wraps them."""

from __future__ import annotations

from typing import Any

import torch
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import nn

from peft_mux.errors import Fault, closest, shown
from peft_mux.modeling.adapters.field_types import FieldType
from peft_mux.modeling.backbone.modules import adaptable_modules, frozen_parameters

NAMES = FieldType(
    lambda value: (
        value is None
        or (isinstance(value, (list, set, tuple)) and all(isinstance(item, str) and item for item in value))
    ),
    "a list of names of parameters, or None",
)

_INITIALISERS = (True, False, "gaussian")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_LINEAR_OPTIONS = ("lora_dropout", "fan_in_fan_out", "use_dora", "lora_bias", "velora_config", "kasa_config")
"""Which say something of a layer's input or output, that the delta of a bare parameter has nothing to do with."""

_CONVERTED = ("gate.weight", "gate_up_proj", "down_proj")
"""What PEFT writes for the targets of a mixture of transformers 4."""


def convert(config: Any, backbone: nn.Module) -> None:
    """Write into a configuration what PEFT makes of its targets on this backbone.

    Mixtures whose experts were single linear layers in transformers 4 keep their old names of targets: "all-linear",
    `w1` or `down_proj` become `target_parameters` there, routers included.

    Raises:
        ValueError: if PEFT cannot convert it.
    """
    if hasattr(getattr(backbone, "config", None), "model_type"):
        convert_peft_config_for_transformers(config, model=backbone, conversions=None)


def parameter_faults(config: Any, backbone: Any) -> list[Fault]:
    """Return what is wrong with the parameters that a configuration names; their fields are those within it.

    Args:
        config: the adapter configuration of one task, as PEFT converts it.
        backbone: the transformers model that is to be adapted, PEFT-injected or not.
    """
    targets: list[str] = sorted(config.target_parameters or ())
    if not targets:
        return []
    faults = _option_faults(config, targets)
    known, layers = dict(frozen_parameters(backbone)), adaptable_modules(backbone)
    bare = {name for name, item in known.items() if item.dim() in (2, 3) and item.dtype in _DTYPES}
    bare = {name for name in bare if name.rpartition(".")[0] not in layers}
    for target in targets:
        hits = [name for name in known if name == target or name.endswith(f".{target}")]
        if not hits and target in _CONVERTED and len(targets) > 1:
            continue  # written by PEFT, whether or not this mixture has it
        if not hits or not bare.issuperset(hits):
            names = sorted({_short(name) for name in bare if known[name].dim() == 3} or {_short(name) for name in bare})
            allowed = (
                f"parameters of two or three dimensions in fp32, bf16 or fp16 that are no layer's: {', '.join(names)}"
            )
            faults.append(Fault("target_parameters", shown(target), allowed, _advice(target, hits, names)))
    return faults


def _option_faults(config: Any, targets: list[str]) -> list[Fault]:
    beside = f"with adapters on bare parameters ({', '.join(targets)})"
    advice = 'Leave the experts out: name layers in target_modules, such as ["q_proj", "v_proj"].'
    faults = [
        Fault(option, f"{shown(value)} {beside}", "its default: an adapter on a parameter sees no input", advice)
        for option in _LINEAR_OPTIONS
        if (value := getattr(config, option, None))
    ]
    if config.init_lora_weights not in _INITIALISERS:
        allowed = f"{', '.join(map(repr, _INITIALISERS))} {beside}"
        faults.append(Fault("init_lora_weights", shown(config.init_lora_weights), allowed, advice))
    return faults


def _short(name: str) -> str:
    """Return the end of a parameter's name that no layer number is in."""
    parts = name.split(".")
    numbers = [index for index, part in enumerate(parts) if part.isdigit()]
    return ".".join(parts[numbers[-1] + 1 :] if numbers else parts)


def _advice(target: str, hits: list[str], names: list[str]) -> str:
    if hits:
        return f"{hits[0]} is another: layers are named in target_modules, which is the same LoRA."
    return closest(target, names) if names else "This backbone has none; name layers in target_modules."
