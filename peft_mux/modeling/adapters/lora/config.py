"""Which parts of `LoraConfig` are supported: its fields, initialisations, ranks and bare parameters.

The grouped products read these fields themselves, so any other field that is not at its default is refused: an option
of a later PEFT is never accepted and ignored. `docs/lora_fields.md` lists all fields.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from peft import LoraConfig, PeftConfig
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import nn
from transformers.pytorch_utils import Conv1D

from peft_mux.errors import Fault, closest, is_real, shown
from peft_mux.modeling.backbone.modules import adaptable_modules, frozen_parameters, frozen_weight

FIELDS = frozenset(
    "r target_modules exclude_modules lora_alpha lora_dropout fan_in_fan_out bias use_rslora modules_to_save "
    "init_lora_weights layers_to_transform layers_pattern rank_pattern alpha_pattern trainable_token_indices "
    "corda_config lora_ga_config use_dora lora_bias target_parameters use_bdlora".split()
)
"""The fields that may be set."""

REASONS = {
    "megatron_config": "it makes Megatron's own parallel layers. Set tensor_parallel_size on the run's arguments",
    "loftq_config": "LoftQ puts other, quantised weights into the shared backbone. Load the backbone quantised, or "
    "initialise with pissa",
    "eva_config": "EVA chooses ranks and factors from activations of the task's own data, before adapters are in "
    "their buffers. Initialise with peft's initialize_lora_eva_weights and save; train that adapter with its saved "
    "configuration, after MultiTaskPeftModel.load_task",
    "velora_config": "it keeps averages over the rows of a micro-batch, so results would depend on how a batch is "
    "split. Set gradient_checkpointing=True on the run's arguments to keep fewer activations",
    "alora_invocation_tokens": "adapters would act after the last invocation in a sequence, but a pass may have only a "
    "part of the sequence. Train a plain LoRA on rows whose loss lies after the invocation",
    "use_qalora": "PEFT has it for GPTQ layers only, which are not run here. Load the backbone in 4 bits",
    "monteclora_config": "it draws from one random state for the whole process and adds a term to the loss. Set "
    "lora_dropout to regularise",
    "layer_replication": "it changes the shared backbone. Save a model with replicated layers, and load it",
    "runtime_config": "it moves weights between devices while adapters are initialised. Leave it out; DoRA needs no "
    "such memory",
    "arrow_config": "it routes tokens among adapters that are trained already. Train these as tasks, and route with "
    "peft",
    "kasa_config": "it cuts singular values out of the shared backbone and adds a term to the loss. Initialise with "
    "pissa",
    "ensure_weight_tying": "tied adapters would be two parameters in a task's buffers, and drift apart. Name the "
    "embedding and the head in modules_to_save, or use trainable_token_indices, which PEFT ties itself",
}
"""Why some fields may not be set, and what to do instead."""

REFUSED_INITIALISERS = {
    "eva": REASONS["eva_config"],
    "loftq": REASONS["loftq_config"],
    "mica": "it trains lora_A alone, and frozen factors have no place in a task's buffers. Use pissa",
}
"""Why some values of `init_lora_weights` that PEFT knows cannot be trained with."""

INITIALISED_FROM_WEIGHTS = ("pissa", "olora", "corda", "lora_ga")
"""Beginnings of the values of `init_lora_weights` that move a part of the backbone's weights into the adapter."""

INITIALISERS = (True, False, "gaussian", "orthogonal", *INITIALISED_FROM_WEIGHTS)
"""Values of `init_lora_weights`; "pissa_niter_16" and similar match `ITERATED`."""

ITERATED = re.compile(r"pissa_niter_\d{1,4}")
GREATEST_FP32 = 3.4e38
"""The scale of a layer's output is held in fp32."""


def changes_weights(config: LoraConfig) -> bool:
    """Return whether the initialisation moves a part of the backbone's weights into the adapter."""
    initialiser = config.init_lora_weights
    return isinstance(initialiser, str) and initialiser.startswith(INITIALISED_FROM_WEIGHTS)


def by_module(values: Any, field: str) -> dict[str, Any]:
    """Return the values of single modules, by what messages call them; none if the field has another type."""
    return {f"{field}[{key!r}]": value for key, value in values.items()} if isinstance(values, dict) else {}


def setting_faults(config: Any, where: str) -> list[Fault]:
    """Return a fault for each scale and initialisation that LoRA cannot be trained with."""
    faults = []
    alphas = {"lora_alpha": config.lora_alpha, **by_module(config.alpha_pattern, "alpha_pattern")}
    for name, alpha in alphas.items():
        if not is_real(alpha) or not 0 < alpha <= GREATEST_FP32:
            faults.append(Fault(f"{where}.{name}", shown(alpha), "a finite number above 0 in fp32"))
    got: Any = config.init_lora_weights
    if not isinstance(got, (bool, str)):
        return faults
    if changes_weights(config):
        # PEFT cannot convert these two into a plain LoRA either.
        for field in ("use_dora", "use_bdlora"):
            if value := getattr(config, field):
                allowed = "its default with an initialisation that changes the weights"
                faults.append(Fault(f"{where}.{field}", shown(value), allowed, "Leave one of them out."))
    if got not in INITIALISERS and not ITERATED.fullmatch(str(got)):
        allowed = f"one of {', '.join(map(repr, INITIALISERS))}, or 'pissa_niter_16' and similar"
        fix = f"Not supported: {REFUSED_INITIALISERS[got]}." if got in REFUSED_INITIALISERS else ""
        faults.append(Fault(f"{where}.init_lora_weights", shown(got), allowed, fix))
    return faults


def width_faults(config: Any, modules: Mapping[str, nn.Module], where: str) -> list[Fault]:
    """Return a fault for ranks above the width of every target, and for weights that nothing can be taken from."""
    widths = [max(module.weight.shape) for module in modules.values()]  # type: ignore[union-attr, arg-type, type-var]
    widest = max(widths, default=None)
    ranks = {"r": config.r, **by_module(config.rank_pattern, "rank_pattern")}
    if widest is not None and max(ranks.values()) > widest:
        allowed = f"at most {widest}, the width of the widest target"
        return [Fault(f"{where}.{name}", repr(rank), allowed) for name, rank in ranks.items() if rank > widest]
    if not changes_weights(config):
        return []
    if isinstance(config.target_modules, str) and config.target_modules.lower() == "all-linear":
        modules = {name: module for name, module in modules.items() if not isinstance(module, nn.Embedding)}
    field, got = f"{where}.init_lora_weights", shown(config.init_lora_weights)
    odd = next((name for name, module in modules.items() if frozen_weight(module)[0] is None), None)
    if odd is not None:
        fix = f"{odd} is an embedding or quantised; leave it out of target_modules."
        return [Fault(field, got, "True or False, or used with plain linear layers as targets", fix)]
    turned = next((name for name, module in modules.items() if type(module) is Conv1D), None)
    if turned is None or config.init_lora_weights != "olora":
        return []
    fix = f"PEFT reads the weight of {turned}, a Conv1D of [in, out] features, as [out, in]. Use 'pissa'."
    return [Fault(field, got, "another initialisation on this backbone", fix)]


# ----------------------------------------------------------------------- copies

_ENTERED = (
    *("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision"),
    *("r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "use_rslora", "init_lora_weights"),
    *("layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern", "fan_in_fan_out"),
)
"""Fields of a `LoraConfig` that decide entries of tuned layers and nothing else."""

_DRAWN = (True, False, "gaussian", "orthogonal")
"""Values of `init_lora_weights` that draw numbers, and leave the backbone's weights alone."""


def can_be_copied(config: PeftConfig) -> bool:
    """Return whether all that PEFT makes of a completed configuration are entries of tuned layers.

    Then the adapter of another task with this configuration and seed is a copy of the first one's: what PEFT would give
    it has the same shapes and numbers.
    """
    if type(config) is not LoraConfig or config.init_lora_weights not in _DRAWN:
        return False
    defaults, values = vars(LoraConfig()), vars(config)
    return all(values[field] == defaults[field] for field in values.keys() & defaults.keys() - {*_ENTERED})


def equal_but_for_alpha(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    """Return whether two configurations, as dictionaries, are equal, apart from `lora_alpha`.

    Alphas are scales of equal draws, unless patterns make exceptions for single layers.
    """
    free = set() if first["alpha_pattern"] else {"lora_alpha"}
    return first.keys() == second.keys() and all(first[key] == second[key] for key in first.keys() - free)


# ------------------------------------------------------------- bare parameters

_PARAMETER_INITIALISERS = (True, False, "gaussian")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_LINEAR_OPTIONS = ("lora_dropout", "fan_in_fan_out", "use_dora", "lora_bias", "velora_config", "kasa_config")
"""Options about a layer's input or output, which the delta of a bare parameter has nothing to do with."""

_CONVERTED = ("gate.weight", "gate_up_proj", "down_proj")
"""What PEFT writes for the targets of a mixture of transformers 4."""


def convert(config: Any, backbone: Any) -> None:
    """Write into a configuration what PEFT makes of its targets on this backbone.

    Mixtures whose experts were single linear layers in transformers 4 keep their old names of targets: "all-linear",
    `w1` or `down_proj` become `target_parameters` there, routers included.
    """
    if hasattr(getattr(backbone, "config", None), "model_type"):
        convert_peft_config_for_transformers(config, model=backbone, conversions=None)


def parameter_faults(config: Any, backbone: Any, where: str) -> list[Fault]:
    """Return what is wrong with the bare parameters that a converted configuration names, such as experts."""
    targets: list[str] = sorted(config.target_parameters or ())
    if not targets:
        return []
    on_parameters = f"with adapters on bare parameters ({', '.join(targets)})"
    advice = 'Leave the experts out: name layers in target_modules, such as ["q_proj", "v_proj"].'
    faults = [
        Fault(
            f"{where}.{option}",
            f"{shown(value)} {on_parameters}",
            "its default, because an adapter on a parameter sees no input",
            advice,
        )
        for option in _LINEAR_OPTIONS
        if (value := getattr(config, option, None))
    ]
    if config.init_lora_weights not in _PARAMETER_INITIALISERS:
        allowed = f"{', '.join(map(repr, _PARAMETER_INITIALISERS))} {on_parameters}"
        faults.append(Fault(f"{where}.init_lora_weights", shown(config.init_lora_weights), allowed, advice))
    known, layers = dict(frozen_parameters(backbone)), adaptable_modules(backbone)
    bare = {
        name: parameter
        for name, parameter in known.items()
        if parameter.dim() in (2, 3) and parameter.dtype in _DTYPES and name.rpartition(".")[0] not in layers
    }
    for target in targets:
        hits = [name for name in known if name == target or name.endswith(f".{target}")]
        if (hits and bare.keys() >= set(hits)) or (not hits and target in _CONVERTED and len(targets) > 1):
            continue  # the latter are written by PEFT, whether or not this mixture has them
        experts = [name for name, parameter in bare.items() if parameter.dim() == 3]
        # The ends of their names, behind the number of the layer.
        names = sorted({re.sub(r"^(?:.*\.)?\d+\.", "", name) for name in experts or bare})
        if hits:
            fix = f"{hits[0]} belongs to a layer: name layers in target_modules, which is the same LoRA."
        else:
            fix = closest(target, names) if names else "This backbone has none; name layers in target_modules."
        allowed = f"parameters of two or three dimensions in fp32, bf16 or fp16 outside layers: {', '.join(names)}"
        faults.append(Fault(f"{where}.target_parameters", shown(target), allowed, fix))
    return faults
