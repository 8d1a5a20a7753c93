"""Checks of prompt configurations, alone and against a backbone."""

from __future__ import annotations

import copy
from inspect import signature
from typing import Any

from peft import (
    CPTConfig,
    MultitaskPromptTuningConfig,
    PrefixTuningConfig,
    PromptEncoderConfig,
    PromptEncoderReparameterizationType,
    TaskType,
)
from peft.utils.constants import TRANSFORMERS_MODELS_TO_PREFIX_TUNING_POSTPROCESS_MAPPING
from peft.utils.other import _prepare_prompt_learning_config

from peft_mux.errors import Fault, shown
from peft_mux.modeling.adapters.checks import value_faults
from peft_mux.modeling.adapters.kind import AdapterKind
from peft_mux.modeling.backbone.modules import CLASSIFICATION, head_kind_of, head_module, without_head

_SHAPE_FIELDS = ("token_dim", "num_transformer_submodules", "num_attention_heads", "num_layers")
"""Fields that PEFT fills in from the backbone's configuration."""

_UNEVEN_FIELDS = ("global_head_dim", "per_layer_config", "num_kv_shared_layers")
"""Fields of a backbone whose layers differ in their heads, or share keys."""

_WIDTH_FIELDS = ("embedding_size", "word_embed_proj_dim")
"""Fields of a backbone whose embeddings may be of another width than its layers (ELECTRA, OPT)."""


def setting_faults(kind: AdapterKind, config: Any, where: str) -> list[Fault]:
    """Return what is wrong with the fields of the encoder, and a task type that PEFT does not train."""
    faults = value_faults(config, where)
    if config.num_virtual_tokens is None:
        faults.append(Fault(f"{where}.num_virtual_tokens", "None", "an integer of at least 1"))
    task_types = [TaskType.CAUSAL_LM]
    fix = "PEFT chooses by it how the prompt is put before the tokens."
    if isinstance(config, CPTConfig):
        fix = "PEFT trains no other with it; for classification, use PREFIX_TUNING or LORA."
    else:
        task_types.append(TaskType.SEQ_CLS)
    if is_prefix(config):
        task_types.append(TaskType.TOKEN_CLS)
    elif config.task_type == TaskType.TOKEN_CLS:
        fix = "PEFT fails on the logits of virtual tokens, which have no labels; use PREFIX_TUNING or LORA."
    if config.task_type not in task_types:
        got = str(getattr(config.task_type, "value", config.task_type))
        faults.append(Fault(f"{where}.task_type", got, f"{' or '.join(task_types)} for {kind.title}", fix))
    # What fields mean together is checked once each of them is sound.
    return faults or _encoder_faults(config, where)


def backbone_faults(kind: AdapterKind, config: Any, backbone: Any, where: str) -> list[Fault]:
    """Return what does not fit the backbone, such as fields that PEFT fills in, set to another value."""
    text, got = backbone.config.get_text_config(), f"{kind.title} on a {type(backbone).__name__}"
    # As written to files: as attributes, every configuration has some of the fields.
    written, has_tokens = text.to_dict(), bool(kind.virtual_labels(config))
    is_classifier = config.task_type == TaskType.SEQ_CLS and head_kind_of(backbone) is CLASSIFICATION
    if has_tokens and is_classifier and head_module(backbone)[0] == "score":
        fix = (
            "PEFT gives it embeddings, in which it cannot see padding, so it would classify by padding in a batch"
            " of rows of unequal length; use PREFIX_TUNING or LORA."
        )
        return [Fault(where, got, "used with classifiers that pool the first token, such as BERT's", fix)]
    if is_prefix(config):
        # As PEFT looks for it: among the model's arguments, else among those of what is below its head.
        calls = (backbone.forward, without_head(backbone).forward)
        if not any("past_key_values" in signature(call).parameters for call in calls):
            return [Fault(where, got, "used with backbones that take past_key_values", "Use LORA.")]
        odd = next((name for name in _UNEVEN_FIELDS if written.get(name)), None)
        if backbone.config.model_type in TRANSFORMERS_MODELS_TO_PREFIX_TUNING_POSTPROCESS_MAPPING:
            odd = "its own layout of keys"
        if odd is not None:
            allowed = "used with backbones whose layers all have the same heads"
            return [Fault(where, f"{got} with {odd}", allowed, "Use PROMPT_TUNING.")]
    blank = copy.deepcopy(config)
    for name in _SHAPE_FIELDS:
        setattr(blank, name, None)
    try:
        completed = _prepare_prompt_learning_config(blank, backbone.config)
    except ValueError as error:  # of PEFT, which does not find a size in every configuration
        return [Fault(where, got, "used with backbones whose configuration PEFT can read", f"PEFT: {error}.")]
    completed.num_transformer_submodules = 1
    width = next((written[name] for name in _WIDTH_FIELDS if name in written), completed.token_dim)
    if has_tokens and width != completed.token_dim:
        fix = f"PEFT makes virtual tokens of {completed.token_dim} features for embeddings of {width}. Use LORA."
        return [Fault(where, got, "used with backbones whose embeddings are as wide as their layers", fix)]
    faults = []
    for name in _SHAPE_FIELDS:
        got, wanted = getattr(config, name), getattr(completed, name)
        # Users know what PEFT reads off the model before it looks at heads that share keys.
        if got not in (None, wanted):
            known = f"{wanted} or None, because the backbone is a {type(backbone).__name__}"
            faults.append(Fault(f"{where}.{name}", shown(got), known, "Leave it out: PEFT fills it in."))
    odd_tokens = [token for token in getattr(config, "cpt_token_ids", None) or () if token >= text.vocab_size]
    if odd_tokens:
        allowed = f"ids below {text.vocab_size}, the vocabulary's size"
        faults.append(Fault(f"{where}.cpt_token_ids", str(odd_tokens[0]), allowed))
    return faults


def is_prefix(config: Any) -> bool:
    """Return whether a prompt is the keys and values of every layer, and not tokens."""
    return isinstance(config, PrefixTuningConfig) or hasattr(config, "num_frozen_tokens")


def _encoder_faults(config: Any, where: str) -> list[Fault]:
    """Return what is wrong with the fields of the type's own encoder."""
    faults, count = [], config.num_virtual_tokens
    if isinstance(config, PromptEncoderConfig):
        way, ways = config.encoder_reparameterization_type, PromptEncoderReparameterizationType
        if way not in list(ways):
            faults.append(Fault(f"{where}.encoder_reparameterization_type", shown(way), "MLP or LSTM"))
        if config.encoder_dropout != 0.0:
            why = "PEFT ignores it" if way == ways.MLP else "it would draw from a generator that all tasks share"
            got, field = shown(config.encoder_dropout), f"{where}.encoder_dropout"
            faults.append(Fault(field, got, "0.0", f"Not supported: {why}."))
        if way == ways.MLP and config.encoder_num_layers != 2:
            got = f"{shown(config.encoder_num_layers)} with an MLP"
            faults.append(Fault(f"{where}.encoder_num_layers", got, "2", "PEFT's MLP has a fixed number of layers."))
    elif isinstance(config, MultitaskPromptTuningConfig) and config.num_tasks != 1:
        fix = "Rows have no task_ids; give each target task its own Task, with the shared prompt as its source."
        faults.append(Fault(f"{where}.num_tasks", shown(config.num_tasks), "1", fix))
    elif isinstance(config, CPTConfig):
        for name in ("cpt_token_ids", "cpt_mask", "cpt_tokens_type_mask"):
            num_entries = len(getattr(config, name) or ())
            if num_entries != count:
                allowed = f"{count} entries, one for each of num_virtual_tokens"
                faults.append(Fault(f"{where}.{name}", str(num_entries), allowed))
        if (highest := max(config.cpt_tokens_type_mask or (0,))) % 4:
            fix = "PEFT counts the types of rows on from it, and would mask the labels of all rows."
            allowed = "types whose highest is a multiple of 4, the type of an answer"
            faults.append(Fault(f"{where}.cpt_tokens_type_mask", f"{highest} as the highest type", allowed, fix))
        for name in ("opt_projection_epsilon", "opt_projection_format_epsilon", "opt_loss_decay_factor"):
            if (value := getattr(config, name)) < 0:
                faults.append(Fault(f"{where}.{name}", shown(value), "a finite number of at least 0"))
        if config.opt_weighted_loss_type != "none" and config.opt_loss_decay_factor != 1.0:
            got = f"{shown(config.opt_weighted_loss_type)} by {shown(config.opt_loss_decay_factor)}"
            fix = "Not supported: tokens of a row have no weights."
            faults.append(Fault(f"{where}.opt_weighted_loss_type", got, "'none', or a decay by 1.0", fix))
    elif (frozen := getattr(config, "num_frozen_tokens", 0)) >= count:
        allowed = f"less than num_virtual_tokens, which is {count}"
        faults.append(Fault(f"{where}.num_frozen_tokens", shown(frozen), allowed, "Otherwise nothing is trained."))
    return faults
