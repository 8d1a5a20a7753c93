"""Every field of `LoraConfig`: honoured for each task, or refused with its reason and what to do instead.

`docs/lora_fields.md` is written from this table, and a test walks it beside the fields of the PEFT that is installed.
"""

from __future__ import annotations

from typing import NamedTuple


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
        "Written from `peft_mux/modeling/adapters/lora/field_table.py`, whose `field_page()` gives this page.",
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
