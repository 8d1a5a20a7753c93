"""Checks of a `PeftConfig` before anything is injected: its type, its fields, its targets on the backbone."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from peft import PeftConfig, PeftType
from torch import nn

from peft_mux.errors import Fault, closest
from peft_mux.modeling.adapters.catalogue.registry import entry_of
from peft_mux.modeling.adapters.kind import KINDS, AdapterKind, find_kind, kind_of
from peft_mux.modeling.adapters.patterns import pattern_faults
from peft_mux.modeling.backbone.modules import adaptable_modules


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
    faults = pattern_faults(config, [name for name, _ in backbone.named_modules()], where)
    if faults:
        return faults
    own_faults = getattr(kind, "backbone_faults", None)
    faults = own_faults(config, backbone, where) if own_faults is not None else []
    if faults:
        return faults
    modules = getattr(kind, "adaptable", adaptable_modules)(backbone)
    leaves = sorted({name.rsplit(".", 1)[-1] for name in modules})
    targets = config.target_modules
    known = f'modules of {type(backbone).__name__}: {", ".join(leaves)}; or "all-linear"'
    if targets is None:
        return _default_target_faults(kind, backbone, where, known)
    if isinstance(targets, str):
        # PEFT, too, looks past upper and lower case here.
        if targets.lower() == "all-linear":
            return kind.width_faults(config, modules, where)
        return _pattern_faults(targets, modules, where, known)
    matched: dict[str, nn.Module] = {}
    for target in sorted(targets):
        hits = {name: module for name, module in modules.items() if name == target or name.endswith(f".{target}")}
        matched.update(hits)
        if not hits:
            faults.append(Fault(f"{where}.target_modules", repr(target), known, closest(target, leaves)))
    if not targets:
        faults.append(Fault(f"{where}.target_modules", "nothing", known))
    return faults + kind.width_faults(config, matched, where)


def _default_target_faults(kind: AdapterKind, backbone: nn.Module, where: str, known: str) -> list[Fault]:
    model_type = getattr(getattr(backbone, "config", None), "model_type", None)
    if model_type in kind.default_targets:
        return []
    return [Fault(f"{where}.target_modules", "None", known, f'PEFT has no default for model type "{model_type}".')]


def _pattern_faults(pattern: str, modules: Iterable[str], where: str, known: str) -> list[Fault]:
    if any(re.fullmatch(pattern, name) for name in modules):
        return []
    return [Fault(f"{where}.target_modules", repr(pattern), known, "A string is a regular expression over full names.")]
