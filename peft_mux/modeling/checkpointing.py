"""Activations that are recomputed in the backward pass, from the micro-batch that they came from."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

from peft_mux.errors import ConfigError
from peft_mux.modeling.interface import MultiplexedModel


def enable_checkpointing(model: MultiplexedModel, arguments: Mapping[str, Any]) -> None:
    """Let each layer of a model's backbone recompute its activations in the backward pass.

    Args:
        model: the model, adapters injected.
        arguments: further arguments of `torch.utils.checkpoint.checkpoint`.

    Raises:
        ConfigError: if reentrant checkpointing is asked for.
    """
    wanted = dict(arguments)
    if wanted.pop("use_reentrant", False):
        raise ConfigError("use_reentrant: got True; allowed: False, as adapters sit inside the checkpointed layers.")
    contexts, backbone = partial(_contexts, model), model.backbone
    # Dropout draws from seed and place, so no state of a generator has to be kept to draw the same again.
    wanted = {"use_reentrant": False, "context_fn": contexts, "preserve_rng_state": False, **wanted}
    # Older releases of transformers have the second name alone.
    enable = getattr(backbone, "activation_checkpointing_enable", None)
    if enable is not None:
        enable(activation_checkpointing_kwargs=wanted)
    else:
        backbone.gradient_checkpointing_enable(gradient_checkpointing_kwargs=wanted)


def _contexts(model: MultiplexedModel) -> tuple[Any, Any]:
    """Return the contexts of a checkpointed layer: none in its forward, the same batch again where it is recomputed."""
    batch = model.stream.batch
    if batch is None:
        return nullcontext(), nullcontext()
    # The backward pass may run when the stream reads another batch, or none; the passes are those of the forward, and
    # so is how deep the gradients of each task's rows go.
    return nullcontext(), model.packed.multiplexing(batch, model.stream.passes, model.stream.unmet)
