"""What was counted on a description stands for every model that is described alike, as long as the process lives.

Trainers that are made one after another over the same tasks (sweeps, resumed runs, notebooks) count once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable
from dataclasses import is_dataclass
from typing import Any

import torch
from transformers import PretrainedConfig

from peft_mux.modeling.adapters.kind import kind_of
from peft_mux.modeling.model import MultiTaskPeftModel

Description = tuple[Hashable, ...]
_MOST = 64
_COUNTED: dict[tuple[Description, Hashable], float] = {}


def counted_once(of: Description | None, how: Hashable, count: Callable[[], float]) -> float:
    """Return what was counted of a description, and count where nothing was; what raises is counted anew.

    Args:
        of: what describes the model (`description_of`); `None` to count in any case.
        how: what else the number depends on.
        count: counts.
    """
    if of is None:
        return count()
    if (of, how) not in _COUNTED:
        counted = count()
        if len(_COUNTED) >= _MOST:
            _COUNTED.clear()
        _COUNTED[of, how] = counted
    return _COUNTED[of, how]


def forget() -> None:
    """Count everything anew from now on."""
    _COUNTED.clear()


def description_of(model: MultiTaskPeftModel) -> Description | None:
    """Return all that a model which is made anew without data is made of: architecture, adapters and their kinds.

    `None` where a configuration holds what cannot be told apart by its values.
    """
    adapters = [model.peft_config[model.adapter_of(name)] for name in model.tasks]
    try:
        texts = [json.dumps(vars(one), default=_plain, sort_keys=True) for one in (model.backbone.config, *adapters)]
    except (TypeError, ValueError):
        return None
    kinds = [(type(config), kind_of(config)) for config in adapters]
    return (type(model.backbone), model.tasks, *texts, *(one for pair in kinds for one in pair))


def _plain(value: Any) -> Any:
    """Return a value of a configuration as JSON may hold it."""
    if isinstance(value, PretrainedConfig) or (is_dataclass(value) and not isinstance(value, type)):
        return [type(value).__qualname__, vars(value)]
    if isinstance(value, set | frozenset):
        return sorted(value)
    if isinstance(value, torch.dtype):
        return str(value)
    raise TypeError(value)
