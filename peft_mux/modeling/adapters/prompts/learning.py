"""Which kinds are prompts, where PEFT keeps their encoders, and how a model is seen as one of prompts alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftConfig, PeftModelForCausalLM
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn

from peft_mux.modeling.adapters.kind import AdapterKind, kind_of
from peft_mux.modeling.adapters.prompts.kind import PromptKind


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


def prompt_kind(kind: AdapterKind) -> PromptKind | None:
    """Return a kind of adapters as one of prompts; `None` where it is none."""
    return kind if isinstance(kind, PromptKind) else None


def encoders_of(model: Any) -> Mapping[str, nn.Module]:
    """Return the prompt encoders of a model, by the internal ids of their adapters."""
    # Not by attribute, as PEFT would look through the whole model for one that is not there.
    return model._modules.get("prompt_encoder") or {}


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


def plain_prompt_model(model: Any, adapter: str) -> PeftModelForCausalLM:
    """Return plain PEFT's model of one prompt, which shares all modules with a model; inside `as_prompts`.

    Args:
        model: the model that holds the prompt.
        adapter: internal id of the prompt's task.
    """
    plain: Any = PeftModelForCausalLM.__new__(PeftModelForCausalLM)
    # Its own dictionaries, so that nothing that PEFT sets there outlives the call.
    plain.__dict__.update(model.__dict__)
    for name in ("_modules", "_parameters", "_buffers"):
        plain.__dict__[name] = dict(model.__dict__[name])
    plain.__dict__.pop("forward", None)
    plain.active_adapter = adapter
    plain.word_embeddings = model.base_model.get_input_embeddings()
    plain.base_model_prepare_inputs_for_generation = model.base_model.prepare_inputs_for_generation
    return plain


def with_task_ids(model: Any, adapter: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return arguments of a plain forward, with the one task of a multitask prompt where the caller names none."""
    rows = next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor)), None)
    if not hasattr(model.peft_config[adapter], "num_tasks") or rows is None:
        return kwargs
    return {"task_ids": rows.new_zeros(len(rows), dtype=torch.int64), **kwargs}


@contextmanager
def without_layers(backbone: nn.Module) -> Iterator[None]:
    """Switch the layers of all PEFT types off for the time of the block."""
    layers: list[Any] = [m for m in backbone.modules() if isinstance(m, (BaseTunerLayer, AuxiliaryTrainingWrapper))]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def prompt_kind_of(config: PeftConfig) -> PromptKind | None:
    """Return the kind of a configuration that was checked, if it is one of prompts."""
    return prompt_kind(kind_of(config))
