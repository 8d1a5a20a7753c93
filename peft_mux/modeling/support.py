"""What peft_mux can train, and on what: checks of a `PeftConfig` and of a backbone, before anything is injected.

`LoraConfig` fields are held to a list of supported ones: any other field that is not at its default is refused by
name, so that an option of a later PEFT is never accepted and ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import MISSING, fields
from typing import Any

from peft import LoraConfig, PeftConfig, PeftType, TaskType
from torch import nn
from transformers.pytorch_utils import Conv1D

from peft_mux.errors import Fault, UnsupportedModelError, closest

SUPPORTED_PEFT_TYPES = (PeftType.LORA,)
SUPPORTED_TASK_TYPES = (None, TaskType.CAUSAL_LM, TaskType.SEQ_CLS)
HEAD_NAMES = ("classifier", "score")
"""Modules that PEFT trains beside the adapter for sequence classification."""

_SUPPORTED_LORA_FIELDS = frozenset(
    "r target_modules exclude_modules lora_alpha lora_dropout use_rslora init_lora_weights layers_to_transform "
    "layers_pattern rank_pattern alpha_pattern fan_in_fan_out".split()
)
_BOOKKEEPING_FIELDS = frozenset(
    "task_type peft_type auto_mapping peft_version base_model_name_or_path revision inference_mode megatron_core "
    "runtime_config qalora_group_size".split()
)
_REASONS = {
    "bias": "it trains biases of the shared backbone",
    "modules_to_save": "it trains a copy of a backbone module; classification heads are added without it",
    "trainable_token_indices": "it trains rows of the shared embedding",
    "use_dora": "DoRA has no multiplexed layer yet",
    "lora_bias": "a bias on lora_B has no multiplexed layer yet",
    "target_parameters": "adapters on bare parameters (experts) have no multiplexed layer yet",
    "layer_replication": "it changes the shared backbone",
}
_INITIALISERS = (True, False, "gaussian", "orthogonal")
_EMBEDDINGS = (nn.Embedding,)


def peft_config_faults(config: PeftConfig, where: str) -> list[Fault]:
    """Return what is wrong with an adapter configuration, whatever the backbone.

    Args:
        config: of one task.
        where: prefix of the fields, such as `tasks.sql`.
    """
    if config.peft_type not in SUPPORTED_PEFT_TYPES or not isinstance(config, LoraConfig):
        supported = ", ".join(kind.value for kind in SUPPORTED_PEFT_TYPES)
        kind = getattr(config.peft_type, "value", config.peft_type)
        return [Fault(f"{where}.peft_config", f"{type(config).__name__} ({kind})", f"PEFT types {supported}")]
    where = f"{where}.peft_config"
    faults = _unsupported_field_faults(config, where) + _number_faults(config, where)
    if config.task_type not in SUPPORTED_TASK_TYPES:
        faults.append(Fault(f"{where}.task_type", str(config.task_type), "CAUSAL_LM, SEQ_CLS or None"))
    if config.init_lora_weights not in _INITIALISERS:
        faults.append(
            Fault(
                f"{where}.init_lora_weights",
                repr(config.init_lora_weights),
                ", ".join(map(repr, _INITIALISERS)),
                "Initialisations that change the backbone's weights would change every other task.",
            )
        )
    return faults


def _unsupported_field_faults(config: LoraConfig, where: str) -> list[Fault]:
    faults = []
    for field in fields(config):
        if (
            field.name in _SUPPORTED_LORA_FIELDS
            or field.name in _BOOKKEEPING_FIELDS
            or field.name == "init_lora_weights"
        ):
            continue
        default = field.default if field.default is not MISSING else field.default_factory()  # type: ignore[misc]
        value = getattr(config, field.name)
        if value == default or not value:
            continue
        is_head = field.name == "modules_to_save" and config.task_type == TaskType.SEQ_CLS
        if is_head and not isinstance(value, str) and set(value) <= set(HEAD_NAMES):
            continue  # as PEFT itself writes it for classifiers
        reason = _REASONS.get(field.name, "it has no multiplexed layer yet")
        faults.append(
            Fault(f"{where}.{field.name}", repr(value), f"its default {default!r}", f"Not supported: {reason}.")
        )
    return faults


def _number_faults(config: LoraConfig, where: str) -> list[Fault]:
    faults = []
    ranks = {"r": config.r, **{f"rank_pattern[{key!r}]": rank for key, rank in (config.rank_pattern or {}).items()}}
    for name, rank in ranks.items():
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
            faults.append(Fault(f"{where}.{name}", repr(rank), "an integer of at least 1"))
    alphas = {"lora_alpha": config.lora_alpha}
    alphas.update({f"alpha_pattern[{key!r}]": alpha for key, alpha in (config.alpha_pattern or {}).items()})
    for name, alpha in alphas.items():
        if not isinstance(alpha, (int, float)) or isinstance(alpha, bool) or not 0 < alpha < float("inf"):
            faults.append(Fault(f"{where}.{name}", repr(alpha), "a finite number above 0"))
    dropout = config.lora_dropout
    if not isinstance(dropout, (int, float)) or isinstance(dropout, bool) or not 0 <= dropout < 1:
        faults.append(Fault(f"{where}.lora_dropout", repr(dropout), "a number in [0, 1)"))
    return faults


def target_faults(config: Any, backbone: nn.Module, where: str) -> list[Fault]:
    """Return what is wrong with the target modules, given the backbone (PEFT-injected or not).

    Args:
        config: of one task; its fields have passed `peft_config_faults`.
        backbone: the transformers model.
        where: prefix of the fields, such as `tasks.sql`.
    """
    where = f"{where}.peft_config"
    modules = adaptable_modules(backbone)
    leaves = sorted({name.rsplit(".", 1)[-1] for name in modules})
    targets = config.target_modules
    known = f'modules of {type(backbone).__name__}: {", ".join(leaves)}; or "all-linear"'
    if targets is None:
        return _default_target_faults(backbone, where, known)
    if isinstance(targets, str):
        if targets.lower() == "all-linear":
            return _rank_faults(config, modules, where)
        return _pattern_faults(targets, modules, where, known)
    faults = []
    matched: dict[str, nn.Module] = {}
    for target in sorted(targets):
        hits = {name: module for name, module in modules.items() if name == target or name.endswith(f".{target}")}
        matched.update(hits)
        if not hits:
            faults.append(Fault(f"{where}.target_modules", repr(target), known, closest(target, leaves)))
    if not targets:
        faults.append(Fault(f"{where}.target_modules", "nothing", known))
    return faults + _rank_faults(config, matched, where)


def adaptable_modules(backbone: nn.Module) -> dict[str, nn.Module]:
    """Return the linear and embedding modules of a backbone by name, seen through injected tuner layers."""
    modules: dict[str, nn.Module] = {}
    for name, module in backbone.named_modules():
        if ".lora_" in name or ".modules_to_save." in name or ".original_module" in name:
            continue
        if isinstance(module, (nn.Linear, Conv1D, *_EMBEDDINGS)):
            modules[name.removesuffix(".base_layer")] = module
    return modules


def _default_target_faults(backbone: nn.Module, where: str, known: str) -> list[Fault]:
    from peft.utils.constants import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULTS

    model_type = getattr(getattr(backbone, "config", None), "model_type", None)
    if model_type in DEFAULTS:
        return []
    return [Fault(f"{where}.target_modules", "None", known, f'PEFT has no default for model type "{model_type}".')]


def _pattern_faults(pattern: str, modules: Iterable[str], where: str, known: str) -> list[Fault]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        return [Fault(f"{where}.target_modules", repr(pattern), known, f"It is not a regular expression: {error}.")]
    if any(compiled.fullmatch(name) for name in modules):
        return []
    return [Fault(f"{where}.target_modules", repr(pattern), known, "A string is a regular expression over full names.")]


def _rank_faults(config: LoraConfig, matched: dict[str, nn.Module], where: str) -> list[Fault]:
    widest = max((max(_shape(module)) for module in matched.values()), default=None)
    if widest is None or config.r <= widest:
        return []
    return [Fault(f"{where}.r", repr(config.r), f"at most {widest}, the width of the widest target")]


def _shape(module: nn.Module) -> tuple[int, ...]:
    return tuple(getattr(module, "weight").shape)  # noqa: B009 - every adaptable module has one


def check_backbone(backbone: Any) -> None:
    """Refuse by name a model that packing would change, as far as its class and configuration tell.

    What they do not tell, `peft_mux.modeling.probe` measures.

    Raises:
        UnsupportedModelError: naming the architecture, the reason, and what is allowed.
    """
    from peft import PeftModel
    from transformers import PreTrainedModel

    name = type(backbone).__name__
    if isinstance(backbone, PeftModel):
        raise UnsupportedModelError(
            f"{name} already holds adapters; allowed: a plain transformers model. Pass "
            "`model.unload()` and load the adapters with `MultiTaskPeftModel.from_pretrained`."
        )
    if not isinstance(backbone, PreTrainedModel):
        raise UnsupportedModelError(f"got {name}; allowed: a transformers PreTrainedModel.")
    reason = _unsupported_reason(backbone)
    if reason is not None:
        raise UnsupportedModelError(
            f"{name} cannot be packed: {reason}; allowed: decoder-only causal language models and encoders or "
            "decoders with a sequence-classification head, whose attention goes through transformers' attention "
            "interface (Llama, Qwen, Mistral, Gemma, Phi, GPT-2, OPT, BERT, ...)."
        )


def _unsupported_reason(backbone: Any) -> str | None:
    config = backbone.config
    if getattr(config, "is_encoder_decoder", False):
        return "encoder-decoder models have two streams"
    if getattr(backbone, "_is_stateful", False):
        return "its recurrent layers carry state from one sequence into the next"
    if odd := _odd_layer_kinds(config):
        return f"its layers of kind {', '.join(odd)} do not look at one packed sequence alone"
    if not getattr(backbone, "_supports_attention_backend", False):
        return "it computes attention on a path of its own"
    if getattr(config, "output_router_logits", False):
        return "its router loss (output_router_logits) mixes the tokens of all tasks; set it to False"
    if any(hasattr(module, "sinks") for module in backbone.modules()):
        return "its attention sinks are not honoured by packed attention"
    return None


def _odd_layer_kinds(config: Any) -> list[str]:
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    return sorted(set(kinds) - {"attention", "full_attention", "sliding_attention"})


def rope_limit(config: Any) -> int | None:
    """Return the length up to which rotary scaling is independent of the longest sequence in the batch.

    `dynamic` and `longrope` scaling look at the longest position of the whole batch, so that one long sequence would
    change its neighbours; below this length they do not. `None` for every other kind.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    variants = rope.values() if rope and all(isinstance(value, dict) for value in rope.values()) else [rope]
    for variant in variants:
        if variant.get("rope_type") in ("dynamic", "longrope"):
            return variant.get("original_max_position_embeddings") or config.max_position_embeddings
    return None


_OFFSET_POSITION_TYPES = ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "roberta-prelayernorm", "longformer")


def position_offset(backbone: Any) -> int:
    """Return the position id of a sequence's first token: RoBERTa and its kin start after the padding id."""
    config = backbone.config
    return config.pad_token_id + 1 if config.model_type in _OFFSET_POSITION_TYPES else 0


def max_positions(config: Any) -> int | None:
    """Return the longest sequence that a backbone can tell the positions of, or `None` where it has no limit."""
    text = config.get_text_config()
    limits = [getattr(text, name, None) for name in ("max_position_embeddings", "n_positions")]
    known = [limit for limit in limits if isinstance(limit, int)]
    limit = min(known) if known else None
    if limit is not None and config.model_type in _OFFSET_POSITION_TYPES:
        limit -= config.pad_token_id + 1
    rope = rope_limit(text)
    return limit if rope is None else min(rope, limit or rope)
