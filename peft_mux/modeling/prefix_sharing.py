"""Where rows may share the tokens that they begin with, and why not elsewhere (`docs/prefixes.md`).

A token's activations are a function of it and of what comes before it, so that rows which begin alike have those of
their beginning in common, and each one's gradients add up. That holds where nothing is drawn for each row, no token
sees a later one, and nothing but tokens comes before a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from peft import PeftConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from peft_mux.modeling.adapters.kind import kind_of
from peft_mux.modeling.adapters.prompts.encoders import prompt_kind_of
from peft_mux.modeling.backbone.modules import language_model


def reason_of_backbone(backbone: Any) -> str | None:
    """Return why no task on a backbone may share tokens, a clause; `None` where tasks may.

    Args:
        backbone: the transformers model, possibly with adapters, possibly without weights.
    """
    for name, module in _own_modules(language_model(backbone)):
        if getattr(module, "is_causal", True) is False:
            return f"every token of {type(backbone).__name__} sees later ones"
        for key, value in vars(module).items():
            # Modules of dropout, and attention modules that hand their probability on.
            is_dropout = key == "p" and isinstance(module, nn.Dropout)
            if (is_dropout or "drop" in key) and isinstance(value, float) and value > 0.0:
                return f"the backbone's own dropout ({name}, {value:g}) is drawn for each row"
    return None


def reason_of_adapter(config: PeftConfig) -> str | None:
    """Return why a task with an adapter may not share tokens, a clause; `None` where it may.

    Args:
        config: the adapter's configuration.
    """
    if prompt_kind_of(config) is not None:
        return "its rows begin with a learnt prompt"
    if getattr(kind_of(config), "draws_noise", False):
        return "its adapter draws noise for each row"
    for name, value in vars(config).items():
        if "dropout" in name and isinstance(value, float) and value > 0.0:
            return f"its {name}={value:g} is drawn for each row"
    return None


def _own_modules(model: nn.Module, name: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a model but for those that adapters have brought."""
    yield name, model
    for key, child in model.named_children():
        if isinstance(model, BaseTunerLayer) and key != "base_layer":
            continue
        yield from _own_modules(child, f"{name}.{key}" if name else key)
