"""Checks of `target_parameters`, which name bare parameters such as experts of a mixture, before PEFT wraps them."""

# MERGED: Every field of `LoraConfig`: honoured for each task, or refused with its reason and what to do instead.
# MERGED: `docs/lora_fields.md` is written from this table, and a test walks it beside the fields of the PEFT that is
# MERGED: installed.
# MERGED: What of a `LoraConfig` can be trained: fields, numbers, ranks.

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from peft import LoraConfig
from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers
from torch import nn

from peft_mux.errors import Fault, closest, shown
from peft_mux.modeling.adapters.fields import (
    BIAS,
    BOOKKEEPING_FIELDS,
    FLAG,
    INITIALISER,
    MODULES,
    PATTERN,
    TOKENS,
    FieldType,
)
from peft_mux.modeling.backbone.modules import adaptable_modules, frozen_parameters, frozen_weight

TARGET_PARAMETER_NAMES = FieldType(
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


class Honoured(NamedTuple):
    """A field that may be set.

    Attributes:
        how: what becomes of it, in a sentence for users.
    """

    how: str


class Refused(NamedTuple):
    """A field that may only have its default.

    Attributes:
        reason: why, as a clause.
        instead: the nearest thing that works, as a sentence.
    """

    reason: str
    instead: str


_NOTED = Honoured("Written into the saved adapter; training does not read it.")
_UNREAD = Honoured("Not read unless the refused field that it belongs to is set, so any value is let through.")

FIELD_TABLE: dict[str, Honoured | Refused] = {
    "task_type": Honoured("CAUSAL_LM, SEQ_CLS or None; tells which head the backbone has to have."),
    "peft_type": Honoured("LORA, which finds this table."),
    "auto_mapping": _NOTED,
    "peft_version": _NOTED,
    "base_model_name_or_path": Honoured("Replaced by the name of the backbone of the run, as PEFT does."),
    "revision": _NOTED,
    "inference_mode": Honoured("Set to False, as tasks are trained, and to True in what is saved, as PEFT does."),
    "r": Honoured("Ranks may differ from task to task; all lie in the same grouped products."),
    "target_modules": Honoured("Linear layers through the grouped products, embeddings through PEFT's own layer."),
    "exclude_modules": Honoured("As PEFT reads it."),
    "lora_alpha": Honoured("Each task has its own scale."),
    "lora_dropout": Honoured("Drawn from the task's seed, its step and the token's place, so never from neighbours."),
    "fan_in_fan_out": Honoured("As PEFT reads it; layers of GPT-2 keep their weights so."),
    "bias": Honoured("Each task has its own biases, which take the place of the backbone's on its rows."),
    "use_rslora": Honoured("The scale is alpha / sqrt(r)."),
    "modules_to_save": Honoured(
        "Each task runs its own copy of embeddings, norms and the output head on its own rows. Linear layers inside of "
        "blocks, and modules that hold others, are refused."
    ),
    "init_lora_weights": Honoured(
        "True, False, gaussian and orthogonal as PEFT draws them. pissa, pissa_niter_N, olora, corda and lora_ga leave "
        "the shared backbone as it is and are saved as a LoRA of twice the rank, as PEFT converts them; the last two "
        "read what preprocess_corda and preprocess_loraga have left on the backbone. eva, loftq and mica are refused."
    ),
    "layers_to_transform": Honoured("As PEFT reads it."),
    "layers_pattern": Honoured("As PEFT reads it."),
    "rank_pattern": Honoured("Names or regular expressions, as PEFT matches them."),
    "alpha_pattern": Honoured("Names or regular expressions, as PEFT matches them."),
    "megatron_config": Refused(
        "it makes Megatron's own parallel layers", "Set tensor_parallel_size on the run's arguments."
    ),
    "megatron_core": _UNREAD,
    "trainable_token_indices": Honoured(
        "Each task's own rows of the embedding, and of a head that is tied to it, on its own rows of the stream."
    ),
    "loftq_config": Refused(
        "LoftQ puts other, quantised weights into the shared backbone",
        "Load the backbone quantised, or initialise with pissa.",
    ),
    "eva_config": Refused(
        "EVA chooses ranks and factors from activations of the task's own data, before adapters lie in their buffers",
        "Initialise with peft's initialize_lora_eva_weights and save; train that adapter with its saved configuration,"
        " after MultiTaskPeftModel.load_task.",
    ),
    "corda_config": Honoured("Read by init_lora_weights='corda', after preprocess_corda on the backbone."),
    "lora_ga_config": Honoured("Read by init_lora_weights='lora_ga', after preprocess_loraga on the backbone."),
    "use_dora": Honoured("The grouped product as for LoRA, then each row of the weight scaled to the trained length."),
    "velora_config": Refused(
        "it keeps averages over whichever rows a micro-batch has, so results would depend on how a batch is split",
        "Set gradient_checkpointing=True on the run's arguments to keep fewer activations.",
    ),
    "alora_invocation_tokens": Refused(
        "adapters would act after the last invocation in a sequence, of which a pass may hold a part only",
        "Train a plain LoRA on rows whose loss lies after the invocation.",
    ),
    "use_qalora": Refused("PEFT has it for GPTQ layers only, which are not run here", "Load the backbone in 4 bits."),
    "qalora_group_size": _UNREAD,
    "monteclora_config": Refused(
        "it draws from one random state for the whole process and adds a term to the loss",
        "Set lora_dropout to regularise.",
    ),
    "layer_replication": Refused("it changes the shared backbone", "Save a model with replicated layers, and load it."),
    "runtime_config": Refused(
        "it moves weights between devices while adapters are initialised", "Leave it out; DoRA needs no such memory."
    ),
    "lora_bias": Honoured("A bias on lora_B, added on the task's rows."),
    "target_parameters": Honoured(
        "Experts of a mixture in products grouped over tasks and experts, other bare parameters task by task. Dropout, "
        "DoRA and what else is of layers alone is refused beside it."
    ),
    "use_bdlora": Honoured("The block-diagonal factor runs as PEFT wrote it, on the task's rows."),
    "arrow_config": Refused(
        "it routes tokens among adapters that are trained already", "Train these as tasks, and route with peft."
    ),
    "kasa_config": Refused(
        "it cuts singular values out of the shared backbone and adds a term to the loss",
        "Initialise with pissa.",
    ),
    "ensure_weight_tying": Refused(
        "tied adapters would be two parameters in a task's buffers, and drift apart",
        "Name the embedding and the head in modules_to_save, or use trainable_token_indices, which PEFT ties itself.",
    ),
}
"""What becomes of each field, in PEFT's order."""

REFUSED_INITIALISERS = {
    "eva": FIELD_TABLE["eva_config"],
    "loftq": FIELD_TABLE["loftq_config"],
    "mica": Refused("it trains lora_A alone, and frozen factors have no place in a task's buffers", "Use pissa."),
}
"""Values of `init_lora_weights` that PEFT knows, and that cannot be trained with here."""


def field_page() -> str:
    """Return `docs/lora_fields.md`."""
    lines = [
        "# Every field of `LoraConfig`",
        "",
        "Written from `peft_mux/modeling/adapters/lora/config.py`, whose `field_page()` gives this page.",
        "",
        "| field | | |",
        "|---|---|---|",
    ]
    for field, entry in FIELD_TABLE.items():
        if isinstance(entry, Honoured):
            lines.append(f"| `{field}` | honoured | {entry.how} |")
        else:
            lines.append(f"| `{field}` | refused | {entry.reason[0].upper()}{entry.reason[1:]}. {entry.instead} |")
    return "\n".join([*lines, ""])


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
    "target_parameters": TARGET_PARAMETER_NAMES,
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
