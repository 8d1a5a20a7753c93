"""What the modules of a backbone are: frozen weights, and which of them can be adapted."""

# MERGED: The kinds of output head that a backbone may end in, as far as class names and PEFT's task types tell them.
# MERGED: What each computes on a packed stream is in `peft_mux.modeling.objectives`; adapters only need what stands
# MERGED: here.
# MERGED: The decoder layers of a backbone: where their list is, which of them are alike, and how to do with the first
# MERGED: few.
# MERGED: What is asked of every kind of layer need not be asked of all layers: the packing probe and the count of
# MERGED: what a pass
# MERGED: keeps look at the first layers, as many as it takes to have one of each kind. Layers are of one kind where
# MERGED: their code,
# MERGED: their own numbers and flags, their parameters' shapes and their adapters are the same.

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from transformers.pytorch_utils import Conv1D

from peft_mux.modeling.sharding import plain_type


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


@dataclass(frozen=True, slots=True)
class HeadKind:
    """One kind of output head.

    Attributes:
        name: says in messages which tasks it serves, as in "classification tasks".
        task_types: the `task_type`s of PEFT that ask for it; `None` where a configuration may leave it open.
        auto_class: name of the class of transformers that loads backbones with this head.
        trained_modules: names of the modules that PEFT trains a copy of for each task; none where the head is frozen.
        advice: tells the owner of another backbone how to get this head.
    """

    name: str
    task_types: tuple[str | None, ...]
    auto_class: str
    trained_modules: tuple[str, ...] = ()
    advice: str = ""

    @property
    def is_shared(self) -> bool:
        """Whether all tasks share one frozen head, rather than train a small one each."""
        return not self.trained_modules

    @property
    def class_suffix(self) -> str:
        """What the class names of backbones with this head contain, such as `ForCausalLM`."""
        return self.auto_class.removeprefix("AutoModel")


CLASSIFICATION = HeadKind(
    "classification",
    ("SEQ_CLS",),
    "AutoModelForSequenceClassification",
    HEAD_NAMES,
    "Load it with AutoModelForSequenceClassification to train classifiers.",
)
TOKEN_CLASSIFICATION = HeadKind(
    "token-classification",
    ("TOKEN_CLS",),
    "AutoModelForTokenClassification",
    HEAD_NAMES,
    "Load it with AutoModelForTokenClassification to train classifiers of tokens.",
)
LANGUAGE_MODEL = HeadKind("language-model", ("CAUSAL_LM", None), "AutoModelForCausalLM")
HEAD_KINDS = (CLASSIFICATION, TOKEN_CLASSIFICATION, LANGUAGE_MODEL)
"""All kinds; the last is taken for backbones that name none of the others, such as `GPT2LMHeadModel`."""

SUPPORTED_TASK_TYPES = tuple(task_type for kind in HEAD_KINDS for task_type in kind.task_types)


def head_kind_of(backbone: Any) -> HeadKind:
    """Return the kind of head that a backbone's class name tells."""
    name = type(backbone).__name__
    return next((kind for kind in HEAD_KINDS if kind.class_suffix in name), HEAD_KINDS[-1])


def head_kind_for(task_type: str | None) -> HeadKind:
    """Return the kind of head that a PEFT task type asks for; the last kind for types that none serves."""
    if not isinstance(task_type, (str, type(None))):  # what a configuration holds is checked later
        return HEAD_KINDS[-1]
    return next((kind for kind in HEAD_KINDS if task_type in kind.task_types), HEAD_KINDS[-1])


_PLACES = frozenset({"layer_idx", "layer_id", "layer_index", "layer_number", "idx", "index", "training"})
"""Attributes that say where a layer is, not what it does."""
_PLAIN = (bool, int, float, str, type(None))


class LayerList(NamedTuple):
    """A list of layers, and where it hangs.

    Attributes:
        parent: the module that holds the list.
        name: its name there.
        layers: the layers, in order.
    """

    parent: nn.Module
    name: str
    layers: nn.ModuleList


def find_layers(backbone: Any) -> LayerList | None:
    """Return the list of the layers that rows of text go through; `None` where they are not in one list.

    Args:
        backbone: a transformers model, possibly with adapters.
    """
    count = getattr(backbone.config.get_text_config(), "num_hidden_layers", None)
    for parent in language_model(backbone).modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return LayerList(parent, name, child)
    return None


def kinds_of_layers(backbone: Any, layers: Sequence[nn.Module]) -> list[int]:
    """Return a number for each layer, the same for those that are alike.

    Args:
        backbone: the model that they are of, whose configuration may tell their types.
        layers: its layers, in order, with the adapters that they have.
    """
    types = getattr(backbone.config.get_text_config(), "layer_types", None) or [None] * len(layers)
    numbers: dict[Any, int] = {}
    return [
        numbers.setdefault((kind, _signature(layer)), len(numbers)) for kind, layer in zip(types, layers, strict=True)
    ]


def num_telling_layers(kinds: Sequence[int]) -> int:
    """Return how many of the first layers it takes to have one of each kind, and not the first where there is another.

    The first layer is left out as it may be unlike others of its kind in what it is given.

    Args:
        kinds: a number for each layer, the same for those that are alike.

    Example:
        >>> num_telling_layers([0, 0, 0, 0]), num_telling_layers([0, 1, 0, 1]), num_telling_layers([0, 1, 1, 1])
        (2, 3, 3)
    """
    seen: set[int] = set()
    for count in range(1, len(kinds)):
        if set(kinds[count:]) <= seen:
            return count
        seen.add(kinds[count])
    return len(kinds)


@contextmanager
def first_layers(backbone: Any, count: int) -> Iterator[None]:
    """Let a backbone have its first layers only, for the time of the block.

    Args:
        backbone: a transformers model, possibly with adapters.
        count: how many of its layers stay; 0 for all, which stay as well where they are not in one list.
    """
    found = find_layers(backbone)
    if found is None or not 0 < count < len(found.layers):
        yield
        return
    with _with_layers(backbone, found, found.layers[:count]):
        yield


@contextmanager
def last_layer_alone(backbone: Any) -> Iterator[None]:
    """Let a backbone have its last layer only, for the time of the block; all where they are not in one list.

    Args:
        backbone: a transformers model, possibly with adapters.
    """
    found = find_layers(backbone)
    if found is None:
        yield
        return
    with _with_layers(backbone, found, found.layers[-1:]):
        yield


@contextmanager
def _with_layers(backbone: Any, found: LayerList, layers: Iterable[nn.Module]) -> Iterator[None]:
    config, kept = backbone.config.get_text_config(), nn.ModuleList(layers)
    setattr(found.parent, found.name, kept)
    config.num_hidden_layers = len(kept)
    try:
        yield
    finally:
        config.num_hidden_layers = len(found.layers)
        setattr(found.parent, found.name, found.layers)


def _signature(module: nn.Module) -> tuple[Any, ...]:
    """Return what a module computes, as far as attributes tell it."""
    own = vars(module)
    plain = [(key, value) for key, value in own.items() if key not in _PLACES and isinstance(value, _PLAIN)]
    children: list[Any] = [(name, child) for name, child in module.named_children()]
    if isinstance(module, BaseTunerLayer):
        # Of adapters their numbers (ranks, scales) tell all, and there may be many.
        plain += [(key, _plain_items(value)) for key, value in own.items() if isinstance(value, dict)]
        plain += [(name, tuple(child.keys())) for name, child in children if isinstance(child, nn.ModuleDict)]
        children = [(name, child) for name, child in children if name == "base_layer"]
    parameters = [(name, tuple(value.shape)) for name, value in own["_parameters"].items() if value is not None]
    inside = [(name, _signature(child)) for name, child in children]
    return (type(module), tuple(sorted(plain, key=str)), tuple(parameters), tuple(inside))


def _plain_items(values: dict[Any, Any]) -> tuple[Any, ...]:
    # No words: among them are the names of the modules.
    return tuple((key, value) for key, value in values.items() if isinstance(value, (bool, int, float)))
