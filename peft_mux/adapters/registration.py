"""Base classes of the PEFT methods that peft_mux adds: configuration, tuner and kind; and their registration in PEFT.

`PeftType` lists PEFT's own types only, so `own_peft_type` adds a member to it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, cast

from peft import PeftConfig
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from peft.tuners.tuners_utils import BaseTuner
from peft.utils import register_peft_method
from peft.utils.peft_types import PeftType
from torch import nn
from transformers.pytorch_utils import Conv1D

from peft_mux.errors import ConfigError, Fault, raise_faults, shown
from peft_mux.modeling.adapters.checks import value_faults
from peft_mux.modeling.adapters.kind import AdapterKind


@dataclass
class OwnMethodConfig(PeftConfig):
    """The fields that choose target modules, as in PEFT's own configurations; the configurations document them."""

    own_type: ClassVar[PeftType]
    target_modules: list[str] | set[str] | str | None = None
    exclude_modules: list[str] | set[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    layers_pattern: list[str] | str | None = None
    modules_to_save: list[str] | None = field(default=None)

    def __post_init__(self) -> None:
        """Name the type, and check the fields."""
        super().__post_init__()
        self.peft_type = self.own_type
        if isinstance(self.target_modules, list):
            self.target_modules = set(self.target_modules)
        if isinstance(self.exclude_modules, list):
            self.exclude_modules = set(self.exclude_modules)
        name = type(self).__name__
        faults = self.faults(name)
        raise_faults(faults + value_faults(self, name, faults))

    def faults(self, where: str) -> list[Fault]:
        """Return what is wrong with the values of the fields, beyond their types; `where` is their prefix."""
        if not isinstance(self.target_modules, str):
            return []
        choosing = {name: getattr(self, name) for name in ("layers_to_transform", "layers_pattern")}
        allowed = "None where target_modules is a string"
        return [Fault(f"{where}.{name}", shown(got), allowed) for name, got in choosing.items() if got is not None]


class OwnMethodModel(BaseTuner):
    """A tuner that wraps linear layers in layers of `tuner_layer_cls`."""

    def _create_and_replace(
        self,
        peft_config: Any,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        parameter_name: str | None = None,
    ) -> None:
        if isinstance(target, self.tuner_layer_cls):
            cast(Any, target).update_layer(adapter_name, peft_config, current_key)
            return
        if isinstance(target, nn.Linear):
            shape = target.out_features, target.in_features
        elif isinstance(target, Conv1D):
            shape = target.nf, target.nx
        else:
            raise ConfigError(
                f"{type(peft_config).__name__}.target_modules must be linear layers, got {current_key} "
                f"({type(target).__name__})."
            )
        layer = cast(Any, self.tuner_layer_cls)(target, adapter_name, peft_config, shape, current_key)
        if adapter_name not in self.active_adapters:
            # A further adapter next to the active one, which alone is trained.
            layer.requires_grad_(False)
        self._replace_module(parent, target_name, layer, target)


class OwnMethodKind(AdapterKind):
    """A method of our own, whose layers draw their dropout themselves and hold the adapters of all tasks."""

    draws_dropout = True
    lies_apart = False

    def setting_faults(self, config: Any, where: str) -> list[Fault]:
        """Return what is wrong with the values of the fields, as when the configuration was made."""
        return config.faults(where)


_MARK = "is_of_peft_mux"


def own_peft_type(name: str) -> PeftType:
    """Return a member of `PeftType` for a method of our own, created if there is none.

    A later PEFT may bring a type of this name. Then that name is PEFT's, and ours is called `MUX_<name>`.

    Args:
        name: in upper case, as PEFT writes types into `adapter_config.json`.
    """
    taken = PeftType.__members__.get(name)
    if taken is not None:
        return taken if getattr(taken, _MARK, False) else own_peft_type(f"MUX_{name}")
    # Add a member to the enumeration, as its own class would have created it.
    member = str.__new__(PeftType, name)
    member._name_, member._value_ = name, name
    member.__objclass__ = PeftType  # type: ignore[attr-defined]
    member._sort_order_ = len(PeftType.__members__)  # type: ignore[attr-defined]
    setattr(member, _MARK, True)
    # Attribute first: once the name is in the map, the enumeration refuses to set it.
    type.__setattr__(PeftType, name, member)
    enumeration = cast(Any, PeftType)
    enumeration._member_names_.append(name)
    enumeration._member_map_[name] = member
    enumeration._value2member_map_[name] = member
    return member


def register_method(peft_type: PeftType, config: type, model: Any) -> None:
    """Register a method with PEFT, once: a type of `own_peft_type`, its configuration and its tuner."""
    if peft_type not in PEFT_TYPE_TO_CONFIG_MAPPING:
        register_peft_method(name=peft_type.value.lower(), config_cls=config, model_cls=model, prefix=model.prefix)
