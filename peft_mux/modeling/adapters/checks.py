r"""The checks of a `PeftConfig` before anything is injected, in this order; every fault of every task is reported.

1. Its type is one that an `AdapterKind` trains.
2. Its fields by themselves: none is set that has no meaning here (`TypeEntry`), its kind accepts them
   (`AdapterKind.setting_faults`), and their values are of the types that PEFT declares, as PEFT checks few of them and
   would fail deep inside.
3. Its fields on the backbone: regular expressions, targets (`adaptable`, `backbone_faults` and `width_faults` of its
   kind), the parts of the backbone of which it trains copies, and the output head.
4. Next to other tasks: none wants a module in another way than this one does.

Regular expressions are the user's, and PEFT matches them against every module's name. One that backtracks, such as
`(a|a)*b` or `.*.*.*.*.*.*x`, would keep the process busy for hours: Python can interrupt no match, from no thread. A
refusal by form alone would be too strict (`(\w+\.)*q_proj` is harmless on most names) and too lax, and engines with a
time limit differ from the `re` that PEFT calls. So a pattern that does not look simple is tried out first: in a child
process, with `re`, on the very names that PEFT will match, for `TIME_LIMIT_S`.
"""

from __future__ import annotations

import copy
import functools
import json
import re
import subprocess
import sys
import typing
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, asdict, fields, is_dataclass, replace
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union

from peft import PeftConfig, PeftType
from peft.tuners.tuners_utils import BaseTunerLayer, check_target_module_exists
from peft.utils import AuxiliaryTrainingWrapper
from torch import nn
from transformers.pytorch_utils import Conv1D

from peft_mux.errors import Fault, closest, is_integer, is_real, is_text, raise_faults, shown
from peft_mux.modeling.adapters.kind import KINDS, AdapterKind, entry_of, find_kind
from peft_mux.modeling.adapters.trained_parts import wanted_biases
from peft_mux.modeling.backbone.modules import (
    CLASSIFICATION,
    SUPPORTED_TASK_TYPES,
    classifier_class,
    head_kind_for,
    head_kind_of,
    is_inside_wrapper,
    is_router,
    module_names,
)
from peft_mux.storage import check_task_names, name_fault


def check_configs(
    peft_configs: Mapping[str, PeftConfig], backbone: Any, held: Mapping[str, PeftConfig] | None = None
) -> None:
    """Check the adapters of new tasks: names, fields, and targets against the backbone.

    Args:
        peft_configs: the `PeftConfig` of each new task, by the task's name.
        backbone: the transformers model that they adapt.
        held: configurations of the tasks that are there already, by name; none by default.

    Raises:
        ConfigError: naming every fault of every task.
    """
    faults: list[Fault] = []
    sound: list[Any] = []  # what has fitted the backbone is not checked again, as that goes through all modules
    for name, config in peft_configs.items():
        fault = name_fault(name, f"tasks.{name}.name")
        faults += [fault] if fault else []
        wrong = config_faults(config, f"tasks.{name}")
        if not wrong and (values := (type(config), vars(config))) not in sound:
            wrong = config_faults(config, f"tasks.{name}", backbone)
            sound += [] if wrong else [values]
        faults += wrong
    held = held or {}
    raise_faults(faults or claim_faults(peft_configs, held, backbone))
    check_task_names(peft_configs, tuple(held))


def config_faults(config: Any, where: str, backbone: Any = None) -> list[Fault]:
    """Return what is wrong with an adapter configuration, whatever it holds.

    Args:
        config: the adapter configuration of one task.
        where: prefix of the fields, such as `tasks.sql`.
        backbone: the transformers model that is to be adapted (PEFT-injected or not), with which sound fields are
            compared; by default, fields are checked by themselves.
    """
    where = f"{where}.peft_config"
    if not isinstance(config, PeftConfig):
        return [Fault(where, type(config).__name__, "a peft.PeftConfig such as LoraConfig(r=8)")]
    kind = find_kind(config)
    if kind is None:
        got, fix = getattr(config.peft_type, "value", config.peft_type), ""
        if isinstance(config.peft_type, PeftType) and (entry := entry_of(config.peft_type)).refusal:
            fix = f"{entry.refusal[:1].upper()}{entry.refusal[1:]}. Nearest: {', '.join(entry.nearest)}."
        supported = ", ".join(peft_type.value for peft_type in KINDS)
        return [Fault(where, f"{type(config).__name__} ({got})", f"one of the PEFT types {supported}", fix)]
    faults = _field_faults(kind, config, where)
    if faults or backbone is None:
        return faults
    faults = _target_faults(kind, config, backbone, where)
    head, wanted = head_kind_of(backbone), head_kind_for(config.task_type)
    may_classify = kind.has_targets and classifier_class(backbone) is not None
    if head != wanted and not (wanted == CLASSIFICATION and may_classify):
        got = str(getattr(config.task_type, "value", config.task_type))
        allowed = " or ".join(str(task_type) for task_type in head.task_types)
        allowed = f"{allowed}, because the backbone is a {type(backbone).__name__}"
        faults.append(Fault(f"{where}.task_type", got, allowed, wanted.advice))
    return faults


# ----------------------------------------------------------------------- fields

BOOKKEEPING_FIELDS = frozenset(
    "task_type peft_type auto_mapping peft_version base_model_name_or_path revision inference_mode megatron_core "
    "qalora_group_size".split()
)
"""Fields that training never reads."""


def _field_faults(kind: AdapterKind, config: Any, where: str) -> list[Fault]:
    """Return what is wrong with the fields of a configuration, whatever the backbone."""
    faults = _setting_faults(kind, config, where) + kind.setting_faults(config, where)
    faults += value_faults(config, where, faults)
    got = config.task_type
    if got is not None and not (isinstance(got, str) and got in SUPPORTED_TASK_TYPES):
        names = ", ".join(sorted(name for name in SUPPORTED_TASK_TYPES if name is not None))
        faults.append(Fault(f"{where}.task_type", str(got), f"one of {names} or None"))
    elif kind.has_targets and head_kind_for(got).trained_modules and not hasattr(type(config), "modules_to_save"):
        fix = "Its configuration has no modules_to_save, so the head would not be saved."
        faults.append(Fault(f"{where}.task_type", str(got), "CAUSAL_LM or None", fix))
    if not faults:
        # PEFT checks a configuration only when it is made, and this one may have been changed since.
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                replace(config)
        except (TypeError, ValueError, LookupError, ImportError) as error:
            allowed = "a configuration that PEFT accepts"
            faults.append(Fault(where, type(config).__name__, allowed, f"PEFT: {error}"))
    return faults


def _setting_faults(kind: AdapterKind, config: Any, where: str) -> list[Fault]:
    """Return a fault for every field that is not at its default and has no meaning here."""
    entry, faults = kind.entry, []
    reasons = {
        "bias": "it trains the backbone's own biases, which all tasks share",
        "modules_to_save": "it trains a copy of a backbone module",
        **entry.reasons,
    }
    for field in fields(config):
        is_supported = field.name not in reasons if entry.supported is None else field.name in entry.supported
        if is_supported or field.name in BOOKKEEPING_FIELDS:
            continue
        default, value = _default_of(field), getattr(config, field.name)
        try:
            is_default = bool(value == default)
        except Exception:  # comparing an array, or an object of the user's, can raise anything
            is_default = False
        else:
            # Empty in a field that is empty by default. PEFT reads `trainable_token_indices` whenever it is not None.
            is_empty = value is None or (isinstance(value, (list, tuple, set, dict)) and not value)
            may_be_empty = not default and not isinstance(default, bool) and field.name != "trainable_token_indices"
            is_default |= is_empty and may_be_empty
        if is_default:
            continue
        trained = head_kind_for(config.task_type).trained_modules if field.name == "modules_to_save" else ()
        if trained and isinstance(value, (list, tuple, set)) and all(item in trained for item in value):
            continue  # as PEFT itself writes it for classifiers
        reason = reasons.get(field.name, "it has no multiplexed layer yet")
        faults.append(
            Fault(f"{where}.{field.name}", shown(value), f"its default {default!r}", f"Not supported: {reason}.")
        )
    return faults


def _default_of(field: Any) -> Any:
    if field.default is not MISSING:
        return field.default
    return None if field.default_factory is MISSING else field.default_factory()


class _Rule(NamedTuple):
    """The values that a field may have: a test, the same in words, and the rule for the values of a dict."""

    is_valid: Callable[[Any], bool]
    allowed: str
    item: _Rule | None = None


_FACTORS = ("alpha", "lambda", "scaling")
"""Parts of the names of factors: PEFT declares them as integers and multiplies with them."""
_FROM_ZERO = ("seed", "key", "layers_to_transform", "num_frozen_tokens")
"""Endings of the names of integers that may be zero although their default is not."""


def value_faults(config: Any, where: str, known: Sequence[Fault] = ()) -> list[Fault]:
    """Return a fault for every field whose value has another type than PEFT declares, or cannot be written as JSON.

    Args:
        config: a `PeftConfig` of one task.
        where: prefix of the fields, such as `tasks.sql.peft_config`.
        known: faults that were found before; their fields are left out.
    """
    faults = []
    for name, rules in _rules_of(type(config)).items():
        value = getattr(config, name)
        item_rule = next((rule.item for rule in rules if rule.item is not None), None)
        if not any(rule.is_valid(value) for rule in rules) or not _is_plain(value):
            *words, last = (rule.allowed for rule in rules)
            faults.append(Fault(f"{where}.{name}", shown(value), f"{', '.join(words)} or {last}" if words else last))
        elif item_rule is not None and isinstance(value, dict):
            odd = {key: item for key, item in value.items() if not item_rule.is_valid(item)}
            faults += [Fault(f"{where}.{name}[{key!r}]", shown(odd[key]), item_rule.allowed) for key in odd]
    refused = {fault.where for fault in known}
    return [fault for fault in faults if fault.where not in refused]


@functools.cache
def _rules_of(config_type: type) -> Mapping[str, list[_Rule]]:
    """Return the rules of each field; a value must meet one of them: its declared types, by its name and default."""
    rules_by_field, declared = {}, typing.get_type_hints(config_type)
    for field in fields(config_type):
        if field.name in ("task_type", "peft_type"):
            continue
        hint, default = declared[field.name], _default_of(field)
        hints = typing.get_args(hint) if typing.get_origin(hint) in (Union, UnionType) else (hint,)
        if bool in hints and len({*hints} - {NoneType}) > 1:
            rules = [_Rule(lambda value: isinstance(value, (bool, str)), "True, False or a name")]
        else:
            rules = [_rule_of(field.name, hint, default) for hint in hints if hint is not NoneType]
            if default is None or (NoneType in hints and isinstance(default, (bool, str))):
                rules.append(_Rule(lambda value: value is None, "None"))
        rules_by_field[field.name] = rules
    return rules_by_field


def _rule_of(name: str, hint: Any, default: Any) -> _Rule:
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if hint is bool:
        return _Rule(lambda value: isinstance(value, bool), "True or False")
    if hint is str or (isinstance(hint, type) and issubclass(hint, Enum)):
        return _Rule(lambda value: isinstance(value, str), "a string")
    if origin is Literal:
        return _Rule(lambda value: isinstance(value, str) and value in args, ", ".join(map(repr, args)))
    if hint is float and "dropout" in name:
        return _Rule(lambda value: is_real(value) and 0 <= value < 1, "a number in [0, 1)")
    if hint is float or (hint is int and any(part in name for part in _FACTORS)):
        return _Rule(is_real, "a finite number")
    if hint is int and is_integer(default) and default < 0:
        return _Rule(is_integer, "an integer")
    if hint is int:
        least = int(default != 0 and not name.endswith(_FROM_ZERO))
        return _Rule(lambda value: is_integer(value, least), f"an integer of at least {least}")
    if origin in (list, set):
        # Strings; else positions of layers and ids of tokens.
        is_item = is_text if args == (str,) else functools.partial(is_integer, least=0)
        # PEFT writes the configuration as JSON, for which it turns sets into lists, but no other collection. It indexes
        # embeddings with numbers of tokens, and a tuple would be one index there.
        kinds = (list,) if name.endswith("token_indices") else (list, set, tuple)
        return _Rule(
            lambda value: isinstance(value, kinds) and all(map(is_item, value)),
            "a list of strings" if is_item is is_text else "a list of integers of at least 0",
        )
    if dict in (hint, origin):
        item = None if hint is dict else _rule_of(name, args[1], 0)
        if name.endswith("_pattern"):
            item = _Rule(lambda value: is_real(value) and value > 0, "a number above 0")
        if name == "rank_pattern" and hint is dict:
            item = _Rule(lambda value: is_integer(value, 1), "an integer of at least 1")
        return _Rule(lambda value: isinstance(value, dict) and all(map(is_text, value)), "a dict from names", item)
    # Configurations within a configuration come back from files as dictionaries.
    return _Rule(lambda value: isinstance(value, (hint, dict)), f"a {getattr(hint, '__name__', hint)}")


def _is_plain(value: object) -> bool:
    """Return whether PEFT can write a value as JSON."""
    try:
        value = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
        json.dumps(list(value) if isinstance(value, set) else value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


# ---------------------------------------------------------------------- targets


def _target_faults(kind: AdapterKind, config: Any, backbone: Any, where: str) -> list[Fault]:
    """Return what of a configuration with sound fields does not fit the backbone."""
    if not kind.has_targets:
        return kind.backbone_faults(config, backbone, where)
    if faults := pattern_faults(config, [name for name, _ in backbone.named_modules()], where):
        return faults
    completed = copy.deepcopy(config)
    try:
        kind.complete(completed, backbone)
    except ValueError as error:  # of PEFT, which renames targets for some backbones
        targets = "one whose targets PEFT finds on this backbone"
        return [Fault(where, type(config).__name__, targets, f"PEFT: {error}")]
    faults = kind.backbone_faults(completed, backbone, where) or _module_faults(kind, completed, backbone, where)
    return faults + _copy_faults(config, backbone, where) + _bias_faults(config, backbone, where)


def _module_faults(kind: AdapterKind, config: Any, backbone: Any, where: str) -> list[Fault]:
    """Return what is wrong with the modules that a completed configuration names."""
    modules, targets, field = kind.adaptable(backbone), config.target_modules, f"{where}.target_modules"
    is_all, asked = isinstance(targets, str) and targets.lower() == "all-linear", copy.copy(config)
    # PEFT's layer of a matrix fails on the router of a mixture.
    for name, module in modules.items() if targets is not None else ():
        if not is_router(module):
            continue
        asked.target_modules = [name] if is_all else targets
        if check_target_module_exists(asked, name):
            leaf = name.rsplit(".", 1)[-1]
            others = sorted({other.rsplit(".", 1)[-1] for other, item in modules.items() if not is_router(item)})
            allowed = f'of {", ".join(others)}, or "all-linear" with exclude_modules=["{leaf}"]'
            reason = (
                f"{name} ({type(module).__name__}) returns several tensors, on which PEFT's layer of a matrix fails."
            )
            return [Fault(field, shown(targets), allowed, reason)]
    leaves = sorted({name.rsplit(".", 1)[-1] for name in modules})
    known = f'"all-linear" or modules of {type(backbone).__name__} ({", ".join(leaves)})'
    matched: dict[str, nn.Module] = {}
    faults = []
    bare = getattr(config, "target_parameters", None)
    if targets is None and not bare:
        model_type: Any = getattr(getattr(backbone, "config", None), "model_type", None)
        if model_type in kind.default_targets:
            asked.target_modules = kind.default_targets[model_type]
            matched = {name: module for name, module in modules.items() if check_target_module_exists(asked, name)}
        else:
            faults.append(Fault(field, "None", known, f'PEFT has no default for model type "{model_type}".'))
    elif isinstance(targets, str):
        # PEFT, too, ignores upper and lower case in "all-linear".
        matched = {name: module for name, module in modules.items() if is_all or re.fullmatch(targets, name)}
        if not matched and not is_all:
            fix = "A string is a regular expression over full names."
            faults.append(Fault(field, repr(targets), known, fix))
    else:
        faults += [] if targets or bare else [Fault(field, "nothing", known)]
        for target in sorted(targets or ()):
            hits = {name: module for name, module in modules.items() if name == target or name.endswith(f".{target}")}
            matched.update(hits)
            if not hits:
                faults.append(Fault(field, repr(target), known, closest(target, leaves)))
    return faults + kind.width_faults(config, matched, where)


# ----------------------------------------------------------- regular expressions

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


@functools.lru_cache(maxsize=256)
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


# --------------------------------------------- parts of the backbone that are copied


def _bias_faults(config: Any, backbone: nn.Module, where: str) -> list[Fault]:
    """Return a fault for a bias that is not simply added to the output of its module."""
    how = getattr(config, "bias", "none")
    if how == "none":
        return []
    wanted = wanted_biases(config, backbone)
    if how != "all" and not isinstance(config.target_modules, str | None):
        wanted = {name: item for name, item in wanted.items() if check_target_module_exists(config, name)}
    if not wanted:
        return [Fault(f"{where}.bias", repr(how), "'none', because no such module of the backbone has a bias")]
    for name, module in wanted.items():
        if type(module) not in (nn.Linear, Conv1D, nn.LayerNorm):
            got = f"{how!r}, which includes {name}, a {type(module).__name__}"
            allowed = "used with linear layers and LayerNorm, not quantised"
            return [Fault(f"{where}.bias", got, allowed, "Leave the biases out.")]
    return []


def _copy_faults(config: Any, backbone: Any, where: str) -> list[Fault]:
    """Return what is wrong with `modules_to_save` and `trainable_token_indices`, given the backbone."""
    modules = {name: module for name, module in backbone.named_modules() if name and not is_inside_wrapper(name)}
    head, heads = backbone.get_output_embeddings(), head_kind_for(config.task_type).trained_modules
    saved = getattr(config, "modules_to_save", None) or ()
    faults = []
    for wanted in [name for name in saved if name not in heads]:
        # PEFT, too, looks at how names end.
        matching = {name: module for name, module in modules.items() if name.endswith(wanted)}
        field, allowed = f"{where}.modules_to_save", "embeddings, norms or the output head, by the ends of their names"
        if not matching:
            ends = [name for name, module in modules.items() if module in (backbone.get_input_embeddings(), head)]
            vectors = [name for name, item in backbone.named_parameters() if item.dim() == 1]
            norms = sorted({name.split(".")[-2] for name in vectors if name.endswith(".weight")})
            fix = f"{closest(wanted, norms)} This backbone has {' and '.join(ends)}."
            faults.append(Fault(field, repr(wanted), allowed, fix.strip()))
        for name, module in matching.items():
            if isinstance(module, AuxiliaryTrainingWrapper | BaseTunerLayer):
                continue  # other tasks train it, too, which `claim_faults` looks at
            if any(True for _ in module.children()):
                fix = (
                    f"{name} contains other modules, which other tasks adapt; name those that are to be trained whole."
                )
            elif isinstance(module, nn.Linear) and module is not head:
                fix = f"{name} is a linear layer, which other tasks adapt; adapt it with a high rank."
            else:
                continue
            faults.append(Fault(field, f"{wanted!r} ({type(module).__name__})", allowed, fix))
            break
    given, by_layer = getattr(config, "trainable_token_indices", None), _trained_rows(config, backbone)
    where = f"{where}.trainable_token_indices"
    if given is not None and not by_layer:
        faults.append(Fault(where, shown(given), _ROWS))
    for layer, indices in by_layer.items():
        faults += _row_faults(layer, indices, modules, where if by_layer is not given else f"{where}[{layer!r}]")
    for layer in by_layer:
        if any(layer.endswith(name) for name in saved):
            allowed = "a module that is not in modules_to_save"
            faults.append(Fault(where, repr(layer), allowed, "Leave one of them out."))
    return faults


def _trained_rows(config: Any, backbone: Any) -> Mapping[str, list[int]]:
    """Return the tokens whose rows a task trains, by the end of the name of their layer; a list is of the embedding."""
    given, embedding = getattr(config, "trainable_token_indices", None), backbone.get_input_embeddings()
    if given is None or isinstance(given, dict):
        return given or {}
    return {next(name for name, module in backbone.named_modules() if module is embedding): given}


_ROWS = "a list of different numbers of tokens, or a dict of such lists"
"""Allowed values of `trainable_token_indices`."""


def _row_faults(wanted: str, indices: list[int], modules: Mapping[str, nn.Module], where: str) -> list[Fault]:
    # PEFT writes the same row twice in an order of its own.
    if not 0 < len(set(indices)) == len(indices):
        return [Fault(where, shown(indices), _ROWS)]
    matching = [module for name, module in modules.items() if name.endswith(wanted)]
    plain: list[Any] = [
        getattr(module, "original_module", getattr(module, "base_layer", module)) for module in matching
    ]
    if not matching or not all(isinstance(module, nn.Embedding | nn.Linear) for module in plain):
        allowed = "the input embedding or the output head, by the end of its name"
        return [Fault(where, repr(wanted), allowed, closest(wanted, sorted(modules)))]
    if any(isinstance(module, nn.Linear) and module.bias is not None for module in plain):
        fix = "PEFT leaves the bias out; train the layer in modules_to_save."
        return [Fault(where, repr(wanted), "a layer without a bias", fix)]
    num_words = min(module.weight.shape[0] for module in plain)
    if max(indices) >= num_words:
        return [Fault(where, shown(indices), f"numbers of tokens below {num_words}", "Resize the embedding first.")]
    return []


# ---------------------------------------------------------------- between tasks

_FIELD_OF_WAY = {
    "copy": "modules_to_save",
    "rows": "trainable_token_indices",
    "adapters": "target_modules",
    "biases": "bias",
}
"""The field that asks for a module in each way."""


def claim_faults(new: Mapping[str, PeftConfig], held: Mapping[str, PeftConfig], backbone: Any) -> list[Fault]:
    """Return a fault for each new task that wants a module in another way than some other task does.

    Args:
        new: configuration of each new task, by its name.
        held: the same of the tasks that are there already.
        backbone: the transformers model that they adapt.
    """
    configs = {**held, **new}
    names = module_names(backbone)
    # What each task trains whole or in rows, and which of the two.
    kept: dict[str, dict[str, str]] = {}
    for task, config in configs.items():
        heads = head_kind_for(config.task_type).trained_modules
        copies = [wanted for wanted in getattr(config, "modules_to_save", None) or () if wanted not in heads]
        # PEFT, too, looks at how names end.
        ways = (("copy", tuple(copies)), ("rows", tuple(_trained_rows(config, backbone))))
        kept[task] = {name: way for way, ends in ways if ends for name in names if name.endswith(ends)}
    shared = {module for ways_of_task in kept.values() for module in ways_of_task}
    owners: dict[str, tuple[str, str]] = {}
    faults = []
    # Most runs have none of these, and then no module is looked at.
    for task, config in configs.items() if shared else ():
        claims = [*kept[task].items()]
        others = shared - kept[task].keys()
        if getattr(config, "bias", "none") == "all":
            biased = [name for name in others if getattr(backbone.get_submodule(name), "bias", None) is not None]
            claims += [(name, "biases") for name in biased]
        targets = getattr(config, "target_modules", None)
        # "all-linear" leaves the output head out, and embeddings are not linear.
        if targets is not None and not (isinstance(targets, str) and targets.lower() == "all-linear"):
            claims += [(name, "adapters") for name in others if check_target_module_exists(config, name)]
        for module, way in claims:
            first, other = owners.setdefault(module, (way, task))
            if first != way:
                allowed = f'a module that task "{other}" does not name in {_FIELD_OF_WAY[first]}'
                fix = "Name it in the same field for both, or train the two tasks in two runs."
                faults.append(Fault(f"tasks.{task}.peft_config.{_FIELD_OF_WAY[way]}", module, allowed, fix))
    return faults
