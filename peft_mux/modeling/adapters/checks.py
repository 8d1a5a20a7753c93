r"""Regular expressions of a `PeftConfig`: they are the owner's, and PEFT matches them against every module's name.

One that backtracks, such as `(a|a)*b` or `.*.*.*.*.*.*x`, would keep the process busy for hours: Python can interrupt
no match, from no thread. A refusal by form alone would be both too strict (`(\w+\.)*q_proj` is harmless on most names)
and too lax (nothing is nested in the second example), and engines with a time limit differ from the `re` that PEFT
calls. So a pattern that its form does not show to be fast is tried out first: in a child process, with `re`, on the
very names that PEFT will match, for `TIME_LIMIT_S`.
"""

# MERGED: Checks of a `PeftConfig` before anything is injected: its type, its fields, its targets on the backbone.

from __future__ import annotations

import copy
import importlib
import json
import math
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from peft import PeftConfig, PeftType
from peft.tuners.tuners_utils import check_target_module_exists
from torch import nn

from peft_mux.errors import ConfigError, Fault, closest, shown
from peft_mux.modeling.adapters.catalogue import entry_of
from peft_mux.modeling.adapters.kind import KINDS, AdapterKind, find_kind, kind_of
from peft_mux.modeling.adapters.own import bias_faults, own_copy_faults
from peft_mux.modeling.adapters.prompts.kinds import PromptKind
from peft_mux.modeling.backbone.modules import is_router

TIME_LIMIT_S = 5.0
"""For all names of a model. A pattern of use takes milliseconds, so the rest is for a machine that is busy."""

_TRIAL = """
import json, re, sys
method, pattern, names = json.load(sys.stdin)
for name in names:
    getattr(re, method)(pattern, name)
"""
_LENGTH_OF_NAME, _MOST_WAYS = 100, 100_000
"""Characters of a module's name, about; and ways of matching it that take no more than a millisecond."""

_COMPILE_ERRORS = (re.error, RecursionError, OverflowError)


def pattern_faults(config: Any, names: Sequence[str], where: str) -> list[Fault]:
    """Return a fault for each regular expression that is none, or does not come to an end in time.

    Args:
        config: a `PeftConfig` of one task, whose fields have the right types.
        names: names of all modules of the backbone.
        where: prefix of the fields, such as `tasks.sql.peft_config`.
    """
    faults = []
    for field, given, method, pattern in _patterns(config):
        reason = _reason_against(method, pattern, tuple(names))
        if reason:
            faults.append(
                Fault(f"{where}.{field}", f"{given!r:.80}", "a regular expression over names of modules", reason)
            )
    return faults


def _patterns(config: Any) -> Iterator[tuple[str, str, str, str]]:
    """Yield the field and its pattern, then the function of `re` and the pattern with which PEFT matches it."""
    for field in ("target_modules", "exclude_modules"):
        value = getattr(config, field, None)
        if isinstance(value, str) and value.lower() != "all-linear":
            yield field, value, "fullmatch", value
    layers = getattr(config, "layers_pattern", None) or ()
    for value in [layers] if isinstance(layers, str) else layers:
        yield "layers_pattern", value, "match", rf"(?:^|.*?\.){value}\.(?P<idx>\d+)\."
    for field in ("rank_pattern", "alpha_pattern", "lambda_pattern", "n_frequency_pattern", "block_size_pattern"):
        for value in getattr(config, field, None) or ():
            yield f"{field}[{value!r:.60}]", value, "match", rf"(.*\.)?({value})$"


@lru_cache(maxsize=256)
def _reason_against(method: str, pattern: str, names: tuple[str, ...]) -> str:
    # Kept, as tasks of a run often share a pattern, and a trial of a bad one takes its time.
    try:
        re.compile(pattern)
    except _COMPILE_ERRORS as error:
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
    """Return whether the form of a regular expression shows that matching a name takes no more than milliseconds.

    Args:
        pattern: a regular expression that can be compiled.
    """
    # What `re` makes of a pattern is told by its own parser alone, which has another name before Python 3.11.
    parser: Any = getattr(re, "_parser", None) or importlib.import_module("sre_parse")
    return _most_ways(parser.parse(pattern)) <= _MOST_WAYS


def _most_ways(parsed: Iterable[Any]) -> float:
    """Return a bound on the number of ways in which a parsed pattern can be tried on one name."""
    ways = 1.0
    for operation, argument in parsed:
        name = str(operation)
        if name.endswith("_REPEAT"):
            least, most, body = argument
            ways *= _ways_of_repetition(int(least), int(most), _most_ways(body))
        elif name == "BRANCH":
            ways *= sum(_most_ways(alternative) for alternative in argument[1])
        elif name in ("SUBPATTERN", "ASSERT", "ASSERT_NOT"):
            ways *= _most_ways(argument[-1])
        elif name == "ATOMIC_GROUP":
            ways *= _most_ways(argument)
        elif name.startswith("GROUPREF"):
            return math.inf
    return ways


def _ways_of_repetition(least: int, most: int, of_body: float) -> float:
    if most <= 1:
        return 1 + of_body
    # Within a repetition choices multiply at every turn.
    return math.inf if of_body > 1 else min(most - least + 1, _LENGTH_OF_NAME)


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
