"""The page `docs/lora_fields.md`: `python -m tools.lora_fields docs/lora_fields.md`."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path

from peft import LoraConfig

from peft_mux.modeling.adapters.lora.config import REASONS

COMMAND = "python -m tools.lora_fields"

_NOTED = "Written into the saved adapter; training does not read it."
_UNREAD = "Not read unless the refused field that it belongs to is set, so any value is let through."

HONOURED: dict[str, str] = {
    "task_type": "CAUSAL_LM, SEQ_CLS or None; tells which head the backbone has to have.",
    "peft_type": "LORA, which finds this table.",
    "auto_mapping": _NOTED,
    "peft_version": _NOTED,
    "base_model_name_or_path": "Replaced by the name of the backbone of the run, as PEFT does.",
    "revision": _NOTED,
    "inference_mode": "Set to False, as tasks are trained, and to True in what is saved, as PEFT does.",
    "r": "Ranks may differ from task to task; all lie in the same grouped products.",
    "target_modules": "Linear layers through the grouped products, embeddings through PEFT's own layer.",
    "exclude_modules": "As PEFT reads it.",
    "lora_alpha": "Each task has its own scale.",
    "lora_dropout": "Drawn from the task's seed, its step and the token's place, so never from neighbours.",
    "fan_in_fan_out": "As PEFT reads it; layers of GPT-2 keep their weights so.",
    "bias": "Each task has its own biases, which take the place of the backbone's on its rows.",
    "use_rslora": "The scale is alpha / sqrt(r).",
    "modules_to_save": "Each task runs its own copy of embeddings, norms and the output head on its own rows. Linear "
    "layers inside of blocks, and modules that hold others, are refused.",
    "init_lora_weights": "True, False, gaussian and orthogonal as PEFT draws them. pissa, pissa_niter_N, olora (not on "
    "layers that keep their weight as [in, out], as GPT-2's, where PEFT fails), corda and lora_ga leave the shared "
    "backbone as it is and are saved as a LoRA of twice the rank, as PEFT converts them; the last two read what "
    "preprocess_corda and preprocess_loraga have left on the backbone. eva, loftq and mica are refused.",
    "layers_to_transform": "As PEFT reads it.",
    "layers_pattern": "As PEFT reads it.",
    "rank_pattern": "Names or regular expressions, as PEFT matches them.",
    "alpha_pattern": "Names or regular expressions, as PEFT matches them.",
    "megatron_core": _UNREAD,
    "trainable_token_indices": "Each task's own rows of the embedding, and of a head that is tied to it, on its own "
    "rows of the stream.",
    "corda_config": "Read by init_lora_weights='corda', after preprocess_corda on the backbone.",
    "lora_ga_config": "Read by init_lora_weights='lora_ga', after preprocess_loraga on the backbone.",
    "use_dora": "The grouped product as for LoRA, then each row of the weight scaled to the trained length.",
    "qalora_group_size": _UNREAD,
    "lora_bias": "A bias on lora_B, added on the task's rows.",
    "target_parameters": "Experts of a mixture in products grouped over tasks and experts, other bare parameters task "
    "by task. Dropout, DoRA and other options of layers alone cannot be combined with it.",
    "use_bdlora": "The block-diagonal factor runs as PEFT wrote it, on the task's rows.",
}
"""What becomes of each field that may be set."""


def page() -> str:
    """Return the page, in Markdown, for the fields of the installed PEFT in their order."""
    lines = [
        "# Every field of `LoraConfig`",
        "",
        f"<!-- Written by `{COMMAND}`; a test holds this page to it. -->",
        "",
        "| field | | |",
        "|---|---|---|",
    ]
    for field in (one.name for one in fields(LoraConfig)):
        if field in HONOURED:
            lines.append(f"| `{field}` | honoured | {HONOURED[field]} |")
        else:
            lines.append(f"| `{field}` | refused | {REASONS[field][0].upper()}{REASONS[field][1:]}. |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(page(), encoding="utf-8")
    else:
        sys.stdout.write(page())
