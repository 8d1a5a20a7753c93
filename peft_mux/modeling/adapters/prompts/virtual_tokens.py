"""Prompts of virtual tokens: PROMPT_TUNING, P_TUNING, MULTITASK_PROMPT_TUNING and CPT."""

from __future__ import annotations

from typing import Any

from peft import PeftType, PromptEncoderReparameterizationType

from peft_mux.data.rows.virtual_tokens import ignored
from peft_mux.data.task_batch import IGNORE_INDEX
from peft_mux.errors import Fault, shown
from peft_mux.modeling.adapters.field_types import FieldType
from peft_mux.modeling.adapters.kind import register_kind
from peft_mux.modeling.adapters.prompts.kind import PromptKind, is_at_least

_NAME = FieldType(lambda value: isinstance(value, str), "a name")
_TEXT = FieldType(lambda value: value is None or isinstance(value, str), "a string or None")
_DICT = FieldType(lambda value: value is None or isinstance(value, dict), "a dict or None")
_NUMBER = FieldType(
    lambda value: isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf"),
    "a finite number of at least 0",
)
_WIDTH = FieldType(lambda value: value is None or is_at_least(1).is_valid(value), "an integer of at least 1, or None")
_INTEGERS = FieldType(
    lambda value: isinstance(value, (list, tuple)) and bool(value) and all(is_at_least(0).is_valid(i) for i in value),
    "a list of integers of at least 0",
)
_INIT_FIELDS = {
    "prompt_tuning_init": _NAME,
    "prompt_tuning_init_text": _TEXT,
    "tokenizer_name_or_path": _TEXT,
    "tokenizer_kwargs": _DICT,
}


class VirtualTokensKind(PromptKind):
    """Prompts whose virtual tokens nothing is to predict."""

    def virtual_labels(self, config: Any) -> tuple[int, ...]:
        """Return `IGNORE_INDEX` for each virtual token."""
        return ignored(config.num_virtual_tokens)


class PTuningKind(VirtualTokensKind):
    """P-tuning: embeddings go through a small network, which runs once a pass; PEFT saves only what it returns."""

    def faults(self, config: Any, where: str) -> list[Fault]:
        """Return the faults of all prompts, and those of the encoder's fields."""
        faults = super().faults(config, where)
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
        return faults


class MultitaskKind(VirtualTokensKind):
    """Multitask prompt tuning of one target task: a shared prompt times a low rank one of the task."""

    def faults(self, config: Any, where: str) -> list[Fault]:
        """Return the faults of all prompts, and one where rows would have to say which task they are of."""
        faults = super().faults(config, where)
        if is_at_least(2).is_valid(config.num_tasks):
            fix = "Rows here carry no task_ids; give each target task a Task, with the shared prompt as its source."
            faults.append(Fault(f"{where}.num_tasks", shown(config.num_tasks), "1", fix))
        return faults


class CptKind(PromptKind):
    """Context-aware prompt tuning: examples as virtual tokens, whose answers are targets of the loss as well."""

    def virtual_labels(self, config: Any) -> tuple[int, ...]:
        """Return the ids of context tokens that are answers (types 4, 8, ...), and `IGNORE_INDEX` for the others."""
        pairs = zip(config.cpt_token_ids, config.cpt_tokens_type_mask, strict=True)
        return tuple(token if kind > 0 and kind % 4 == 0 else IGNORE_INDEX for token, kind in pairs)

    def faults(self, config: Any, where: str) -> list[Fault]:
        """Return the faults of all prompts, and those of the context's fields."""
        faults = super().faults(config, where)
        lists = {name: getattr(config, name) for name in ("cpt_token_ids", "cpt_mask", "cpt_tokens_type_mask")}
        if not all(_INTEGERS.is_valid(value) for value in lists.values()):
            return faults  # told above
        count = config.num_virtual_tokens
        faults += [
            Fault(f"{where}.{name}", f"{len(value)} entries", f"{count}, one for each of num_virtual_tokens")
            for name, value in lists.items()
            if len(value) != count
        ]
        if (highest := max(config.cpt_tokens_type_mask)) % 4:
            fix = "PEFT counts the types of rows on from it, and would mask the labels of all rows."
            allowed = "types whose highest is a multiple of 4: that of an answer"
            faults.append(Fault(f"{where}.cpt_tokens_type_mask", f"{highest} as the highest type", allowed, fix))
        if config.opt_weighted_loss_type != "none" and config.opt_loss_decay_factor != 1.0:
            got = f"{shown(config.opt_weighted_loss_type)} by {shown(config.opt_loss_decay_factor)}"
            fix = "Not supported: tokens of a row have no weights of their own."
            faults.append(Fault(f"{where}.opt_weighted_loss_type", got, "'none', or a decay by 1.0", fix))
        return faults

    def backbone_faults(self, config: Any, backbone: Any, where: str) -> list[Fault]:
        """Return what does not fit the backbone, its vocabulary above all."""
        size = backbone.config.get_text_config().vocab_size
        odd = [token for token in config.cpt_token_ids if token >= size]
        faults = super().backbone_faults(config, backbone, where)
        if odd:
            faults.append(Fault(f"{where}.cpt_token_ids", str(odd[0]), f"ids below {size}, the vocabulary's size"))
        return faults


register_kind(VirtualTokensKind(PeftType.PROMPT_TUNING, _INIT_FIELDS))
register_kind(
    PTuningKind(
        PeftType.P_TUNING,
        {
            "encoder_reparameterization_type": _NAME,
            "encoder_hidden_size": _WIDTH,
            "encoder_num_layers": is_at_least(1),
            "encoder_dropout": _NUMBER,
        },
    )
)
register_kind(
    MultitaskKind(
        PeftType.MULTITASK_PROMPT_TUNING,
        {
            **_INIT_FIELDS,
            "prompt_tuning_init_state_dict_path": _TEXT,
            "prompt_tuning_init_task": is_at_least(0),
            "num_ranks": is_at_least(1),
            "num_tasks": is_at_least(1),
        },
    )
)
register_kind(
    CptKind(
        PeftType.CPT,
        {
            "cpt_token_ids": _INTEGERS,
            "cpt_mask": _INTEGERS,
            "cpt_tokens_type_mask": _INTEGERS,
            "opt_weighted_loss_type": _NAME,
            "opt_loss_decay_factor": _NUMBER,
            "opt_projection_epsilon": _NUMBER,
            "opt_projection_format_epsilon": _NUMBER,
            "tokenizer_name_or_path": _TEXT,
        },
    )
)
