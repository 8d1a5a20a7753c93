"""Adapters where processes divide the backbone: which fields need the whole of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peft_mux.errors import Fault, shown
from peft_mux.modeling.adapters.lora.config import INITIALISED_FROM_WEIGHTS
from peft_mux.modeling.backbone.modules import head_kind_for

_OF_WHOLE_MODELS: Mapping[str, str] = {
    "use_dora": "it reads whole rows of frozen weights",
    "lora_bias": "its biases are not divided",
    "use_bdlora": "its blocks are not divided",
    "init_lora_weights": "it decomposes whole frozen weights",
    "bias": "biases of the backbone are not divided",
    "modules_to_save": "copies of modules are not divided",
    "trainable_token_indices": "rows of embeddings are not divided",
}
"""Why some fields can be honoured only by a process that holds the whole backbone."""


def divided_model_faults(config: Any, where: str, layout: str) -> list[Fault]:
    """Return a fault for every field that cannot be honoured if processes divide the backbone among them.

    Args:
        config: a `PeftConfig` of one task.
        where: prefix of the fields, such as `tasks.sql.peft_config`.
        layout: how the backbone is divided, for messages.
    """
    faults = []
    heads = head_kind_for(config.task_type).trained_modules
    for name, reason in _OF_WHOLE_MODELS.items():
        value = getattr(config, name, None)
        if value in (None, False, "none") or (name == "modules_to_save" and set(value) <= set(heads)):
            continue
        if name == "init_lora_weights" and not str(value).startswith(INITIALISED_FROM_WEIGHTS):
            continue
        fix = f"Not supported there: {reason}. Give every process the whole model."
        faults.append(Fault(f"{where}.{name}", f"{shown(value)} with {layout}", "its default", fix))
    return faults
