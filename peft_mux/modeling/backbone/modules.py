"""What the modules of a backbone are: frozen weights, and which of them can be adapted."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers.pytorch_utils import Conv1D

from peft_mux.modeling.sharding.gathering import plain_type


def frozen_weight(base_layer: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return `(weight [K, D], bias [K])` of a plain linear layer; `(None, None)` for any other (quantised) kind."""
    # The exact class: subclasses, such as those of bitsandbytes, compute something else.
    kind = type(base_layer)
    if kind is nn.Linear:
        # From where they are kept: PyTorch's `__getattr__` looks everywhere else first.
        return base_layer._parameters["weight"], base_layer._parameters["bias"]
    kind = plain_type(base_layer)
    if kind is nn.Linear:
        return base_layer.weight, base_layer.bias
    if kind is Conv1D:
        # Conv1D keeps its weight as [D, K]; the view is free.
        return base_layer.weight.t(), base_layer.bias
    return None, None


def without_head(backbone: Any) -> Any:
    """Return what a backbone computes its last hidden states with: its base model, or its decoder where it has none."""
    base = backbone.base_model
    # Where the attribute that `base_model_prefix` names is not there, transformers gives the whole model (Llama 4).
    return getattr(backbone, "model", base) if base is backbone else base


def language_model(backbone: Any) -> Any:
    """Return what rows of text go through: the base model, or the part of it that is a model of language."""
    base = without_head(backbone)
    if backbone.config.get_text_config() is backbone.config:
        return base
    text = backbone.get_decoder()
    return base if text is None or text is backbone else text


def modules_beside_text(backbone: Any) -> tuple[str, ...]:
    """Return the names of the modules that rows of text never reach: towers and projectors of images and sounds."""
    base, text = without_head(backbone), language_model(backbone)
    if text is base:
        return ()
    names = {module: name for name, module in backbone.named_modules()}
    found, parent = [], base
    # Down the way from the base model to its language model: what else hangs there is something else.
    while parent is not text:
        way = f"{names[text]}."
        children = [(f"{names[parent]}.{child}", module) for child, module in parent.named_children()]
        found += [name for name, _ in children if not way.startswith(f"{name}.")]
        parent = next(module for name, module in children if way.startswith(f"{name}."))
    return tuple(found)


def is_router(module: nn.Module) -> bool:
    """Whether a module is a router of a mixture that is written as a linear layer, but returns several tensors."""
    return isinstance(module, nn.Linear) and "Router" in type(module).__name__


HEAD_NAMES = ("classifier", "score")
"""Modules that PEFT trains beside the adapter for sequence classification."""


_EMBEDDINGS = (nn.Embedding,)
_OF_TASKS = re.compile(r"\.(modules_to_save|own_bias)\.")
_WRAPPED = re.compile(r"\.(base_layer|original_module|modules_to_save|token_adapter|lora_[^.]+)\.")
_BASE_LAYERS = re.compile(r"(\.token_adapter)?(\.base_layer)+$")


def adaptable_modules(backbone: nn.Module) -> dict[str, nn.Module]:
    """Return the linear and embedding modules of a backbone by name, seen through injected tuner layers."""
    modules: dict[str, nn.Module] = {}
    for name, module in modules_below_adapters(backbone):
        if not name.startswith(HEAD_NAMES):
            name = name.removesuffix(".original_module")  # of which tasks train copies
        if ".modules_to_save." in name or ".original_module" in name:
            continue
        if isinstance(module, (nn.Linear, Conv1D, *_EMBEDDINGS)):
            modules[_BASE_LAYERS.sub("", name)] = module
    return modules


def frozen_parameters(backbone: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each parameter of a backbone but for those of adapters and of tasks' heads.

    Yields:
        its name, as if no tuner layer lay around its module, and the parameter.
    """
    seen: set[int] = set()
    for name, module in modules_below_adapters(backbone):
        is_tuned = isinstance(module, BaseTunerLayer)
        for own, parameter in () if is_tuned else module.named_parameters(name, recurse=False):
            # Tied weights have the name under which they are met first.
            if id(parameter) not in seen and not _OF_TASKS.search(own):
                seen.add(id(parameter))
                yield _plain_name(own), parameter


def _plain_name(name: str) -> str:
    """Return the name of a frozen parameter as if nothing lay around its module; that of a task's head stays."""
    name = name.replace(".token_adapter.base_layer", "").replace(".base_layer", "")
    return name if name.startswith(HEAD_NAMES) else name.replace(".original_module", "")


def module_names(backbone: nn.Module) -> list[str]:
    """Return the names of a backbone's own modules, seen through what PEFT has put around them."""
    names = [name for name, _ in backbone.named_modules() if name]
    return [name for name in names if not is_inside_wrapper(name)]


def is_inside_wrapper(name: str) -> bool:
    """Whether a module lies inside of what PEFT has put around another, by its name."""
    return _WRAPPED.search(f".{name}.") is not None


def modules_around_adapters(
    model: nn.Module, passed_over: Callable[[nn.Module], bool] = lambda layer: True
) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module once by name, as `named_modules` does, but for those of the adapters in tuner layers.

    There are several of these a layer and task, so going through them for each task takes time by the square of tasks.

    Args:
        model: a model with adapters.
        passed_over: of which tuner layers adapters are left out; of all by default.
    """
    return _walk(
        model, lambda layer, _, child: passed_over(layer) and isinstance(child, nn.ModuleDict | nn.ParameterDict)
    )


def modules_below_adapters(backbone: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module once by name, but for what PEFT keeps in tuner layers beside the layers that they wrap."""
    return _walk(backbone, lambda _, key, child: key != "base_layer")


def _walk(
    model: nn.Module, is_left_out: Callable[[nn.Module, str, nn.Module], bool]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module once by name, as `named_modules` does, but for some children of tuner layers."""
    seen: set[nn.Module] = set()
    waiting: list[tuple[str, nn.Module]] = [("", model)]
    while waiting:
        name, module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        yield name, module
        is_tuned, prefix = isinstance(module, BaseTunerLayer), f"{name}." if name else ""
        for key, child in reversed([*module.named_children()]):
            if not (is_tuned and is_left_out(module, key, child)):
                waiting.append((f"{prefix}{key}", child))


def put_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put a module in the place of the one of a name."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def is_meta(model: nn.Module) -> bool:
    """Whether a model is a description without weights."""
    return next(model.parameters()).is_meta
