"""Checks of a `PeftConfig` before anything is injected: its type, its fields, its targets on the backbone."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from peft import PeftConfig, PeftType
from peft.tuners.tuners_utils import check_target_module_exists
from torch import nn

from peft_mux.errors import ConfigError, Fault, closest, shown
from peft_mux.modeling.adapters.catalogue.registry import entry_of
from peft_mux.modeling.adapters.kind import KINDS, AdapterKind, find_kind, kind_of
from peft_mux.modeling.adapters.own.biases import bias_faults
from peft_mux.modeling.adapters.own.checks import own_copy_faults
from peft_mux.modeling.adapters.patterns import pattern_faults
from peft_mux.modeling.adapters.prompts.kind import PromptKind
from peft_mux.modeling.backbone.modules import is_router


def peft_config_faults(config: PeftConfig, where: str) -> list[Fault]:
    """Return what is wrong with an adapter configuration, whatever the backbone.

    Args:
        config: the adapter configuration of one task.
        where: prefix of the fields, such as `tasks.sql`.
    """
    if not isinstance(config, PeftConfig):
        return [Fault(f"{where}.peft_config", type(config).__name__, "a peft.PeftConfig such as LoraConfig(r=8)")]
    kind = find_kind(config)
    if kind is None:
        return [_type_fault(config, f"{where}.peft_config")]
    return kind.faults(config, f"{where}.peft_config")


def _type_fault(config: PeftConfig, where: str) -> Fault:
    supported = ", ".join(peft_type.value for peft_type in KINDS)
    got = getattr(config.peft_type, "value", config.peft_type)
    fix = ""
    if isinstance(config.peft_type, PeftType):
        entry = entry_of(config.peft_type)
        fix = f"{entry.refusal[:1].upper()}{entry.refusal[1:]}. Nearest: {', '.join(entry.nearest)}."
    return Fault(where, f"{type(config).__name__} ({got})", f"PEFT types {supported}", fix if fix[:1] != "." else "")


def target_faults(config: Any, backbone: nn.Module, where: str) -> list[Fault]:
    """Return what is wrong with the target modules, given the backbone (PEFT-injected or not).

    Args:
        config: the adapter configuration of one task; its fields have passed `peft_config_faults`.
        backbone: the transformers model that is to be adapted.
        where: prefix of the fields, such as `tasks.sql`.
    """
    where, kind = f"{where}.peft_config", kind_of(config)
    if isinstance(kind, PromptKind):
        return kind.backbone_faults(config, backbone, where)
    faults = _target_faults(config, backbone, where)
    return faults or own_copy_faults(config, backbone, where) + bias_faults(config, backbone, where)


def _target_faults(config: Any, backbone: nn.Module, where: str) -> list[Fault]:
    kind = kind_of(config)
    faults = pattern_faults(config, [name for name, _ in backbone.named_modules()], where)
    if faults:
        return faults
    config, faults = _completed(config, backbone, where)
    if faults:
        return faults
    modules = kind.adaptable(backbone)
    faults = kind.backbone_faults(config, backbone, where) or _router_faults(config, modules, where)
    if faults:
        return faults
    leaves = sorted({name.rsplit(".", 1)[-1] for name in modules})
    targets = config.target_modules
    known = f'modules of {type(backbone).__name__}: {", ".join(leaves)}; or "all-linear"'
    if targets is None and not getattr(config, "target_parameters", None):
        return _default_target_faults(kind, backbone, where, known)
    if isinstance(targets, str):
        # PEFT, too, looks past upper and lower case here.
        if targets.lower() == "all-linear":
            return kind.width_faults(config, modules, where)
        named = {name: module for name, module in modules.items() if re.fullmatch(targets, name)}
        return kind.width_faults(config, named, where) if named else _pattern_faults(targets, where, known)
    matched: dict[str, nn.Module] = {}
    for target in sorted(targets or ()):
        hits = {name: module for name, module in modules.items() if name == target or name.endswith(f".{target}")}
        matched.update(hits)
        if not hits:
            faults.append(Fault(f"{where}.target_modules", repr(target), known, closest(target, leaves)))
    if not targets and not getattr(config, "target_parameters", None):
        faults.append(Fault(f"{where}.target_modules", "nothing", known))
    return faults + kind.width_faults(config, matched, where)


def _completed(config: Any, backbone: Any, where: str) -> tuple[Any, list[Fault]]:
    """Return a copy of a configuration as it will be injected, and why it cannot be."""
    own = copy.deepcopy(config)
    try:
        kind_of(own).complete(own, backbone)
    except ConfigError as error:
        return own, [replace(fault, where=f"{where}.{fault.where}") for fault in error.faults]
    except ValueError as error:  # of PEFT, which renames targets for some backbones
        return own, [Fault(where, str(error), "targets that PEFT finds on this backbone")]
    return own, []


def _router_faults(config: Any, modules: Mapping[str, nn.Module], where: str) -> list[Fault]:
    """Return a fault where the router of a mixture is adapted as if it were a linear layer: PEFT's fails on it."""
    targets = config.target_modules
    is_all = isinstance(targets, str) and targets.lower() == "all-linear"
    for name, module in modules.items():
        if not is_router(module):
            continue
        asked = copy.copy(config)
        if is_all:
            asked.target_modules = [name]
        if targets is not None and check_target_module_exists(asked, name):
            leaf = name.rsplit(".", 1)[-1]
            others = sorted({other.rsplit(".", 1)[-1] for other, item in modules.items() if not is_router(item)})
            allowed = f'{", ".join(others)}; or "all-linear" with exclude_modules=["{leaf}"]'
            reason = (
                f"{name} ({type(module).__name__}) returns several tensors, on which PEFT's layer of a matrix fails."
            )
            return [Fault(f"{where}.target_modules", shown(targets), allowed, reason)]
    return []


def _default_target_faults(kind: AdapterKind, backbone: nn.Module, where: str, known: str) -> list[Fault]:
    model_type = getattr(getattr(backbone, "config", None), "model_type", None)
    if model_type in kind.default_targets:
        return []
    return [Fault(f"{where}.target_modules", "None", known, f'PEFT has no default for model type "{model_type}".')]


def _pattern_faults(pattern: str, where: str, known: str) -> list[Fault]:
    return [Fault(f"{where}.target_modules", repr(pattern), known, "A string is a regular expression over full names.")]
