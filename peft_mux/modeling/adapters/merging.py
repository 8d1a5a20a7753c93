"""One adapter becomes part of the backbone's weights, and all others go."""

from __future__ import annotations

from typing import Any

from peft_mux.errors import ConfigError
from peft_mux.modeling.adapters.kind import kind_of
from peft_mux.modeling.adapters.own.biases import merge_biases
from peft_mux.modeling.adapters.prompts.kind import MERGED_NOTHING, PromptKind
from peft_mux.modeling.adapters.tuners import Tuners


def merge_and_unload(model: Any, tuners: Tuners, adapter: str) -> Any:
    """Return the backbone with one adapter merged in; as in PEFT, all are gone afterwards.

    Args:
        model: the `MultiTaskPeftModel` that holds the adapter.
        tuners: PEFT's tuners of the model.
        adapter: internal id of the adapter.

    Raises:
        ConfigError: if the adapter is a prompt, which changes no weights.
    """
    config = model.peft_config[adapter]
    kind = kind_of(config)
    if isinstance(kind, PromptKind):
        raise ConfigError(
            f"merge: got an adapter of {kind.title}; allowed: types that change weights, as {MERGED_NOTHING}."
            " Load the saved adapter with PeftModel.from_pretrained."
        )
    # Before anything is taken apart: some adapters cannot be merged.
    tuners.of(model, kind, adapter)._check_merge_allowed()
    tuner = tuners.leave_alone(model, adapter)
    form = kind.saved_form(model.backbone, adapter)
    if form is not None:
        form.write_plainly()
    merge_biases(model.backbone, adapter)
    return tuner.merge_and_unload(adapter_names=[adapter])
