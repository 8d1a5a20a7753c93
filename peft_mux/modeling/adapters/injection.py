"""PEFT's injection of adapters: what surrounds it, and the multiplexed forwards after it (M §3.2)."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from peft import PeftConfig
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from peft.utils.other import TrainableTokensWrapper
from torch import nn

from peft_mux.errors import ConfigError
from peft_mux.kernels import philox
from peft_mux.modeling.adapters.copies import Draws, seeded
from peft_mux.modeling.adapters.kind import KINDS, MultiplexedForward, kind_of, kind_of_layer
from peft_mux.modeling.adapters.lora.config import can_be_copied
from peft_mux.modeling.adapters.lora.row_steps import backbone_kept
from peft_mux.modeling.adapters.trained_parts import (
    MultiplexedBias,
    MultiplexedCopies,
    MultiplexedTokenRows,
    biases_unsaid,
    forget_biases,
    own_biases,
)
from peft_mux.modeling.backbone.modules import (
    CLASSIFICATION,
    drop_head_place,
    head_kind_for,
    head_kind_of,
    modules_around_adapters,
    put_module,
)
from peft_mux.modeling.pieces import PassThrough
from peft_mux.modeling.stream import Stream


def completed_copy(config: PeftConfig, backbone: Any) -> PeftConfig:
    """Return a copy that PEFT may write into, completed as `get_peft_model` completes it."""
    # PEFT writes into what it is given, and one configuration may serve several tasks.
    copied = copy.deepcopy(config)
    copied.base_model_name_or_path = getattr(backbone, "name_or_path", None)
    copied.inference_mode = False
    kind_of(copied).complete(copied, backbone)
    has_own_head = head_kind_for(copied.task_type) == CLASSIFICATION and head_kind_of(backbone).is_shared
    if has_own_head and not hasattr(backbone, "score"):
        # The place of the heads of tasks that classify on a language model: without weights, and no adapter's target.
        is_elsewhere = isinstance(backbone.get_output_embeddings(), PassThrough)
        backbone.score = PassThrough() if is_elsewhere else nn.Identity()
    return copied


@contextmanager
def injecting(
    name: str, config: PeftConfig, seed: int, held: Mapping[str, PeftConfig] | None = None
) -> Iterator[Draws]:
    """Surround PEFT's injection of a task's adapter: its seed, its kind's own needs, and errors that name the task.

    Args:
        name: the task's name.
        config: the copy of its configuration that PEFT is given.
        seed: fixes the initial weights of the adapter.
        held: configurations of the adapters that are there already.

    Yields:
        the draws, which are recorded if other adapters may be copies of this one.
    """
    unsaid = biases_unsaid([config, *(held or {}).values()])
    draws = Draws(seed)
    recorded = draws if can_be_copied(config) else nullcontext()
    try:
        with seeded(seed), backbone_kept(), unsaid, recorded:
            yield draws
    except torch.OutOfMemoryError:  # a `RuntimeError` that no configuration is to blame for
        raise
    # From a configuration of another type than PEFT checks, or a pattern that it makes of several fields.
    except _REFUSALS as error:
        raise ConfigError(f"tasks.{name}.peft_config: PEFT refuses it: {error}") from error


_REFUSALS = (
    *(TypeError, ValueError, AttributeError, LookupError, ImportError, re.error),
    *(RuntimeError, ArithmeticError, AssertionError),
)
"""Errors that PEFT, and torch below it, raise for values that they cannot use."""


# --------------------------------------------------------- multiplexed forwards


class MultiplexedDropout(MultiplexedForward):
    """The backbone's own dropout with draws that belong to each task, so that neighbours never shift them."""

    def multiplexed(self, x: torch.Tensor) -> torch.Tensor:
        """Return `x`, dropped in training."""
        dropout: Any = self.module
        if not dropout.training or dropout.p == 0.0:
            return x
        self.check_rows(x, x.shape[-1])
        parts = []
        for segment, x_NK in self.each_task(x.reshape(-1, x.shape[-1])):
            places = self.stream.places[segment.start : segment.end]
            parts.append(philox.dropout(x_NK, places, dropout.p, segment.draw_seed(self.name)))
        return torch.cat(parts).view_as(x)

    def reason_against_graphs(self) -> str | None:
        """Return why no pass can be captured while this module drops: each task draws on its own rows."""
        drops = self.module.training and getattr(self.module, "p", 0.0) > 0.0
        return f"the backbone's own dropout ({self.name}) draws for each task on its own" if drops else None


def attach(model: nn.Module, stream: Stream) -> None:
    """Multiplex every adapted layer and every dropout layer of a PEFT-injected model that is not yet so.

    Args:
        model: the backbone, into which PEFT has injected tuner layers.
        stream: knows which rows belong to which task.
    """

    def draws_dropout(layer: nn.Module) -> bool:
        kind = kind_of_layer(layer)
        return kind is not None and kind.draws_dropout

    drawing = ""  # how names begin within the layer met last that draws its dropout by itself
    # Adapters only of layers that do not, as there are several modules a layer and task.
    for name, module in [*modules_around_adapters(model, passed_over=draws_dropout)]:
        kind = kind_of_layer(module)
        is_inside = bool(drawing) and name.startswith(drawing)
        if kind is not None and kind.draws_dropout and not is_inside:
            drawing = f"{name}."
        # Attached before, or the backbone's own head, of which tasks train copies.
        forward = module.__dict__.get("forward")
        is_biased = bool(own_biases(module))
        if is_biased and name.endswith(".base_layer"):
            around = model.get_submodule(name.removesuffix(".base_layer")).__dict__.get("forward")
            is_biased = not getattr(around, "adds_own_biases", False)
        if isinstance(forward, MultiplexedBias) and not is_biased:
            del module.forward  # another task's adapter has come around it since, and adds the biases
        if isinstance(forward, MultiplexedForward) or ".original_module" in name:
            continue
        if isinstance(module, ModulesToSaveWrapper):
            module.forward = MultiplexedCopies(module, name, stream)
        elif isinstance(module, TrainableTokensWrapper):
            module.forward = MultiplexedTokenRows(module, name, stream)
        elif kind is not None:
            forward = kind.attach(module, name, stream)
            if forward is not None:
                # On the instance: classes and names of parameters stay PEFT's and transformers'.
                module.forward = forward
        elif is_biased:
            module.forward = MultiplexedBias(module, name, stream)
        elif isinstance(module, nn.Dropout) and not is_inside:
            module.forward = MultiplexedDropout(module, name, stream)
    for kind in KINDS.values():
        kind.connect(model, stream)


def detach(model: nn.Module) -> None:
    """Take adapters and multiplexed forwards out again, so that the model is as it was before PEFT's injection."""
    for module in model.modules():
        if isinstance(module.__dict__.get("forward"), MultiplexedForward):
            del module.forward
    inside = ""
    # A list, as modules are replaced on the way.
    for name, module in list(model.named_modules()):
        # A layer of another type, or task, within one that is gone by now.
        if (inside and name.startswith(inside)) or name.endswith(".token_adapter"):
            continue
        original = module.original_module if isinstance(module, AuxiliaryTrainingWrapper) else None
        if isinstance(module, BaseTunerLayer):
            # The outermost of several around one module leads to the frozen layer; those within go with it.
            original, inside = module.get_base_layer(), f"{name}."
        if original is not None:
            put_module(model, name, original)
    forget_biases(model)
    drop_head_place(model)
    # By this attribute PEFT takes a model for one that has adapters.
    model.__dict__.pop("peft_config", None)


class Origin:
    """The state of a backbone before adapters came.

    Args:
        backbone: the transformers model, as its user gave it.
    """

    def __init__(self, backbone: Any) -> None:
        self._flags = {name: parameter.requires_grad for name, parameter in backbone.named_parameters()}
        self._training = backbone.training

    def restore(self, backbone: Any) -> None:
        """Take the adapters out of the backbone, and restore its state."""
        detach(backbone)
        for name, parameter in backbone.named_parameters():
            parameter.requires_grad_(self._flags.get(name, True))
        # Older releases of transformers have the second name alone, newer ones warn of it.
        old = None if hasattr(type(backbone), "is_activation_checkpointing") else "is_gradient_checkpointing"
        if getattr(backbone, old or "is_activation_checkpointing", False):
            disable = getattr(backbone, "activation_checkpointing_disable", None)
            (disable or backbone.gradient_checkpointing_disable)()
        backbone.train(self._training)
