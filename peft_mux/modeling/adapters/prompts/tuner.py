"""How prompts join a PEFT model and leave it, and how PEFT is shown a model as one of prompts alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from peft import PeftConfig
from torch import nn

from peft_mux.modeling.adapters.kind import AdapterKind
from peft_mux.modeling.adapters.prompts.encoders import encoders_of


class PromptTuner(nn.Module):
    """Stands where PEFT has the tuner of a model's first type, if that is one of prompts: it holds the backbone.

    Args:
        model: the backbone.
        peft_config: configurations of all adapters, by internal id.
        adapter: internal id of the first one.

    Attributes:
        model: the backbone.
        peft_config: configurations of all adapters, by internal id.
        active_adapter: internal id of the adapter that plain forwards use.
    """

    def __init__(self, model: nn.Module, peft_config: dict[str, PeftConfig], adapter: str) -> None:
        """Hold the backbone, and nothing else."""
        super().__init__()
        self.model = model
        self.peft_config = peft_config
        self.active_adapter = adapter

    @property
    def active_adapters(self) -> list[str]:
        """Return the adapter that plain forwards use, as PEFT asks for it."""
        return [self.active_adapter] if self.active_adapter else []

    def set_adapter(self, adapter: str, inference_mode: bool = False) -> None:
        """Let plain forwards use another adapter."""
        self.active_adapter = adapter

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the backbone."""
        return self.model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Return what the backbone has under a name, as PEFT's own tuners do."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "model":
                raise
            return getattr(self.model, name)


def open_without_tuner(model: Any, backbone: Any, config: PeftConfig, adapter: str) -> None:
    """Make a `PeftModel` whose first adapter will be a prompt: what PEFT's own constructor does, but for a tuner.

    Args:
        model: the `PeftModel`, of which nothing is there yet.
        backbone: what it is made on.
        config: the configuration of the first adapter.
        adapter: internal id of the first adapter.
    """
    nn.Module.__init__(model)
    model.active_adapter, model.peft_type = adapter, config.peft_type
    model.special_peft_forward_args = {"adapter_names", "alora_offsets"}
    # To PEFT a model is one of prompts, or one of layers. This one is the latter, and the former inside `as_prompts`.
    model._is_prompt_learning, model._peft_config, model._adapters_disabled = False, None, False
    model.base_model = PromptTuner(backbone, {}, adapter)
    if hasattr(backbone.config, "pretraining_tp"):
        backbone.config.pretraining_tp = 1


@contextmanager
def as_prompts(model: Any, kind: AdapterKind) -> Iterator[None]:
    """Let a model be, for the time of the block, what PEFT makes of it for prompts: the backbone and their encoders."""
    before = model.base_model, model.peft_type, model._is_prompt_learning, model._peft_config
    configs = model.peft_config
    model.base_model, model.peft_type = before[0].model, kind.peft_type
    model._is_prompt_learning, model._peft_config = True, configs
    try:
        yield
    finally:
        model.base_model, model.peft_type, model._is_prompt_learning, model._peft_config = before


def add_prompt(model: Any, adapter: str, config: PeftConfig) -> None:
    """Make a prompt's encoder as `get_peft_model` would; inside `as_prompts`.

    Args:
        model: the model that the prompt joins.
        adapter: internal id of the prompt's task.
        config: the prompt's configuration; PEFT writes into it.
    """
    # PEFT refuses prefixes beside checkpointing, as its cache would be written twice; here none is.
    modules = model.base_model.modules()
    checkpointing = [module for module in modules if getattr(module, "gradient_checkpointing", False)]
    active = model.active_adapter
    for module in checkpointing:
        module.gradient_checkpointing = False
    try:
        # PEFT looks at the active adapter for what kind of model this is.
        model.active_adapter = adapter
        model.add_adapter(adapter, config)
    finally:
        model.active_adapter = active
        # PEFT keeps the embedding of words a second time, under a name of its own.
        model._modules.pop("word_embeddings", None)
        for module in checkpointing:
            module.gradient_checkpointing = True


def remove_prompt(model: Any, adapter: str) -> None:
    """Free a prompt."""
    model.peft_config.pop(adapter, None)
    encoders = encoders_of(model)
    if adapter in encoders:
        del encoders[adapter], model.prompt_tokens[adapter]  # type: ignore[attr-defined]
