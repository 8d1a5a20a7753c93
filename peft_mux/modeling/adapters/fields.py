"""Generic checks of the fields of a `PeftConfig`: PEFT declares their types and checks few, and would fail deep inside.

A field is refused if it is set and has no meaning here (`field_faults`), or if its value is not of the type that PEFT
declares (`value_faults`).
"""

from __future__ import annotations

import functools
import json
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, asdict, fields, is_dataclass
from enum import Enum
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union

from peft_mux.errors import Fault, is_integer, is_real, is_text, shown
from peft_mux.modeling.backbone.modules import head_kind_for

BOOKKEEPING_FIELDS = frozenset(
    "task_type peft_type auto_mapping peft_version base_model_name_or_path revision inference_mode megatron_core "
    "qalora_group_size".split()
)
"""Fields that training never reads."""


def field_faults(
    config: Any, where: str, reasons: Mapping[str, str], supported: Collection[str] | None = None
) -> list[Fault]:
    """Return a fault for every field that is not at its default and has no meaning here.

    Args:
        config: a `PeftConfig` of one task.
        where: prefix of the fields, such as `tasks.sql.peft_config`.
        reasons: why fields must keep their defaults, by name.
        supported: the only fields that may be set; by default, all that have no reason against them.
    """
    faults = []
    for field in fields(config):
        is_supported = field.name not in reasons if supported is None else field.name in supported
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
    """What a field may hold: a test of a value, the same in words, and the rule for the values of a dict."""

    is_valid: Callable[[Any], bool]
    allowed: str
    item: _Rule | None = None


_FACTORS = ("alpha", "lambda", "scaling")
"""Parts of the names of factors: PEFT declares them as integers and multiplies with them."""
_FROM_ZERO = ("seed", "key", "layers_to_transform", "num_frozen_tokens")
"""Endings of the names of integers that may be zero although their default is not."""


def value_faults(config: Any, where: str) -> list[Fault]:
    """Return a fault for every field whose value has another type than PEFT declares, or cannot be written as JSON."""
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
    return faults


@functools.cache
def _rules_of(config_type: type) -> Mapping[str, list[_Rule]]:
    """Return the rules of each field; a value must meet one of them: its declared types, by its name and default."""
    found, declared = {}, typing.get_type_hints(config_type)
    for field in fields(config_type):
        if field.name in ("task_type", "peft_type"):
            continue
        hint, default = declared[field.name], _default_of(field)
        hints = typing.get_args(hint) if typing.get_origin(hint) in (Union, UnionType) else (hint,)
        if bool in hints and len({*hints} - {NoneType}) > 1:
            rules = [_Rule(lambda value: isinstance(value, (bool, str)), "True, False or a name")]
        else:
            rules = [_rule_of(field.name, one, default) for one in hints if one is not NoneType]
            if default is None or (NoneType in hints and isinstance(default, (bool, str))):
                rules.append(_Rule(lambda value: value is None, "None"))
        found[field.name] = rules
    return found


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


_OF_WHOLE_MODELS: Mapping[str, str] = {
    "use_dora": "it reads whole rows of frozen weights",
    "lora_bias": "its biases are not divided",
    "use_bdlora": "its blocks are not divided",
    "init_lora_weights": "it decomposes whole frozen weights",
    "bias": "biases of the backbone are not divided",
    "modules_to_save": "copies of modules are not divided",
    "trainable_token_indices": "rows of embeddings are not divided",
}
"""Why some fields can be honoured only by a process that holds the whole backbone."""

INITIALISED_FROM_WEIGHTS = ("pissa", "olora", "corda", "lora_ga")
"""Beginnings of the values of `init_lora_weights` that move a part of the backbone's weights into the adapter."""


def divided_model_faults(config: Any, where: str, layout: str) -> list[Fault]:
    """Return a fault for every field that cannot be honoured if processes divide the backbone among them.

    Args:
        config: a `PeftConfig` of one task.
        where: prefix of the fields, such as `tasks.sql.peft_config`.
        layout: how the backbone is divided, for messages.
    """
    faults = []
    heads = head_kind_for(config.task_type).trained_modules
    for name, reason in _OF_WHOLE_MODELS.items():
        value = getattr(config, name, None)
        if value in (None, False, "none") or (name == "modules_to_save" and set(value) <= set(heads)):
            continue
        if name == "init_lora_weights" and not str(value).startswith(INITIALISED_FROM_WEIGHTS):
            continue
        fix = f"Not supported there: {reason}. Give every process the whole model."
        faults.append(Fault(f"{where}.{name}", f"{shown(value)} with {layout}", "its default", fix))
    return faults
