"""Attaches multiplexed forwards to the layers that PEFT injected, and takes them out again (M §3.2)."""

from __future__ import annotations

from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import AuxiliaryTrainingWrapper, ModulesToSaveWrapper
from peft.utils.other import TrainableTokensWrapper
from torch import nn

from peft_mux.modeling.adapters.dropout import MultiplexedDropout
from peft_mux.modeling.adapters.kind import KINDS, kind_of_layer
from peft_mux.modeling.adapters.multiplexed import MultiplexedForward
from peft_mux.modeling.adapters.own.biases import MultiplexedBias, forget_biases, own_biases
from peft_mux.modeling.adapters.own.copies import MultiplexedCopies
from peft_mux.modeling.adapters.own.token_rows import MultiplexedTokenRows
from peft_mux.modeling.backbone.modules import modules_around_adapters
from peft_mux.modeling.stream import Stream


def attach(model: nn.Module, stream: Stream) -> None:
    """Multiplex every adapted layer and every dropout layer of a PEFT-injected model that is not yet so.

    Args:
        model: the backbone, into which PEFT has injected tuner layers.
        stream: what the layers will ask which rows are whose.
    """
    drawing = ""  # how names begin within the layer met last that draws its dropout by itself
    # Of adapters only those of layers that do not, as there are several modules a layer and task.
    for name, module in [*modules_around_adapters(model, passed_over=_draws_itself)]:
        kind = kind_of_layer(module)
        is_inside = bool(drawing) and name.startswith(drawing)
        if kind is not None and kind.draws_itself and not is_inside:
            drawing = f"{name}."
        # Attached before, or the backbone's own head, of which tasks train copies.
        forward = module.__dict__.get("forward")
        if isinstance(forward, MultiplexedBias) and _adds_own_biases(model, name):
            del module.forward  # another task's adapter has come around it since
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
        elif own_biases(module) and not _adds_own_biases(model, name):
            module.forward = MultiplexedBias(module, name, stream)
        elif isinstance(module, nn.Dropout) and not is_inside:
            module.forward = MultiplexedDropout(module, name, stream)
    for kind in KINDS.values():
        kind.arrange(model, stream)


def _draws_itself(layer: nn.Module) -> bool:
    kind = kind_of_layer(layer)
    return kind is not None and kind.draws_itself


def _adds_own_biases(model: nn.Module, name: str) -> bool:
    """Whether the layer around a frozen one adds what tasks have of its bias."""
    around = model.get_submodule(name.removesuffix(".base_layer")) if name.endswith(".base_layer") else None
    return around is not None and getattr(around.__dict__.get("forward"), "adds_own_biases", False)


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
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, original)
    forget_biases(model)
    # By this attribute PEFT takes a model for one that has adapters.
    model.__dict__.pop("peft_config", None)
