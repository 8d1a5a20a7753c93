r"""Checks of a `PeftConfig` before anything is injected: its type, its fields, and its targets on the backbone.

Regular expressions are the user's, and PEFT matches them against every module's name. One that backtracks, such as
`(a|a)*b` or `.*.*.*.*.*.*x`, would keep the process busy for hours: Python can interrupt no match, from no thread. A
refusal by form alone would be too strict (`(\w+\.)*q_proj` is harmless on most names) and too lax, and engines with a
time limit differ from the `re` that PEFT calls. So a pattern that does not look simple is tried out first: in a child
process, with `re`, on the very names that PEFT will match, for `TIME_LIMIT_S`.
"""

from __future__ import annotations

import copy
import json
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from peft import PeftConfig, PeftType
from peft.tuners.tuners_utils import check_target_module_exists
from torch import nn

from peft_mux.errors import ConfigError, Fault, closest, shown
from peft_mux.modeling.adapters.kind import KINDS, entry_of, find_kind, kind_of
from peft_mux.modeling.adapters.own import bias_faults, own_copy_faults
from peft_mux.modeling.backbone.modules import is_router

TIME_LIMIT_S = 5.0
"""For all names of a model. A pattern that people write takes milliseconds, so the rest is for a busy machine."""

_TRIAL = """
import json, re, sys
method, pattern, names = json.load(sys.stdin)
for name in names:
    getattr(re, method)(pattern, name)
"""


_MOST_WAYS = 100_000
"""As many ways to match a name take a millisecond."""


def peft_config_faults(config: PeftConfig, where: str) -> list[Fault]:
    """Return what is wrong with an adapter configuration, whatever the backbone.

    Args:
        config: the adapter configuration of one task.
        where: prefix of the fields, such as `tasks.sql`.
    """
    where = f"{where}.peft_config"
    if not isinstance(config, PeftConfig):
        return [Fault(where, type(config).__name__, "a peft.PeftConfig such as LoraConfig(r=8)")]
    kind = find_kind(config)
    if kind is not None:
        return kind.faults(config, where)
    got, fix = getattr(config.peft_type, "value", config.peft_type), ""
    if isinstance(config.peft_type, PeftType) and (entry := entry_of(config.peft_type)).refusal:
        fix = f"{entry.refusal[:1].upper()}{entry.refusal[1:]}. Nearest: {', '.join(entry.nearest)}."
    supported = ", ".join(peft_type.value for peft_type in KINDS)
    return [Fault(where, f"{type(config).__name__} ({got})", f"one of the PEFT types {supported}", fix)]


def target_faults(config: Any, backbone: nn.Module, where: str) -> list[Fault]:
    """Return what is wrong with the target modules, given the backbone (PEFT-injected or not).

    Args:
        config: the adapter configuration of one task; its fields have passed `peft_config_faults`.
        backbone: the transformers model that is to be adapted.
        where: prefix of the fields, such as `tasks.sql`.
    """
    where, kind = f"{where}.peft_config", kind_of(config)
    if not kind.has_targets:
        return kind.backbone_faults(config, backbone, where)
    faults = pattern_faults(config, [name for name, _ in backbone.named_modules()], where)
    if faults:
        return faults
    completed = copy.deepcopy(config)
    try:
        kind.complete(completed, backbone)
    except ConfigError as error:
        return [replace(fault, where=f"{where}.{fault.where}") for fault in error.faults]
    except ValueError as error:  # of PEFT, which renames targets for some backbones
        targets = "one whose targets PEFT finds on this backbone"
        return [Fault(where, type(config).__name__, targets, f"PEFT: {error}")]
    faults = kind.backbone_faults(completed, backbone, where) or _module_faults(completed, backbone, where)
    return faults or own_copy_faults(config, backbone, where) + bias_faults(config, backbone, where)


def _module_faults(config: Any, backbone: Any, where: str) -> list[Fault]:
    """Return what is wrong with the modules that a completed configuration names."""
    kind = kind_of(config)
    modules, targets = kind.adaptable(backbone), config.target_modules
    # PEFT's layer of a matrix fails on the router of a mixture.
    for name, module in modules.items() if targets is not None else ():
        if not is_router(module):
            continue
        asked = copy.copy(config)
        if isinstance(targets, str) and targets.lower() == "all-linear":
            asked.target_modules = [name]
        if check_target_module_exists(asked, name):
            leaf = name.rsplit(".", 1)[-1]
            others = sorted({other.rsplit(".", 1)[-1] for other, item in modules.items() if not is_router(item)})
            allowed = f'of {", ".join(others)}, or "all-linear" with exclude_modules=["{leaf}"]'
            reason = (
                f"{name} ({type(module).__name__}) returns several tensors, on which PEFT's layer of a matrix fails."
            )
            return [Fault(f"{where}.target_modules", shown(targets), allowed, reason)]
    leaves = sorted({name.rsplit(".", 1)[-1] for name in modules})
    field, bare = f"{where}.target_modules", getattr(config, "target_parameters", None)
    known = f'"all-linear" or modules of {type(backbone).__name__} ({", ".join(leaves)})'
    if targets is None and not bare:
        model_type: Any = getattr(getattr(backbone, "config", None), "model_type", None)
        if model_type in kind.default_targets:
            asked = copy.copy(config)
            asked.target_modules = kind.default_targets[model_type]
            named = {name: module for name, module in modules.items() if check_target_module_exists(asked, name)}
            return kind.width_faults(config, named, where)
        return [Fault(field, "None", known, f'PEFT has no default for model type "{model_type}".')]
    if isinstance(targets, str):
        # PEFT, too, ignores upper and lower case here.
        if targets.lower() == "all-linear":
            return kind.width_faults(config, modules, where)
        named = {name: module for name, module in modules.items() if re.fullmatch(targets, name)}
        if named:
            return kind.width_faults(config, named, where)
        return [Fault(field, repr(targets), known, "A string is a regular expression over full names.")]
    matched: dict[str, nn.Module] = {}
    faults = [] if targets or bare else [Fault(field, "nothing", known)]
    for target in sorted(targets or ()):
        hits = {name: module for name, module in modules.items() if name == target or name.endswith(f".{target}")}
        matched.update(hits)
        if not hits:
            faults.append(Fault(field, repr(target), known, closest(target, leaves)))
    return faults + kind.width_faults(config, matched, where)


# ----------------------------------------------------------- regular expressions


def pattern_faults(config: Any, names: Sequence[str], where: str) -> list[Fault]:
    """Return a fault for each regular expression that cannot be compiled, or does not come to an end in time.

    Args:
        config: a `PeftConfig` of one task, whose fields have the right types.
        names: names of all modules of the backbone.
        where: prefix of the fields, such as `tasks.sql.peft_config`.
    """
    # Of each field: the function of `re` and the pattern with which PEFT matches its value.
    patterns = []
    for field in ("target_modules", "exclude_modules"):
        value = getattr(config, field, None)
        if isinstance(value, str) and value.lower() != "all-linear":
            patterns.append((field, value, "fullmatch", value))
    layers = getattr(config, "layers_pattern", None) or ()
    for value in [layers] if isinstance(layers, str) else layers:
        patterns.append(("layers_pattern", value, "match", rf"(?:^|.*?\.){value}\.(?P<idx>\d+)\."))
    for field in ("rank_pattern", "alpha_pattern", "lambda_pattern", "n_frequency_pattern", "block_size_pattern"):
        for value in getattr(config, field, None) or ():
            patterns.append((f"{field}[{value!r:.60}]", value, "match", rf"(.*\.)?({value})$"))
    allowed = "a regular expression over names of modules"
    return [
        Fault(f"{where}.{field}", f"{value!r:.80}", allowed, reason)
        for field, value, method, pattern in patterns
        if (reason := _reason_against(method, pattern, tuple(names)))
    ]


@lru_cache(maxsize=256)
def _reason_against(method: str, pattern: str, names: tuple[str, ...]) -> str:
    # Kept, because tasks of a run often share a pattern, and a trial of a bad one takes its time.
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        return f"It is not a regular expression: {error}."
    if is_fast(pattern):
        return ""
    try:
        subprocess.run(
            # Isolated and without site packages: nothing of the user's is imported, and it starts in 20 ms.
            [sys.executable, "-I", "-S", "-c", _TRIAL],
            input=json.dumps([method, pattern, names]),
            text=True,
            capture_output=True,
            timeout=TIME_LIMIT_S,
            check=True,
        )
    except subprocess.TimeoutExpired:
        return (
            f"It backtracks: matching takes more than {TIME_LIMIT_S:g} s. Leave out repetitions within repetitions, "
            "and those that may match the same text."
        )
    except (OSError, subprocess.CalledProcessError) as error:
        return f"It may backtrack, and could not be tried out in a process of its own: {error}. List the names."
    return ""


def is_fast(pattern: str) -> bool:
    """Return whether matching a name takes milliseconds, by the form of a regular expression.

    It must repeat no group and refer to none. Then the number of ways to match a name is at most the product of those
    of its parts; names have some 100 characters.
    """
    # Repeated groups, references, and extensions such as comments and verbose mode, which could hide a repetition.
    if re.search(r"\)[*+{]|\\\d|\(\?(?!:|P<|i\)|=|!)", pattern):
        return False
    num_short = len(re.findall(r"\{\d?,?\d\}", pattern))
    num_long = len(re.findall(r"[*+{]", pattern)) - num_short
    return 100**num_long * 10**num_short * 2 ** (pattern.count("?") + pattern.count("|")) <= _MOST_WAYS
