"""What the modules of a backbone are: frozen weights, adaptable layers, output heads and the list of decoder layers.

What is asked of every kind of layer need not be asked of all layers: the packing probe and the count of what a pass
keeps look at the first layers, as many as it takes to have one of each kind. Layers are of one kind if their code,
their own numbers and flags, their parameters' shapes and their adapters are the same.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING, MODEL_MAPPING
from transformers.pytorch_utils import Conv1D

from peft_mux.errors import UnsupportedModelError

# ------------------------------------------------------------------- frozen parts


def frozen_weight(base_layer: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return `(weight [K, D], bias [K])` of a plain linear layer; `(None, None)` for any other (quantised) kind."""
    # The exact class: subclasses, such as those of bitsandbytes, compute something else.
    kind = type(base_layer)
    if kind is nn.Linear:
        # From where they are kept: PyTorch's `__getattr__` looks everywhere else first.
        return base_layer._parameters["weight"], base_layer._parameters["bias"]
    # FSDP2 swaps the class for one that inherits from `FSDPModule` and from what it was before.
    kind = next(base for base in kind.__mro__ if not issubclass(base, FSDPModule))
    if kind is nn.Linear:
        return base_layer.weight, base_layer.bias
    if kind is Conv1D:
        # Conv1D keeps its weight as [D, K]; the view is free.
        return base_layer.weight.t(), base_layer.bias
    return None, None


def without_head(backbone: Any) -> Any:
    """Return the module that computes the last hidden states: the base model, or the decoder if there is none."""
    base = backbone.base_model
    # If the attribute that `base_model_prefix` names is missing, transformers gives the whole model (Llama 4).
    return getattr(backbone, "model", base) if base is backbone else base


def language_model(backbone: Any) -> Any:
    """Return what rows of text go through: the base model, or the part of it that is the language model."""
    base = without_head(backbone)
    if backbone.config.get_text_config() is backbone.config:
        return base
    text = backbone.get_decoder()
    return base if text is None or text is backbone else text


def modules_outside_text(backbone: Any) -> tuple[str, ...]:
    """Return the names of the modules that rows of text never reach: towers and projectors of images and sounds."""
    base, text = without_head(backbone), language_model(backbone)
    if text is base:
        return ()
    names = {module: name for name, module in backbone.named_modules()}
    outside, parent = [], base
    # Down the path from the base model to its language model, collecting the siblings.
    while parent is not text:
        way = f"{names[text]}."
        children = [(f"{names[parent]}.{child}", module) for child, module in parent.named_children()]
        outside += [name for name, _ in children if not way.startswith(f"{name}.")]
        parent = next(module for name, module in children if way.startswith(f"{name}."))
    return tuple(outside)


def is_router(module: nn.Module) -> bool:
    """Return whether a module is a router of a mixture, a linear layer by class that returns several tensors."""
    return isinstance(module, nn.Linear) and "Router" in type(module).__name__


HEAD_NAMES = ("classifier", "score")
"""Modules that PEFT trains in addition to the adapter for sequence classification."""

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
        if isinstance(module, (nn.Linear, Conv1D, nn.Embedding)):
            modules[_BASE_LAYERS.sub("", name)] = module
    return modules


def frozen_parameters(backbone: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield each parameter of a backbone, without those of adapters and of tasks' heads.

    Yields:
        its name, as if no tuner layer were around its module, and the parameter.
    """
    seen: set[int] = set()
    for name, module in modules_below_adapters(backbone):
        is_tuned = isinstance(module, BaseTunerLayer)
        for key, parameter in () if is_tuned else module.named_parameters(name, recurse=False):
            # Tied weights have the name under which they come first.
            if id(parameter) not in seen and not _OF_TASKS.search(key):
                seen.add(id(parameter))
                key = key.replace(".token_adapter.base_layer", "").replace(".base_layer", "")
                yield key if key.startswith(HEAD_NAMES) else key.replace(".original_module", ""), parameter


def module_names(backbone: nn.Module) -> list[str]:
    """Return the names of a backbone's own modules, seen through what PEFT has put around them."""
    names = [name for name, _ in backbone.named_modules() if name]
    return [name for name in names if not is_inside_wrapper(name)]


def is_inside_wrapper(name: str) -> bool:
    """Return whether a module is inside of what PEFT has put around another, by its name."""
    return _WRAPPED.search(f".{name}.") is not None


def modules_around_adapters(
    model: nn.Module, passed_over: Callable[[nn.Module], bool] = lambda layer: True
) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module once by name, as `named_modules` does, without those of the adapters in tuner layers.

    There are several of these a layer and task, so visiting them for each task takes time by the square of tasks.

    Args:
        model: a model with adapters.
        passed_over: of which tuner layers adapters are left out; of all by default.
    """
    return _walk(
        model, lambda layer, _, child: passed_over(layer) and isinstance(child, nn.ModuleDict | nn.ParameterDict)
    )


def modules_below_adapters(backbone: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module once by name, without what PEFT keeps in tuner layers in addition to the layers they wrap."""
    return _walk(backbone, lambda _, key, child: key != "base_layer")


def _walk(
    model: nn.Module, is_left_out: Callable[[nn.Module, str, nn.Module], bool]
) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module once by name, as `named_modules` does, without some children of tuner layers."""
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
    """Replace the module of a name."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def is_meta(model: nn.Module) -> bool:
    """Return whether a model is a description without weights."""
    return next(model.parameters()).is_meta


# ------------------------------------------------------------------- output heads


@dataclass(frozen=True, slots=True)
class HeadKind:
    """One kind of output head.

    Attributes:
        name: says in messages which tasks it serves, as in "classification tasks".
        task_types: the `task_type`s of PEFT that ask for it; `None` if a configuration may leave it open.
        auto_class: name of the class of transformers that loads backbones with this head.
        trained_modules: names of the modules that PEFT trains a copy of for each task; none if the head is frozen.
        advice: tells the user of another backbone how to get this head.
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
    """Return the kind of head of a backbone, by the end of its class name, such as `ForCausalLM`."""
    name = type(backbone).__name__
    kinds = (kind for kind in HEAD_KINDS if kind.auto_class.removeprefix("AutoModel") in name)
    return next(kinds, HEAD_KINDS[-1])


def head_kind_for(task_type: str | None) -> HeadKind:
    """Return the kind of head that a PEFT task type asks for; the last kind for types that none serves."""
    if not isinstance(task_type, (str, type(None))):  # what a configuration holds is checked later
        return HEAD_KINDS[-1]
    return next((kind for kind in HEAD_KINDS if task_type in kind.task_types), HEAD_KINDS[-1])


def head_module(backbone: Any) -> tuple[str, Any]:
    """Return the name and the module of the classification head (PEFT's wrapper once adapters are injected).

    Raises:
        UnsupportedModelError: if there is none under a name that PEFT knows.
    """
    for name in HEAD_NAMES:
        if isinstance(getattr(backbone, name, None), nn.Module):
            return name, getattr(backbone, name)
    raise UnsupportedModelError(
        f"{type(backbone).__name__} must have a classification head, a module named {' or '.join(HEAD_NAMES)}. Load "
        "the backbone with AutoModelForSequenceClassification for SEQ_CLS tasks."
    )


def classifier_class(backbone: Any) -> Any | None:
    """Return transformers' classifier of sequences on the base model of a causal language model, if the names agree.

    `None` for other backbones, and if the classifier adds more to that base model than one layer named `score`.
    """
    classifier: Any = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING.get(type(backbone.config), None)
    generic = GenericForSequenceClassification
    base: Any = MODEL_MAPPING.get(type(backbone.config), None)
    if head_kind_of(backbone) is not LANGUAGE_MODEL or classifier is None or base is None:
        return None
    is_generic = all(getattr(classifier, name) is getattr(generic, name) for name in ("__init__", "forward"))
    has_base = isinstance(getattr(backbone, classifier.base_model_prefix, None), base)
    return classifier if is_generic and has_base else None


def drop_head_place(backbone: Any) -> None:
    """Take out of a language model the place in which tasks that classify had their heads."""
    if isinstance(getattr(backbone, "score", None), nn.Identity):
        del backbone.score


def classifier_around(backbone: Any) -> Any:
    """Return a language model's base model and the selected task's head as transformers' classifier; nothing is copied.

    Args:
        backbone: a causal language model with a `classifier_class`, whose `score` is the head or PEFT's wrapper.
    """
    head, config = backbone.score, copy.copy(backbone.config)
    copies = getattr(head, "modules_to_save", None)
    config.num_labels = (head if copies is None else copies[head.active_adapters[0]]).out_features
    kind: Any = classifier_class(backbone)
    with torch.device("meta"):
        classifier = kind(config)
    setattr(classifier, classifier.base_model_prefix, getattr(backbone, classifier.base_model_prefix))
    classifier.score = head
    return classifier.train(backbone.training)


# ----------------------------------------------------------------- decoder layers

_PLACES = frozenset({"layer_idx", "layer_id", "layer_index", "layer_number", "idx", "index", "training"})
"""Attributes that say where a layer is, not what it computes."""
_PLAIN = (bool, int, float, str, type(None))


class LayerList(NamedTuple):
    """A list of layers, and its place in the model.

    Attributes:
        parent: the module that holds the list.
        name: its name there.
        layers: the layers, in order.
    """

    parent: nn.Module
    name: str
    layers: nn.ModuleList


def find_layers(backbone: Any) -> LayerList | None:
    """Return the list of the layers that rows of text go through; `None` if they are not in one list."""
    count = getattr(backbone.config.get_text_config(), "num_hidden_layers", None)
    for parent in language_model(backbone).modules():
        for name, child in parent.named_children():
            if isinstance(child, nn.ModuleList) and len(child) == count:
                return LayerList(parent, name, child)
    return None


def kinds_of_layers(backbone: Any, layers: Sequence[nn.Module]) -> list[int]:
    """Return a number for each layer of a backbone, the same for layers of one kind; adapters count."""
    types = getattr(backbone.config.get_text_config(), "layer_types", None) or [None] * len(layers)
    numbers: dict[Any, int] = {}
    return [
        numbers.setdefault((kind, _signature(layer)), len(numbers)) for kind, layer in zip(types, layers, strict=True)
    ]


def num_telling_layers(kinds: Sequence[int]) -> int:
    """Return how many of the first layers it takes to have one of each kind, not counting the first if possible.

    The first layer may differ from others of its kind in its inputs.

    Args:
        kinds: a number for each layer, the same for layers of one kind.

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


def telling_layers(backbone: Any) -> AbstractContextManager[None]:
    """Keep only as many of the first layers as it takes to have one of each kind, in the `with` block."""
    held = find_layers(backbone)
    kinds = [] if held is None else kinds_of_layers(backbone, list(held.layers))
    return first_layers(backbone, num_telling_layers(kinds))


@contextmanager
def first_layers(backbone: Any, count: int) -> Iterator[None]:
    """Keep only the first layers of a backbone for the time of the `with` block; a count of 0 stands for all."""
    held = find_layers(backbone)
    if held is None or len(held.layers[: count or None]) == len(held.layers):
        yield
        return
    config, kept = backbone.config.get_text_config(), nn.ModuleList(held.layers[:count])
    setattr(held.parent, held.name, kept)
    config.num_hidden_layers = len(kept)
    try:
        yield
    finally:
        config.num_hidden_layers = len(held.layers)
        setattr(held.parent, held.name, held.layers)


def _signature(module: nn.Module) -> tuple[Any, ...]:
    """Return what a module computes, as far as its attributes say."""
    fields = vars(module)
    plain: list[tuple[str, Any]] = [
        (key, value) for key, value in fields.items() if key not in _PLACES and isinstance(value, _PLAIN)
    ]
    children: list[Any] = [(name, child) for name, child in module.named_children()]
    if isinstance(module, BaseTunerLayer):
        # Adapters, of which there may be many, differ in their numbers (ranks, scales). No strings: among them are the
        # names of the modules.
        for key, values in fields.items():
            if isinstance(values, dict):
                numbers = [(name, number) for name, number in values.items() if isinstance(number, (bool, int, float))]
                plain.append((key, tuple(numbers)))
        plain += [(name, tuple(child.keys())) for name, child in children if isinstance(child, nn.ModuleDict)]
        children = [(name, child) for name, child in children if name == "base_layer"]
    parameters = [(name, tuple(value.shape)) for name, value in fields["_parameters"].items() if value is not None]
    inside = [(name, _signature(child)) for name, child in children]
    return (type(module), tuple(sorted(plain, key=str)), tuple(parameters), tuple(inside))
