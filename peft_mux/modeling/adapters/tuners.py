"""`Tuners`: adapters of several PEFT types on one backbone, while PEFT itself has one type a model.

Layers of two types that adapt one module lie around one another, with the frozen layer innermost::

    alone, as PEFT knows it                  together, while the model computes
    v_proj = lora.Linear(base)               v_proj = ia3.Linear(lora.Linear(base))
    v_proj = ia3.Linear(base)

LoRA on bare parameters (`target_parameters`) is named after how its wrappers lie around one another, so PEFT allows one
set of such parameters a model. Here wrappers of another set count as if they were of another type.

Whatever PEFT does with an adapter (inject, delete, save, load, merge), it does inside `as_peft_model`, which shows it
only the layers of that adapter's type and set. So names, initial weights and files are those of a model of one type.

Many types share state between adapters (projections, banks of vectors), or take one trainable adapter alone. So a kind
may say that its adapters are separate (`lies_apart`): each has its own tuner and layers, and PEFT sees only these. PEFT
then treats the task as if it were alone.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from peft import PeftConfig, PeftType
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from peft_mux.errors import ConfigError
from peft_mux.modeling.adapters.kind import KINDS, kind_of, kind_of_layer
from peft_mux.modeling.adapters.lora.lora_kind import DoubledRank
from peft_mux.modeling.adapters.trained_parts import merge_biases
from peft_mux.modeling.backbone.modules import (
    classifier_around,
    drop_head_place,
    head_kind_for,
    head_kind_of,
    is_meta,
    modules_around_adapters,
    put_module,
)

_TARGETS = "_peft_mux_targets"
"""The attribute in which a wrapper of a bare parameter keeps the set that it was made for."""

Owner = tuple[PeftType, str]
"""The type of a tuner and its layers, and the adapter that they belong to; "" if all of the type share them."""

_OWNER = "mux_owner"
"""Attribute of a layer of a separate adapter: the internal id of the adapter that it was made for."""


def _owner_of(adapter: str, config: PeftConfig) -> Owner:
    kind = kind_of(config)
    return kind.peft_type, adapter if kind.lies_apart else ""


def _owner_of_layer(layer: Any) -> Owner | None:
    kind = kind_of_layer(layer)
    return None if kind is None else (kind.peft_type, layer.__dict__.get(_OWNER, ""))


def _bare_targets(config: PeftConfig) -> frozenset[str]:
    return frozenset(getattr(config, "target_parameters", None) or ())


class Tuners:
    """PEFT's tuners of one `MultiTaskPeftModel`: that of the first task is PEFT's own, further ones are held here.

    Methods take that model, the internal id of an adapter, and its configuration as PEFT completed it.

    Attributes:
        first: what the first task's tuner belongs to; `None` before there is one.
    """

    def __init__(self) -> None:
        self.first: Owner | None = None
        self._others: dict[Owner, Any] = {}
        self._targets: set[frozenset[str]] = set()

    @property
    def is_mixed(self) -> bool:
        """Whether the model has had tuners in addition to the first, or more than one set of bare parameters."""
        return bool(self._others) or len(self._targets) > 1

    def of(self, model: Any, adapter: str, config: PeftConfig) -> Any:
        """Return PEFT's tuner of an adapter."""
        return self._others.get(_owner_of(adapter, config), model.base_model)

    def note(self, model: Any, adapter: str, config: PeftConfig) -> None:
        """Record an adapter that was just injected, and the layers that were added with it."""
        if self.first is None:
            self.first = _owner_of(adapter, config)
            _mark(model.backbone, self.first)
        targets = _bare_targets(config)
        self._targets |= {targets} if targets else set()
        for _, layer in modules_around_adapters(model.backbone):
            if isinstance(layer, ParamWrapper) and _TARGETS not in layer.__dict__:
                setattr(layer, _TARGETS, targets)

    def inject(self, model: Any, adapter: str, config: PeftConfig) -> None:
        """Inject an adapter with the initial weights that it would have in a model of its own; all of it or nothing."""
        configs, backbone, owner, kind = model.peft_config, model.backbone, _owner_of(adapter, config), kind_of(config)
        is_known = not kind.has_targets or owner == self.first or owner in self._others
        # Other sets of bare parameters, which are hidden from PEFT: it would refuse an adapter on another set.
        others = {item for item in self._targets if item != _bare_targets(config)}
        hidden = {key: other for key, other in configs.items() if _bare_targets(other) in others} if is_known else {}
        try:
            if is_known:
                for key, other in hidden.items():
                    configs[key] = copy.copy(other)
                    configs[key].target_parameters = None
                with self.as_peft_model(model, adapter, config, is_mixed=bool(others)):
                    kind.inject(model, adapter, config)
            else:
                with _only_layers(backbone, _shows(adapter, config)):
                    # PEFT would warn of a second tuner, which is what this is.
                    backbone.__dict__.pop("peft_config", None)
                    try:
                        tuner: Any = PEFT_TYPE_TO_TUNER_MAPPING[owner[0]]
                        made = tuner(backbone, {adapter: config}, adapter, low_cpu_mem_usage=is_meta(backbone))
                    finally:
                        backbone.peft_config = configs
                        _mark(backbone, owner)
                # One dictionary for all tuners: PEFT looks adapters up by their ids, which no two types share.
                configs[adapter] = config
                made.peft_config = configs
                self._others[owner] = made
        except Exception:
            # What an injection that failed half way has left is taken out, as the next adapter has the same id.
            if is_known:
                configs.update(hidden)  # `delete` looks at the configurations of the others
                configs[adapter] = config  # PEFT has taken it back, and asks for it
                self.delete(model, adapter)
            else:
                configs.pop(adapter, None)
                _take_out(backbone, owner)
            raise
        finally:
            configs.update(hidden)

    @contextmanager
    def as_peft_model(self, model: Any, adapter: str, config: PeftConfig, *, is_mixed: bool = False) -> Iterator[None]:
        """Show a model in the `with` block as PEFT built it for an adapter and the others of its tuner.

        `is_mixed` says that the model has others, in addition to those that it had before.
        """
        kind, configs = kind_of(config), model.peft_config
        if kind.has_targets and not self.is_mixed and not is_mixed:
            # With one type PEFT's own view is the model as it is, and need not be taken apart.
            yield
            return
        before = model.base_model, model.peft_type, model._is_prompt_learning, model._peft_config
        with _only_layers(model.backbone, _shows(adapter, config)):
            if kind.has_targets:
                model.base_model = self.of(model, adapter, config)
            else:
                # What PEFT makes of a model for prompts: the backbone and their encoders.
                model.base_model, model._is_prompt_learning, model._peft_config = model.backbone, True, configs
            model.peft_type = kind.peft_type
            try:
                yield
            finally:
                model.base_model, model.peft_type, model._is_prompt_learning, model._peft_config = before

    def delete(self, model: Any, adapter: str) -> None:
        """Take an adapter out of a model."""
        config = model.peft_config[adapter]
        kind, others = kind_of(config), [other for other in model.peft_config if other != adapter]
        is_active = bool(adapter in model.active_adapters and others)
        if not kind.has_targets:
            if is_active:
                model.select_adapter(others[0])
            kind.remove(model, adapter)
            return
        with self.as_peft_model(model, adapter, config):
            # PEFT warns, and chooses by itself, if the active adapter is deleted.
            if is_active:
                model.base_model.set_adapter(others[0])
            kind.remove(model, adapter)
        owner = _owner_of(adapter, config)
        if owner[1]:
            self._others.pop(owner, None)
            _take_out(model.backbone, owner)


def merge_and_unload(model: Any, tuners: Tuners, adapter: str) -> Any:
    """Return the backbone with one adapter merged in; as in PEFT, all are gone afterwards.

    A task that classifies on a language model gives transformers' classifier.

    Args:
        model: the `MultiTaskPeftModel` that holds the adapter.
        tuners: PEFT's tuners of the model.
        adapter: internal id of the adapter.

    Raises:
        ConfigError: if the adapter is a prompt, which changes no weights.
    """
    config = model.peft_config[adapter]
    kind = kind_of(config)
    if not kind.has_targets:
        raise ConfigError(
            f"merge needs an adapter that changes weights, got {kind.title}, which changes none. Load the saved "
            "adapter with PeftModel.from_pretrained."
        )
    tuner = tuners.of(model, adapter, config)
    # Before anything is taken apart: some adapters cannot be merged.
    tuner._check_merge_allowed()
    if tuners.is_mixed:
        for name, layers in _stacks(model.backbone).items():
            _show(model.backbone, name, layers, _shows(adapter, config))
    DoubledRank(model.backbone, adapter).write_plainly()
    merge_biases(model.backbone, adapter)
    merged = tuner.merge_and_unload(adapter_names=[adapter])
    if head_kind_for(config.task_type) != head_kind_of(merged):
        return classifier_around(merged)
    drop_head_place(merged)
    return merged


# ------------------------------------------------------------- stacks of layers


def _mark(backbone: nn.Module, owner: Owner) -> None:
    """Mark the layers of a kind that are not marked yet, if they belong to one adapter."""
    if owner[1]:
        for module in backbone.modules():
            if isinstance(module, BaseTunerLayer) and _owner_of_layer(module) == (owner[0], ""):
                setattr(module, _OWNER, owner[1])


def _shows(adapter: str, config: PeftConfig) -> Callable[[Any], bool]:
    """Return a function that says whether a layer exists in a model of this adapter alone."""
    owner, targets = _owner_of(adapter, config), _bare_targets(config)
    return lambda layer: _owner_of_layer(layer) == owner and layer.__dict__.get(_TARGETS, targets) == targets


@contextmanager
def _only_layers(backbone: nn.Module, shows: Callable[[Any], bool]) -> Iterator[None]:
    """Leave only some layers around the frozen ones, in the `with` block."""
    stacks = _stacks(backbone)
    for name, layers in stacks.items():
        _show(backbone, name, layers, shows)
    try:
        yield
    finally:
        for name, layers in stacks.items():
            # What is there now, as PEFT may have put a layer in or taken one out meanwhile.
            now = _chain(backbone.get_submodule(name))
            _stack(backbone, name, [*(layer for layer in layers if not shows(layer)), *now])


def _take_out(backbone: nn.Module, owner: Owner) -> None:
    """Remove the layers that belong to one kind or adapter; others stay around their frozen layers."""
    for name, layers in _stacks(backbone).items():
        frozen, others = layers[-1].base_layer, [layer for layer in layers if _owner_of_layer(layer) != owner]
        put_module(backbone, name, frozen)
        if others:
            others[-1].base_layer = frozen
            _stack(backbone, name, others)


def _stacks(backbone: nn.Module) -> dict[str, list[Any]]:
    """Return the tuner layers on each adapted module, by the module's name; the outermost first."""
    stacks: dict[str, list[Any]] = {}
    inside: tuple[str, ...] = ()
    for name, module in backbone.named_modules():
        # The rows of embeddings that tasks train are in a tuner layer, too, which no type's tuner holds.
        if isinstance(module, BaseTunerLayer) and not name.startswith(inside) and not name.endswith(".token_adapter"):
            inside = (f"{name}.",)
            stacks[name] = _chain(module)
    return stacks


def _chain(layer: Any) -> list[Any]:
    """Return the tuner layers that lie around one another, the outermost first."""
    layers = []
    while isinstance(layer, BaseTunerLayer):
        layers.append(layer)
        layer = layer.base_layer
    return layers


def _show(backbone: nn.Module, name: str, layers: list[Any], shows: Callable[[Any], bool]) -> None:
    """Let a module be some of the layers around its frozen layer, or the frozen layer if there is none of them."""
    shown = layers[-1].base_layer
    for layer in reversed(layers):
        if shows(layer):
            layer.base_layer, shown = shown, layer
    put_module(backbone, name, shown)


def _stack(backbone: nn.Module, name: str, layers: list[Any]) -> None:
    """Put layers, the outermost first, around their frozen one, in the order of their kinds."""
    inner = next((layer.base_layer for layer in layers if not isinstance(layer.base_layer, BaseTunerLayer)), None)
    if inner is None:
        return
    rank = list(KINDS)

    def place(layer: Any) -> tuple[int, str]:
        owner = _owner_of_layer(layer)
        assert owner is not None, "layers of a kind that is registered"
        return rank.index(owner[0]), owner[1]

    # The innermost first; sorting leaves layers of the same kind or adapter in this order.
    innermost_first = layers[::-1]
    for layer in sorted(innermost_first, key=place):
        layer.base_layer, inner = inner, layer
    put_module(backbone, name, inner)
