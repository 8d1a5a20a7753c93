"""The tasks of a sweep: one for each combination of settings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Any

from peft_mux.errors import ConfigError, Fault, closest, raise_faults, shown
from peft_mux.task import TASK_FIELDS, Task

_PEFT = "peft_config."
_FIXED = ("name", "callbacks", "peft_config", "early_stopping", "eval_dataset", "compute_metrics")
_OF_THE_TYPE = ("peft_type",)
"""Fields of an adapter that its class sets, whatever is given."""
_MOST_TASKS = 512


@dataclass(frozen=True, slots=True)
class Contest:
    """The tasks of one sweep.

    Attributes:
        name: name of the task that was swept.
        members: the settings of each of its tasks, by name of that task.
    """

    name: str
    members: Mapping[str, Mapping[str, Any]]


def sweep_tasks(task: Task, grid: Mapping[str, Sequence[Any]]) -> tuple[Contest, list[Task]]:
    """Return a task for each combination of settings, named `<task>-01`, `<task>-02` and so on.

    Args:
        task: what all of them have in common.
        grid: values by field of the `Task`, or of its adapter as `peft_config.<field>`.

    Raises:
        ConfigError: naming every field and value that cannot be.
    """
    raise_faults(_grid_faults(task, grid))
    # Counted before any is made: a range may stand for more than memory holds.
    count = math.prod(map(len, grid.values()))
    if not 2 <= count <= _MOST_TASKS:
        raise ConfigError(f"sweep: got {count} combinations; allowed: 2 to {_MOST_TASKS}.")
    combinations = [dict(zip(grid, values, strict=True)) for values in product(*grid.values())]
    digits = max(2, len(str(len(combinations))))
    tasks = [_variant(task, f"{task.name}-{number:0{digits}}", own) for number, own in enumerate(combinations, start=1)]
    return Contest(task.name, {one.name: own for one, own in zip(tasks, combinations, strict=True)}), tasks


def _grid_faults(task: Task, grid: Mapping[str, Sequence[Any]]) -> list[Fault]:
    if not isinstance(grid, Mapping):
        return [Fault("sweep", shown(grid), 'a dict of values by field, such as {"learning_rate": [1e-4, 3e-4]}')]
    allowed = [name for name in TASK_FIELDS if name not in _FIXED]
    allowed += [_PEFT + item.name for item in fields(task.peft_config) if item.init and item.name not in _OF_THE_TYPE]
    faults = []
    for name, values in grid.items():
        where = f"sweep.{name}"
        if name not in allowed:
            # What people call r is not the name most like it, which is that of the ranks by layer.
            asked = _PEFT + "r" if name in ("rank", "r", _PEFT + "rank") and _PEFT + "r" in allowed else name
            hint = closest(asked, allowed) or "Fields of the adapter are written peft_config.r."
            faults.append(Fault(where, "a field that cannot be swept", "a field of Task, or peft_config.<field>", hint))
        elif isinstance(values, (str, bytes)) or not isinstance(values, Sequence) or not values:
            faults.append(Fault(where, shown(values), "a list of at least one value"))
    if not grid:
        faults.append(Fault("sweep", "no settings", 'some, such as {"learning_rate": [1e-4, 3e-4]}'))
    if task.eval_dataset is None:
        faults.append(Fault(f"tasks.{task.name}.eval_dataset", "None", "held-out rows, by which a sweep ranks"))
    if task.early_stopping is not None:
        allowed_rule = "none: a sweep evaluates at steps of its own"
        fix = 'Use early_stop="halving".'
        faults.append(Fault(f"tasks.{task.name}.early_stopping", "a rule", allowed_rule, fix))
    return faults


def _variant(task: Task, name: str, settings: Mapping[str, Any]) -> Task:
    own = {key: value for key, value in settings.items() if not key.startswith(_PEFT)}
    peft = {key.removeprefix(_PEFT): value for key, value in settings.items() if key.startswith(_PEFT)}
    try:
        config = replace(task.peft_config, **peft)
    except (ValueError, TypeError) as error:
        given = ", ".join(f"{key}={shown(value)}" for key, value in peft.items())
        raise ConfigError(f"sweep: PEFT refuses {given}: {error}") from error
    return replace(task, name=name, peft_config=config, **own)
