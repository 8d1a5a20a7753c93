"""The page `docs/lora_fields.md`: `python -m tools.lora_fields docs/lora_fields.md`."""

from __future__ import annotations

import sys
from dataclasses import fields
from pathlib import Path

from peft import LoraConfig

from peft_mux.modeling.adapters.lora.config import REASONS

COMMAND = "python -m tools.lora_fields"

_AS_IN_PEFT = "as in PEFT"
_NOTED = "saved with the adapter, not used in training"
_UNREAD = "only used with a refused field, so any value is accepted"

HONOURED: dict[str, str] = {
    "task_type": "CAUSAL_LM, SEQ_CLS or None; determines the head of the task.",
    "peft_type": _AS_IN_PEFT,
    "auto_mapping": _NOTED,
    "peft_version": _NOTED,
    "base_model_name_or_path": _AS_IN_PEFT,
    "revision": _NOTED,
    "inference_mode": _AS_IN_PEFT,
    "r": "Ranks may differ between tasks; all are computed in the same grouped products.",
    "target_modules": "Linear layers by grouped products, embeddings by PEFT's own layer.",
    "exclude_modules": _AS_IN_PEFT,
    "lora_alpha": "Each task has its own scale.",
    "lora_dropout": "Depends on the task's seed, step and token position only, never on other tasks.",
    "fan_in_fan_out": _AS_IN_PEFT,
    "bias": "Each task has its own biases, which replace the backbone's on its rows.",
    "use_rslora": _AS_IN_PEFT,
    "modules_to_save": "Each task has its own copy of embeddings, norms and the output head. Linear layers inside "
    "blocks, and modules that contain others, are refused.",
    "init_lora_weights": "True, False, gaussian and orthogonal as in PEFT. pissa, pissa_niter_N, olora (not for "
    "GPT-2's [in, out] weights, where PEFT fails), corda and lora_ga do not change the backbone; the adapter is saved "
    "as a LoRA of twice the rank, like PEFT's conversion. eva, loftq and mica are refused.",
    "layers_to_transform": _AS_IN_PEFT,
    "layers_pattern": _AS_IN_PEFT,
    "rank_pattern": _AS_IN_PEFT,
    "alpha_pattern": _AS_IN_PEFT,
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
    names = [field.name for field in fields(LoraConfig)]
    lines = ["# Fields of `LoraConfig`", "", f"<!-- Written by `{COMMAND}`; a test compares this page with it. -->", ""]
    common = (_AS_IN_PEFT, _NOTED, _UNREAD)
    for text in common:
        lines.append(f"* {text}: {', '.join(f'`{name}`' for name in names if HONOURED.get(name) == text)}")
    lines += ["", "| supported field | notes |", "|---|---|"]
    lines += [f"| `{name}` | {HONOURED[name]} |" for name in names if name in HONOURED and HONOURED[name] not in common]
    lines += ["", "| refused field | reason, and what to do |", "|---|---|"]
    lines += [
        f"| `{name}` | {REASONS[name][0].upper()}{REASONS[name][1:]}. |" for name in names if name not in HONOURED
    ]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    if len(sys.argv) > 1:
        Path(sys.argv[1]).write_text(page(), encoding="utf-8")
    else:
        sys.stdout.write(page())
