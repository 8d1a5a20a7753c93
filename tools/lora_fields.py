"""The page `docs/lora_fields.md`: `python -m tools.lora_fields docs/lora_fields.md`."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path

from peft import LoraConfig

from peft_mux.modeling.adapters.lora.config import REASONS

COMMAND = "python -m tools.lora_fields"

_NOTED = "Written into the saved adapter; training does not read it."
_UNREAD = "Only read with a refused field, so any value is accepted."

HONOURED: dict[str, str] = {
    "task_type": "CAUSAL_LM, SEQ_CLS or None; determines the head that the backbone must have.",
    "peft_type": "LORA.",
    "auto_mapping": _NOTED,
    "peft_version": _NOTED,
    "base_model_name_or_path": "Replaced by the name of the run's backbone, as PEFT does.",
    "revision": _NOTED,
    "inference_mode": "False in training, True in the saved adapter, as in PEFT.",
    "r": "Ranks may differ between tasks; all are computed in the same grouped products.",
    "target_modules": "Linear layers by grouped products, embeddings by PEFT's own layer.",
    "exclude_modules": "As in PEFT.",
    "lora_alpha": "Each task has its own scale.",
    "lora_dropout": "Depends on the task's seed, step and token position only, never on other tasks.",
    "fan_in_fan_out": "As in PEFT; used for GPT-2.",
    "bias": "Each task has its own biases, which replace the backbone's on its rows.",
    "use_rslora": "The scale is alpha / sqrt(r).",
    "modules_to_save": "Each task has its own copy of embeddings, norms and the output head. Linear layers inside "
    "blocks, and modules that contain others, are refused.",
    "init_lora_weights": "True, False, gaussian and orthogonal as in PEFT. pissa, pissa_niter_N, olora (not for "
    "weights stored as [in, out], such as GPT-2's, where PEFT fails), corda and lora_ga do not change the shared "
    "backbone; the adapter is saved as a LoRA of twice the rank, like PEFT's conversion. corda and lora_ga need "
    "preprocess_corda and preprocess_loraga on the backbone. eva, loftq and mica are refused.",
    "layers_to_transform": "As in PEFT.",
    "layers_pattern": "As in PEFT.",
    "rank_pattern": "Names or regular expressions, as in PEFT.",
    "alpha_pattern": "Names or regular expressions, as in PEFT.",
    "megatron_core": _UNREAD,
    "trainable_token_indices": "Each task has its own rows of the embedding, and of a tied head.",
    "corda_config": "For init_lora_weights='corda', after preprocess_corda on the backbone.",
    "lora_ga_config": "For init_lora_weights='lora_ga', after preprocess_loraga on the backbone.",
    "use_dora": "Grouped products as for LoRA, then each row of the weight is scaled to the trained magnitude.",
    "qalora_group_size": _UNREAD,
    "lora_bias": "A bias on lora_B.",
    "target_parameters": "Experts of a mixture by products grouped over tasks and experts; other parameters per task. "
    "Dropout, DoRA and other layer-only options cannot be combined with it.",
    "use_bdlora": "The block-diagonal factor runs as in PEFT, on the task's rows.",
}
"""How each supported field is handled."""


def page() -> str:
    """Return the page, in Markdown, for the fields of the installed PEFT in their order."""
    lines = [
        "# Every field of `LoraConfig`",
        "",
        f"<!-- Written by `{COMMAND}`; a test compares this page with it. -->",
        "",
        "| field | | how |",
        "|---|---|---|",
    ]
    for field in (one.name for one in fields(LoraConfig)):
        if field in HONOURED:
            lines.append(f"| `{field}` | yes | {HONOURED[field]} |")
        else:
            lines.append(f"| `{field}` | refused | {REASONS[field][0].upper()}{REASONS[field][1:]}. |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(page(), encoding="utf-8")
    else:
        sys.stdout.write(page())
