"""Checks of a `PeftConfig` that all kinds of adapters share: which fields are set, and for which task type.

Fields are held to a list of supported ones: any other field that is not at its default is refused by name, so that an
option of a later PEFT is never accepted and ignored.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields
from typing import Any

from peft_mux.errors import Fault, shown
from peft_mux.modeling.backbone.head_kinds import SUPPORTED_TASK_TYPES, head_kind_for

BOOKKEEPING_FIELDS = frozenset(
    "task_type peft_type auto_mapping peft_version base_model_name_or_path revision inference_mode megatron_core "
    "qalora_group_size".split()
)
"""That no training reads, whatever stands in them."""


def field_faults(config: Any, where: str, *, supported: Collection[str], reasons: Mapping[str, str]) -> list[Fault]:
    """Return a fault for every field that is set and cannot be trained.

    Args:
        config: a `PeftConfig` of one task.
        where: prefix of the fields, such as `tasks.sql.peft_config`.
        supported: fields that may be set.
        reasons: why a field may not be set, by its name; a field that is not named here has no multiplexed layer yet.
    """
    faults = []
    for field in fields(config):
        if field.name in supported or field.name in BOOKKEEPING_FIELDS:
            continue
        default = field.default if field.default is not MISSING else field.default_factory()  # type: ignore[misc]
        value = getattr(config, field.name)
        if _asks_for_nothing(field.name, value, default):
            continue
        trained = head_kind_for(config.task_type).trained_modules if field.name == "modules_to_save" else ()
        if trained and isinstance(value, (list, tuple, set)) and all(item in trained for item in value):
            continue  # as PEFT itself writes it for classifiers
        reason = reasons.get(field.name, "it has no multiplexed layer yet")
        faults.append(
            Fault(f"{where}.{field.name}", shown(value), f"its default {default!r}", f"Not supported: {reason}.")
        )
    return faults


def _asks_for_nothing(name: str, value: Any, default: Any) -> bool:
    """Whether a value is the default of its field, or stands for nothing in a field that is empty by default."""
    try:
        if value == default:
            return True
    except Exception:  # whatever is raised by the comparison of an array, or of an object of the user's
        return False
    # PEFT reads this one wherever it is not None.
    is_empty = value is None or (isinstance(value, (list, tuple, set, dict)) and not value)
    return is_empty and not default and not isinstance(default, bool) and name != "trainable_token_indices"


_OF_WHOLE_MODELS: Mapping[str, str] = {
    "use_dora": "it reads whole rows of frozen weights",
    "lora_bias": "its biases are not divided",
    "use_bdlora": "its blocks are not divided",
    "init_lora_weights": "it decomposes whole frozen weights",
    "bias": "biases of the backbone are not divided",
    "modules_to_save": "copies of modules are not divided",
    "trainable_token_indices": "rows of embeddings are not divided",
}
"""Fields that only a process with the whole backbone can honour, and why."""


def divided_model_faults(config: Any, where: str, layout: str) -> list[Fault]:
    """Return a fault for every field that cannot be honoured where processes divide the backbone among them.

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
        if name == "init_lora_weights" and not str(value).startswith(("pissa", "olora", "corda", "lora_ga")):
            continue
        fix = f"Not supported there: {reason}. Give every process the whole model."
        faults.append(Fault(f"{where}.{name}", f"{shown(value)} with {layout}", "its default", fix))
    return faults


def task_type_faults(config: Any, where: str) -> list[Fault]:
    """Return a fault for a task type that cannot be trained."""
    if config.task_type is None or (isinstance(config.task_type, str) and config.task_type in SUPPORTED_TASK_TYPES):
        return []
    names = ", ".join(sorted(name for name in SUPPORTED_TASK_TYPES if name is not None))
    return [Fault(f"{where}.task_type", str(config.task_type), f"{names} or None")]


def complete_heads(config: Any) -> None:
    """Let a task's own copy of a configuration train a classification head beside the adapter, as PEFT completes it."""
    trained = head_kind_for(config.task_type).trained_modules
    if trained:
        config.modules_to_save = [*trained, *(set(config.modules_to_save or ()) - set(trained))]
