"""`Tuners`: adapters of several PEFT types on one backbone, while PEFT itself keeps to one type a model.

Layers of two types that adapt one module lie around one another, with the frozen layer innermost::

    alone, as PEFT knows it                  together, while the model computes
    v_proj = lora.Linear(base)               v_proj = ia3.Linear(lora.Linear(base))
    v_proj = ia3.Linear(base)

LoRA on bare parameters (`target_parameters`) is named after how its wrappers lie around one another, so PEFT allows one
set of such parameters a model. Here wrappers of another set count as if they were of another type.

Whatever PEFT does with an adapter (inject, delete, save, load, merge), it does inside `alone`, which shows it the
layers of that adapter's type and set, and no others. So names, initial weights and files are those of a model of one.

Many types share state between adapters (projections, banks of vectors), or take one trainable adapter alone. So a kind
may say that its adapters lie apart (`lies_apart`): each has a tuner and layers of its own, and PEFT is shown these and
no others. What PEFT makes of it is then what it makes of the task alone, whatever lies beside it.
"""

# MERGED: One adapter becomes part of the backbone's weights, and all others go.

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from peft import PeftConfig, PeftType
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.lora.layer import ParamWrapper
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from peft_mux.errors import ConfigError
from peft_mux.modeling.adapters.kind import KINDS, AdapterKind, kind_of, kind_of_layer
from peft_mux.modeling.adapters.own import merge_biases
from peft_mux.modeling.adapters.prompts.kinds import MERGED_NOTHING, PromptKind
from peft_mux.modeling.adapters.prompts.prompts import add_prompt, as_prompts, remove_prompt
from peft_mux.modeling.backbone.modules import is_meta, modules_around_adapters, put_module

_TARGETS = "_peft_mux_targets"
"""Under which a wrapper of a bare parameter keeps the set that it was made for."""

Owner = tuple[PeftType, str]
"""Whose a tuner and its layers are: those of a PEFT type, or of one adapter where its kind's adapters lie apart."""

_OWNER = "mux_owner"
"""Attribute of a layer that lies apart: the internal id of the adapter that it was made for."""


def owner_of(kind: AdapterKind, adapter: str) -> Owner:
    """Return whose the tuner is that an adapter belongs to.

    Args:
        kind: the kind of the adapter.
        adapter: internal id of the adapter's task.
    """
    return kind.peft_type, adapter if kind.lies_apart else ""


def _owner_of_layer(layer: Any) -> Owner | None:
    kind = kind_of_layer(layer)
    return None if kind is None else (kind.peft_type, layer.__dict__.get(_OWNER, ""))


class Tuners:
    """PEFT's tuners of one model: that of the first task is PEFT's own business, further ones are held here."""

    def __init__(self) -> None:
        """Start with the first task alone."""
        self._first: Owner | None = None
        self._others: dict[Owner, Any] = {}
        self._targets: set[frozenset[str]] = set()

    @property
    def is_mixed(self) -> bool:
        """Whether the model has had tuners beside the first, or more than one set of bare parameters."""
        return bool(self._others) or len(self._targets) > 1

    @property
    def has_begun(self) -> bool:
        """Whether the first task was taken in."""
        return self._first is not None

    def begin(self, model: Any, kind: AdapterKind, adapter: str) -> None:
        """Take in the first task, whose tuner PEFT has made; prompts have none.

        Args:
            model: the `MultiTaskPeftModel` whose tuners these are.
            kind: the kind that the adapter is of.
            adapter: internal id of the adapter's task.
        """
        self._first = owner_of(kind, adapter)
        _mark(model.backbone, self._first)

    def note(self, model: Any, config: PeftConfig) -> None:
        """Write down which layers of a model came with an adapter that was injected just now.

        Args:
            model: the `MultiTaskPeftModel` whose tuners these are.
            config: the adapter's configuration, as PEFT completed it.
        """
        targets = _bare_targets(config)
        self._targets |= {targets} if targets else set()
        for _, layer in modules_around_adapters(model.backbone):
            if isinstance(layer, ParamWrapper) and _TARGETS not in layer.__dict__:
                setattr(layer, _TARGETS, targets)

    def inject(self, model: Any, kind: AdapterKind, adapter: str, config: PeftConfig) -> None:
        """Inject an adapter, with the initial weights that it would have in a model of its own.

        Args:
            model: the `MultiTaskPeftModel` whose tuners these are.
            kind: the kind that the adapter is of.
            adapter: internal id of the adapter's task.
            config: the adapter's configuration; PEFT writes into it.
        """
        if isinstance(kind, PromptKind):
            with self.alone(model, adapter, config):
                add_prompt(model, adapter, config)
            return
        owner = owner_of(kind, adapter)
        if owner == self._first or owner in self._others:
            configs: Any = model.peft_config
            others = {item for item in self._targets if item != _bare_targets(config)}
            with self.alone(model, adapter, config, is_mixed=bool(others)), _without_targets(configs, others):
                model.add_adapter(adapter, config, low_cpu_mem_usage=is_meta(model.backbone))
            return
        self._others[owner] = self._new_tuner(model, kind, adapter, config)

    def _new_tuner(self, model: Any, kind: AdapterKind, adapter: str, config: PeftConfig) -> Any:
        backbone, configs = model.backbone, model.peft_config
        with _layers_alone(backbone, _shows(adapter, config)):
            backbone.__dict__.pop("peft_config", None)  # else PEFT warns of a second tuner, which is what this is
            try:
                tuner: Any = PEFT_TYPE_TO_TUNER_MAPPING[kind.peft_type]
                made = tuner(backbone, {adapter: config}, adapter, low_cpu_mem_usage=is_meta(backbone))
            finally:
                backbone.peft_config = configs
                _mark(backbone, owner_of(kind, adapter))
        # One dictionary for all tuners: PEFT looks adapters up by their ids, which no two types share.
        configs[adapter] = config
        made.peft_config = configs
        return made

    def cast(self, model: Any, kind: AdapterKind, adapter: str) -> None:
        """Bring an adapter to fp32 on a backbone in half precision, as PEFT does of adapters that it sees.

        Args:
            model: the `MultiTaskPeftModel` whose tuners these are.
            kind: the kind that the adapter is of.
            adapter: internal id of the adapter's task.
        """
        if not isinstance(kind, PromptKind):
            self.of(model, kind, adapter)._cast_adapter_dtype(adapter_name=adapter, autocast_adapter_dtype=True)

    @contextmanager
    def alone(self, model: Any, adapter: str, config: PeftConfig, *, is_mixed: bool = False) -> Iterator[None]:
        """Let a model be, for the time of the block, what PEFT made of it for an adapter and those of its tuner.

        Args:
            model: the `MultiTaskPeftModel` whose tuners these are.
            adapter: internal id of the adapter's task.
            config: completed configuration of the adapter; those of its type and of its bare parameters are shown.
            is_mixed: whether the model has others, beside those that it had before.
        """
        kind = kind_of(config)
        if isinstance(kind, PromptKind):
            with _layers_alone(model.backbone, _shows(adapter, config)), as_prompts(model, kind):
                yield
            return
        # With one type PEFT's own view is the model as it is, and nothing has to be taken apart.
        if not self.is_mixed and not is_mixed:
            yield
            return
        before = model.base_model, model.peft_type
        with _layers_alone(model.backbone, _shows(adapter, config)):
            model.base_model, model.peft_type = self.of(model, kind, adapter), kind.peft_type
            try:
                yield
            finally:
                model.base_model, model.peft_type = before

    def delete(self, model: Any, adapter: str, others: Sequence[str]) -> None:
        """Take an adapter out of a model.

        Args:
            model: the `MultiTaskPeftModel` whose tuners these are.
            adapter: internal id of the adapter's task.
            others: those of all other tasks.
        """
        config = model.peft_config[adapter]
        if isinstance(kind_of(config), PromptKind):
            if adapter in model.active_adapters and others:
                model.select_adapter(others[0])
            remove_prompt(model, adapter)
            return
        with self.alone(model, adapter, config):
            # PEFT warns, and chooses by itself, where the active adapter is deleted.
            if adapter in model.active_adapters and others:
                model.base_model.set_adapter(others[0])
            model.delete_adapter(adapter)
        owner = owner_of(kind_of(config), adapter)
        if owner[1]:
            self._others.pop(owner, None)
            _take_out(model.backbone, owner)

    def undo(self, model: Any, adapter: str, config: PeftConfig, others: Sequence[str]) -> None:
        """Take out what an injection that failed half way has left, as the next adapter has the same id.

        Args:
            model: the `MultiTaskPeftModel` whose tuners these are.
            adapter: internal id that the adapter would have had.
            config: the configuration that was injected.
            others: internal ids of all tasks.
        """
        owner = owner_of(kind_of(config), adapter)
        if isinstance(kind_of(config), PromptKind):
            remove_prompt(model, adapter)
        elif owner == self._first or owner in self._others:
            model.peft_config[adapter] = config  # PEFT has taken it back, and asks for it
            self.delete(model, adapter, others)
        else:
            model.peft_config.pop(adapter, None)
            _take_out(model.backbone, owner)

    def leave_alone(self, model: Any, adapter: str) -> Any:
        """Take the layers of all other adapters out of a model for good, and return PEFT's tuner of this one.

        Args:
            model: the `MultiTaskPeftModel` whose tuners these are.
            adapter: internal id of the adapter's task, whose layers stay.
        """
        config = model.peft_config[adapter]
        if self.is_mixed:
            for name, layers in _stacks(model.backbone).items():
                _show(model.backbone, name, layers, _shows(adapter, config))
        return self.of(model, kind_of(config), adapter)

    def of(self, model: Any, kind: AdapterKind, adapter: str) -> Any:
        """Return PEFT's tuner of an adapter.

        Args:
            model: the `MultiTaskPeftModel` whose tuners these are.
            kind: the kind that the adapter is of.
            adapter: internal id of the adapter's task.
        """
        return self._others.get(owner_of(kind, adapter), model.base_model)


def _take_out(backbone: nn.Module, owner: Owner) -> None:
    """Let the layers of an owner go; those of others stay around their frozen ones."""
    for name, layers in _stacks(backbone).items():
        frozen, others = layers[-1].base_layer, [layer for layer in layers if _owner_of_layer(layer) != owner]
        put_module(backbone, name, frozen)
        if others:
            others[-1].base_layer = frozen
            _stack(backbone, name, others)


def _mark(backbone: nn.Module, owner: Owner) -> None:
    """Write on the layers of a kind that now lie bare whose they are, where they are one adapter's own."""
    if owner[1]:
        for module in backbone.modules():
            if isinstance(module, BaseTunerLayer) and _owner_of_layer(module) == (owner[0], ""):
                setattr(module, _OWNER, owner[1])


def _bare_targets(config: PeftConfig) -> frozenset[str]:
    return frozenset(getattr(config, "target_parameters", None) or ())


def _shows(adapter: str, config: PeftConfig) -> Callable[[Any], bool]:
    """Return whether a layer is there in a model of this adapter alone, by the layer."""
    owner, targets = owner_of(kind_of(config), adapter), _bare_targets(config)
    return lambda layer: _owner_of_layer(layer) == owner and layer.__dict__.get(_TARGETS, targets) == targets


@contextmanager
def _without_targets(configs: dict[str, Any], targets: set[frozenset[str]]) -> Iterator[None]:
    """Keep these sets of bare parameters from PEFT, which would refuse an adapter on another set beside them."""
    before = {adapter: config for adapter, config in configs.items() if _bare_targets(config) in targets}
    for adapter, config in before.items():
        hidden: Any = copy.copy(config)
        hidden.target_parameters = None
        configs[adapter] = hidden
    try:
        yield
    finally:
        configs.update(before)


@contextmanager
def _layers_alone(backbone: nn.Module, shows: Callable[[Any], bool]) -> Iterator[None]:
    stacks = _stacks(backbone)
    for name, layers in stacks.items():
        _show(backbone, name, layers, shows)
    try:
        yield
    finally:
        for name, layers in stacks.items():
            # What stands there now, as PEFT may have put a layer in or taken one out meanwhile.
            now = _chain(backbone.get_submodule(name))
            others = [layer for layer in layers if not shows(layer)]
            _stack(backbone, name, [*others, *now])


def _stacks(backbone: nn.Module) -> dict[str, list[Any]]:
    """Return the tuner layers on each adapted module, by the module's name; the outermost first."""
    stacks: dict[str, list[Any]] = {}
    inside: tuple[str, ...] = ()
    for name, module in backbone.named_modules():
        # Rows of embeddings that tasks train of their own lie in a tuner layer, too, which no type's tuner holds.
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
    """Let a module be some of the layers around its frozen layer, or the frozen layer where there is none of them."""
    shown = layers[-1].base_layer
    for layer in reversed(layers):
        if shows(layer):
            layer.base_layer, shown = shown, layer
    put_module(backbone, name, shown)


def _stack(backbone: nn.Module, name: str, layers: list[Any]) -> None:
    """Put layers, of which outer ones come first, around their frozen one; owners do so in the order of their kinds."""
    inner = next((layer.base_layer for layer in layers if not isinstance(layer.base_layer, BaseTunerLayer)), None)
    if inner is None:
        return
    rank, innermost_first = list(KINDS), layers[::-1]
    for layer in sorted(innermost_first, key=lambda layer: _place(_owner_of_layer(layer), rank)):
        layer.base_layer, inner = inner, layer
    put_module(backbone, name, inner)


def _place(owner: Owner | None, rank: list[PeftType]) -> tuple[int, str]:
    assert owner is not None, "layers of a kind that is registered"
    return rank.index(owner[0]), owner[1]


def merge_and_unload(model: Any, tuners: Tuners, adapter: str) -> Any:
    """Return the backbone with one adapter merged in; as in PEFT, all are gone afterwards.

    Args:
        model: the `MultiTaskPeftModel` that holds the adapter.
        tuners: PEFT's tuners of the model.
        adapter: internal id of the adapter.

    Raises:
        ConfigError: if the adapter is a prompt, which changes no weights.
    """
    config = model.peft_config[adapter]
    kind = kind_of(config)
    if isinstance(kind, PromptKind):
        raise ConfigError(
            f"merge: got an adapter of {kind.title}; allowed: types that change weights, as {MERGED_NOTHING}."
            " Load the saved adapter with PeftModel.from_pretrained."
        )
    # Before anything is taken apart: some adapters cannot be merged.
    tuners.of(model, kind, adapter)._check_merge_allowed()
    tuner = tuners.leave_alone(model, adapter)
    form = kind.saved_form(model.backbone, adapter)
    if form is not None:
        form.write_plainly()
    merge_biases(model.backbone, adapter)
    return tuner.merge_and_unload(adapter_names=[adapter])
