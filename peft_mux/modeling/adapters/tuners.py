"""`Tuners`: adapters of several PEFT types on one backbone, while PEFT itself keeps to one type a model.

Layers of two types that adapt one module lie around one another, with the frozen layer innermost::

    alone, as PEFT knows it                  together, while the model computes
    v_proj = lora.Linear(base)               v_proj = ia3.Linear(lora.Linear(base))
    v_proj = ia3.Linear(base)

Whatever PEFT does with an adapter (inject, delete, save, load, merge), it does inside `alone`, which shows it the
layers of that adapter's type and no others. So names, initial weights and files are those of a model of one type.

Many types share state between adapters (projections, banks of vectors), or take one trainable adapter alone. So a kind
may say that its adapters lie apart (`lies_apart`): each has a tuner and layers of its own, and PEFT is shown these and
no others. What PEFT makes of it is then what it makes of the task alone, whatever lies beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from peft import PeftConfig, PeftType
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from peft_mux.modeling.adapters.injection import is_meta
from peft_mux.modeling.adapters.kind import KINDS, AdapterKind, kind_of_layer

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
    return kind.peft_type, adapter if lies_apart(kind) else ""


def lies_apart(kind: AdapterKind) -> bool:
    """Return whether each adapter of a kind has a tuner and layers of its own."""
    return getattr(kind, "lies_apart", False)


def _owner_of_layer(layer: Any) -> Owner | None:
    kind = kind_of_layer(layer)
    return None if kind is None else (kind.peft_type, layer.__dict__.get(_OWNER, ""))


class Tuners:
    """PEFT's tuners of one model: that of the first task is PEFT's own business, further ones are held here."""

    def __init__(self) -> None:
        """Start with the first task alone."""
        self._first: Owner | None = None
        self._others: dict[Owner, Any] = {}

    @property
    def is_mixed(self) -> bool:
        """Whether the model has had tuners beside the first."""
        return bool(self._others)

    @property
    def has_begun(self) -> bool:
        """Whether the first task was taken in."""
        return self._first is not None

    def begin(self, model: Any, kind: AdapterKind, adapter: str) -> None:
        """Take in the first task, whose tuner PEFT has made.

        Args:
            model: the `MultiTaskPeftModel` whose tuners these are.
            kind: the kind that the adapter is of.
            adapter: internal id of the adapter's task.
        """
        self._first = owner_of(kind, adapter)
        _mark(model.backbone, self._first)

    def inject(self, model: Any, kind: AdapterKind, adapter: str, config: PeftConfig) -> None:
        """Inject an adapter, with the initial weights that it would have in a model of its own.

        Args:
            model: the `MultiTaskPeftModel` whose tuners these are.
            kind: the kind that the adapter is of.
            adapter: internal id of the adapter's task.
            config: the adapter's configuration; PEFT writes into it.
        """
        owner = owner_of(kind, adapter)
        if owner == self._first or owner in self._others:
            with self.alone(model, kind, adapter):
                model.add_adapter(adapter, config, low_cpu_mem_usage=is_meta(model.backbone))
            return
        self._others[owner] = self._new_tuner(model, owner, adapter, config)

    def _new_tuner(self, model: Any, owner: Owner, adapter: str, config: PeftConfig) -> Any:
        backbone, configs = model.backbone, model.peft_config
        with _layers_alone(backbone, owner):
            backbone.__dict__.pop("peft_config", None)  # else PEFT warns of a second tuner, which is what this is
            try:
                tuner: Any = PEFT_TYPE_TO_TUNER_MAPPING[owner[0]]
                made = tuner(backbone, {adapter: config}, adapter, low_cpu_mem_usage=is_meta(backbone))
                # `PeftModel` does this for the first tuner: adapters in fp32 on a backbone in half precision.
                made._cast_adapter_dtype(adapter_name=adapter, autocast_adapter_dtype=True)
            finally:
                backbone.peft_config = configs
                _mark(backbone, owner)
        # One dictionary for all tuners: PEFT looks adapters up by their ids, which no two types share.
        configs[adapter] = config
        made.peft_config = configs
        return made

    def forget(self, model: Any, kind: AdapterKind, adapter: str) -> None:
        """Let the tuner and the layers of an adapter that was deleted go, where they were that adapter's own."""
        owner = owner_of(kind, adapter)
        if owner[1]:
            self._others.pop(owner, None)
            for name, layers in _stacks(model.backbone).items():
                frozen, others = layers[-1].base_layer, [one for one in layers if _owner_of_layer(one) != owner]
                _put(model.backbone, name, frozen)
                if others:
                    others[-1].base_layer = frozen
                    _stack(model.backbone, name, others)

    @contextmanager
    def alone(self, model: Any, kind: AdapterKind, adapter: str) -> Iterator[None]:
        """Let a model be, for the time of the block, what PEFT made of it for an adapter (and those of its tuner).

        Args:
            model: the `MultiTaskPeftModel` whose tuners these are.
            kind: the kind that the adapter is of.
            adapter: internal id of the adapter's task.
        """
        # With one tuner PEFT's own view is the model as it is, and nothing has to be taken apart.
        if not self.is_mixed:
            yield
            return
        before, owner = (model.base_model, model.peft_type), owner_of(kind, adapter)
        with _layers_alone(model.backbone, owner):
            model.base_model, model.peft_type = self._others.get(owner, model.base_model), kind.peft_type
            try:
                yield
            finally:
                model.base_model, model.peft_type = before

    def leave_alone(self, model: Any, kind: AdapterKind, adapter: str) -> Any:
        """Take the layers of all other tuners out of a model for good, and return PEFT's tuner of an adapter.

        Args:
            model: the `MultiTaskPeftModel` whose tuners these are.
            kind: the kind that the adapter is of.
            adapter: internal id of the adapter's task, whose layers stay.
        """
        owner = owner_of(kind, adapter)
        if self.is_mixed:
            for name, layers in _stacks(model.backbone).items():
                _show(model.backbone, name, layers, owner)
        return self._others.get(owner, model.base_model)


def _mark(backbone: nn.Module, owner: Owner) -> None:
    """Write on the layers of a kind that now lie bare whose they are, where they are one adapter's own."""
    if owner[1]:
        for module in backbone.modules():
            if isinstance(module, BaseTunerLayer) and _owner_of_layer(module) == (owner[0], ""):
                setattr(module, _OWNER, owner[1])


@contextmanager
def _layers_alone(backbone: nn.Module, owner: Owner) -> Iterator[None]:
    stacks = _stacks(backbone)
    for name, layers in stacks.items():
        _show(backbone, name, layers, owner)
    try:
        yield
    finally:
        for name, layers in stacks.items():
            # What stands there now, as PEFT may have put a layer in or taken one out meanwhile.
            now = backbone.get_submodule(name)
            others = [layer for layer in layers if _owner_of_layer(layer) != owner]
            _stack(backbone, name, [*others, now] if isinstance(now, BaseTunerLayer) else others)


def _stacks(backbone: nn.Module) -> dict[str, list[Any]]:
    """Return the tuner layers on each adapted module, by the module's name; the outermost first."""
    stacks: dict[str, list[Any]] = {}
    inside: tuple[str, ...] = ()
    for name, module in backbone.named_modules():
        if isinstance(module, BaseTunerLayer) and not name.startswith(inside):
            inside = (f"{name}.",)
            layer: Any = module
            layers = stacks.setdefault(name, [])
            while isinstance(layer, BaseTunerLayer):
                layers.append(layer)
                layer = layer.base_layer
    return stacks


def _show(backbone: nn.Module, name: str, layers: list[Any], owner: Owner) -> None:
    """Let a module be the layer of one owner around its frozen layer, or the frozen layer where there is none."""
    shown = frozen = layers[-1].base_layer
    for layer in layers:
        if _owner_of_layer(layer) == owner:
            layer.base_layer, shown = frozen, layer
    _put(backbone, name, shown)


def _stack(backbone: nn.Module, name: str, layers: list[Any]) -> None:
    """Put layers around their frozen one, in an order that does not depend on which came first."""
    inner = next((layer.base_layer for layer in layers if not isinstance(layer.base_layer, BaseTunerLayer)), None)
    if inner is None:
        return
    rank = list(KINDS)
    for _, layer in sorted(
        ((_owner_of_layer(layer), layer) for layer in layers), key=lambda pair: _place(pair[0], rank)
    ):
        layer.base_layer, inner = inner, layer
    _put(backbone, name, inner)


def _place(owner: Owner | None, rank: list[PeftType]) -> tuple[int, str]:
    assert owner is not None, "layers of a kind that is registered"
    return rank.index(owner[0]), owner[1]


def _put(backbone: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(backbone.get_submodule(parent), child, module)
