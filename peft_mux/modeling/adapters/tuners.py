"""`Tuners`: adapters of several PEFT types on one backbone, while PEFT itself keeps to one type a model.

Layers of two types that adapt one module lie around one another, with the frozen layer innermost::

    alone, as PEFT knows it                  together, while the model computes
    v_proj = lora.Linear(base)               v_proj = ia3.Linear(lora.Linear(base))
    v_proj = ia3.Linear(base)

Whatever PEFT does with an adapter (inject, delete, save, load, merge), it does inside `alone`, which shows it the
layers of that adapter's type and no others. So names, initial weights and files are those of a model of one type.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from peft import PeftConfig, PeftType
from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import nn

from peft_mux.modeling.adapters.injection import is_meta
from peft_mux.modeling.adapters.kind import KINDS, AdapterKind, kind_of_layer
from peft_mux.modeling.adapters.prompts.kind import PromptKind
from peft_mux.modeling.adapters.prompts.tuner import add_prompt, as_prompts, remove_prompt


class Tuners:
    """PEFT's tuners of one model: that of the first task's type is PEFT's own business, further ones are held here."""

    def __init__(self) -> None:
        """Start with the type of the first task alone."""
        self._others: dict[PeftType, Any] = {}

    @property
    def is_mixed(self) -> bool:
        """Whether the model has had tasks of more than one PEFT type."""
        return bool(self._others)

    def inject(self, model: Any, kind: AdapterKind, adapter: str, config: PeftConfig) -> None:
        """Inject an adapter, with the initial weights that it would have in a model of its own.

        Args:
            model: the `MultiTaskPeftModel` whose tuners these are.
            kind: the kind that the adapter is of.
            adapter: internal id of the adapter's task.
            config: the adapter's configuration; PEFT writes into it.
        """
        if isinstance(kind, PromptKind):
            with self.alone(model, kind):
                add_prompt(model, adapter, config)
            return
        is_first_of_its_type = kind.peft_type != model.peft_type and kind.peft_type not in self._others
        if not is_first_of_its_type:
            with self.alone(model, kind):
                model.add_adapter(adapter, config, low_cpu_mem_usage=is_meta(model.backbone))
            return
        self._others[kind.peft_type] = self._new_tuner(model, kind, adapter, config)

    def _new_tuner(self, model: Any, kind: AdapterKind, adapter: str, config: PeftConfig) -> Any:
        backbone, configs = model.backbone, model.peft_config
        with _layers_alone(backbone, kind):
            backbone.__dict__.pop("peft_config", None)  # else PEFT warns of a second tuner, which is what this is
            try:
                tuner: Any = PEFT_TYPE_TO_TUNER_MAPPING[kind.peft_type]
                made = tuner(backbone, {adapter: config}, adapter, low_cpu_mem_usage=is_meta(backbone))
                # `PeftModel` does this for the first tuner: adapters in fp32 on a backbone in half precision.
                made._cast_adapter_dtype(adapter_name=adapter, autocast_adapter_dtype=True)
            finally:
                backbone.peft_config = configs
        # One dictionary for all tuners: PEFT looks adapters up by their ids, which no two types share.
        configs[adapter] = config
        made.peft_config = configs
        return made

    @contextmanager
    def alone(self, model: Any, kind: AdapterKind) -> Iterator[None]:
        """Let a model be, for the time of the block, what PEFT made of it for the adapters of one kind.

        Args:
            model: the `MultiTaskPeftModel` whose tuners these are.
            kind: the kind whose adapters are shown.
        """
        if isinstance(kind, PromptKind):
            with _layers_alone(model.backbone, kind), as_prompts(model, kind):
                yield
            return
        # With one type PEFT's own view is the model as it is, and nothing has to be taken apart.
        if not self.is_mixed:
            yield
            return
        before = model.base_model, model.peft_type
        with _layers_alone(model.backbone, kind):
            model.base_model, model.peft_type = self._others.get(kind.peft_type, model.base_model), kind.peft_type
            try:
                yield
            finally:
                model.base_model, model.peft_type = before

    def delete(self, model: Any, kind: AdapterKind, adapter: str, others: Sequence[str]) -> None:
        """Take an adapter out of a model.

        Args:
            model: the `MultiTaskPeftModel` whose tuners these are.
            kind: the kind that the adapter is of.
            adapter: internal id of the adapter's task.
            others: those of all other tasks.
        """
        if isinstance(kind, PromptKind):
            if adapter in model.active_adapters and others:
                model.select_adapter(others[0])
            remove_prompt(model, adapter)
            return
        with self.alone(model, kind):
            # PEFT warns, and chooses by itself, where the active adapter is deleted.
            if adapter in model.active_adapters and others:
                model.base_model.set_adapter(others[0])
            model.delete_adapter(adapter)

    def leave_alone(self, model: Any, kind: AdapterKind) -> Any:
        """Take the layers of all other kinds out of a model for good, and return PEFT's tuner of this one.

        Args:
            model: the `MultiTaskPeftModel` whose tuners these are.
            kind: the kind whose adapters stay.
        """
        if self.is_mixed:
            for name, layers in _stacks(model.backbone).items():
                _show(model.backbone, name, layers, kind)
        return self._others.get(kind.peft_type, model.base_model)


@contextmanager
def _layers_alone(backbone: nn.Module, kind: AdapterKind) -> Iterator[None]:
    stacks = _stacks(backbone)
    for name, layers in stacks.items():
        _show(backbone, name, layers, kind)
    try:
        yield
    finally:
        for name, layers in stacks.items():
            # What stands there now, as PEFT may have put a layer in or taken one out meanwhile.
            now = backbone.get_submodule(name)
            others = [layer for layer in layers if kind_of_layer(layer) is not kind]
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


def _show(backbone: nn.Module, name: str, layers: list[Any], kind: AdapterKind) -> None:
    """Let a module be the layer of one kind around its frozen layer, or the frozen layer where there is none."""
    shown = frozen = layers[-1].base_layer
    for layer in layers:
        if kind_of_layer(layer) is kind:
            layer.base_layer, shown = frozen, layer
    _put(backbone, name, shown)


def _stack(backbone: nn.Module, name: str, layers: list[Any]) -> None:
    """Put layers around their frozen one, in an order that does not depend on which came first."""
    inner = next((layer.base_layer for layer in layers if not isinstance(layer.base_layer, BaseTunerLayer)), None)
    if inner is None:
        return
    rank = list(KINDS.values())
    for layer in sorted(layers, key=lambda layer: rank.index(kind_of_layer(layer))):  # type: ignore[arg-type]
        layer.base_layer, inner = inner, layer
    _put(backbone, name, inner)


def _put(backbone: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(backbone.get_submodule(parent), child, module)
