"""A prompt as plain PEFT runs it: outside of multiplexed passes, in views, forwards and `generate`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from peft import PeftModelForCausalLM
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn

from peft_mux.modeling.adapters.prompts.encoders import encoders_of


@contextmanager
def plain_model(model: Any, adapter: str) -> Iterator[Any]:
    """Give, for the time of the block, what plain PEFT would run for one adapter, which was selected before.

    Args:
        model: the `MultiTaskPeftModel` that holds it.
        adapter: its internal id.
    """
    if adapter not in encoders_of(model):
        yield model.base_model
        return
    with model.alone(adapter):
        yield plain_prompt_model(model, adapter)


def plain_forward(model: Any, adapter: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what plain PEFT's forward returns for one adapter, which was selected before; see `plain_model`."""
    with plain_model(model, adapter) as plain:
        return plain(*args, **_with_task_ids(model, adapter, args, kwargs))


def plain_generate(model: Any, adapter: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what plain PEFT generates with one adapter, which was selected before; see `plain_model`."""
    with plain_model(model, adapter) as plain:
        return plain.generate(*args, **_with_task_ids(model, adapter, args, kwargs))


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


def _with_task_ids(model: Any, adapter: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
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
