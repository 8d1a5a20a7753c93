"""The state of one task by the names of its parameters, whatever pages, stages or processes it lies in.

An optimizer that steps the pages of a slab keeps its moments as flat as the pages are, and how pages are cut depends on
which layers lie in a process. Here a page's moments become one tensor for each parameter, in the parameter's own shape,
and the other way round; so any layout can go on from any other::

    page      | q.A | k.A | q.B^T | k.B^T |          exp_avg, exp_avg_sq: as long as the page;  step: one number
    by name   q.A: {exp_avg [R, D], exp_avg_sq [R, D], step}   q.B: {exp_avg [K, R], ...}   ...
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from peft_mux.errors import CheckpointError
from peft_mux.modeling.slabs import decays
from peft_mux.tasks.optimizer import TaskOptimizer

Moments = dict[str, Any]
"""What an optimizer keeps for one parameter: tensors, and plain numbers."""


@dataclass(frozen=True, slots=True)
class TaskState:
    """Weights, optimizer and schedule of a task, or of the part of it that lies in one process.

    Attributes:
        weights: the weights, by the parameters' PEFT names without the adapter id.
        moments: what the optimizer keeps for each parameter, by its name; empty before the first step.
        settings: the settings of the optimizer's groups: those of parameters that decay under "decays", of others under
            "stays".
        schedule: the state of the schedule; lists with one entry for each group are by the same two words.
        copies: copies of the weights at other times, by what they are (such as the last good ones) and parameter.
    """

    weights: dict[str, torch.Tensor]
    moments: dict[str, Moments]
    settings: dict[str, dict[str, Any]]
    schedule: dict[str, Any]
    copies: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)


@torch.no_grad()
def split_state(parameters: Mapping[str, nn.Parameter], optimizer: TaskOptimizer | None) -> TaskState:
    """Return a task's state by parameter, copied.

    Args:
        parameters: the parameters of the task in this process, by name.
        optimizer: the optimizer over these parameters; `None` where there are none.
    """
    weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    if optimizer is None:
        return TaskState(weights, {}, {}, {})
    own = optimizer.optimizer
    moments: dict[str, Moments] = {}
    for owner in optimizer.parameters:
        members = {name: item for name, item in parameters.items() if _lies_in(item, owner)}
        for key, value in own.state.get(owner, {}).items():
            for name, item in members.items():
                moments.setdefault(name, {})[key] = _part(value, item, owner)
    kinds = _kinds(optimizer, parameters)
    settings = {
        kind: {key: value for key, value in group.items() if key != "params"}
        for kind, group in zip(kinds, own.param_groups, strict=True)
        if kind != _NONE
    }
    schedule = {
        key: _by_kind(value, kinds) if _is_by_group(value, kinds) else value
        for key, value in optimizer.schedule.state_dict().items()
    }
    return TaskState(weights, moments, settings, schedule)


@torch.no_grad()
def join_state(
    state: TaskState,
    parameters: Mapping[str, nn.Parameter],
    optimizer: TaskOptimizer | None,
    from_step: int | None = None,
) -> None:
    """Take up what concerns this process of a state that `split_state` or `merge_states` returned.

    Args:
        state: the state of the whole task, or of at least these parameters.
        parameters: the parameters of the task in this process, by name.
        optimizer: the optimizer over these parameters; `None` where there are none.
        from_step: step from which on the optimizer's own settings and schedule hold; `None` for those of the state.

    Raises:
        CheckpointError: if a parameter is not in the state, or of another shape.
    """
    for name, parameter in parameters.items():
        _copy_weight(name, state.weights, parameter)
    if optimizer is None:
        return
    kinds, own = _kinds(optimizer, parameters), optimizer.optimizer
    read = own.state_dict()
    for kind, group in zip(kinds, read["param_groups"], strict=True):
        group.update(_of_kind(kind, state.settings) if from_step is None else {})
    # The moments of this run so far go: state that a checkpoint does not have must not survive the resumption.
    read["state"] = {}
    for number, owner in enumerate(optimizer.parameters):
        members = {name: item for name, item in parameters.items() if _lies_in(item, owner)}
        moments = _joined(members, owner, state.moments)
        if moments:
            read["state"][number] = moments
    # Through torch's own door, which casts and moves the state as each optimizer wants it.
    own.load_state_dict(read)
    if from_step is not None:
        optimizer.go_on_from(from_step)
        return
    schedule = {key: _by_group(value, kinds) for key, value in state.schedule.items()}
    optimizer.schedule.load_state_dict(schedule)


def merge_states(parts: Iterable[TaskState]) -> TaskState:
    """Return the state of a whole task from those of its parts; settings are equal wherever there are any."""
    weights: dict[str, torch.Tensor] = {}
    moments: dict[str, Moments] = {}
    settings: dict[str, dict[str, Any]] = {}
    schedule: dict[str, Any] = {}
    copies: dict[str, dict[str, torch.Tensor]] = {}
    for part in parts:
        weights |= part.weights
        moments |= part.moments
        settings |= part.settings
        for key, value in part.schedule.items():
            is_by_kind = isinstance(value, dict) and set(value) <= _KINDS
            schedule[key] = {**schedule.get(key, {}), **value} if is_by_kind else value
        for key, own in part.copies.items():
            copies.setdefault(key, {}).update(own)
    return TaskState(weights, moments, settings, schedule, copies)


_KINDS = {"decays", "stays"}
_NONE = "none"
"""Kind of a group without elements, which a process has where no adapter of the task lies."""


def _kinds(optimizer: TaskOptimizer, parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """Return for each group of an optimizer whether weight decay applies to it."""
    kinds = []
    of_page = {id(page.values): page for page in ([] if optimizer.slab is None else optimizer.slab.pages)}
    for group in optimizer.optimizer.param_groups:
        member = next((name for name, item in parameters.items() if _lies_in(item, group["params"][0])), None)
        # A page of many parameters knows itself whether it decays; a lone parameter tells by its name.
        page = of_page.get(id(group["params"][0]))
        does_decay = member is not None and (decays(member) if page is None else page.decays)
        kinds.append(_NONE if member is None else "decays" if does_decay else "stays")
    return kinds


def _of_kind(kind: str, settings: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    if kind == _NONE:  # the rate is the same for all
        return next(iter(settings.values()), {})
    if kind not in settings:
        raise CheckpointError(
            f"optimizer: got settings for {', '.join(settings) or 'nothing'}; allowed: also for parameters of kind"
            f" {kind!r}, which this task has. Resume with the same adapter configuration."
        )
    return settings[kind]


def _is_by_group(value: Any, kinds: list[str]) -> bool:
    return isinstance(value, list) and len(value) == len(kinds)


def _by_kind(values: list[Any], kinds: list[str]) -> dict[str, Any]:
    return {kind: value for kind, value in zip(kinds, values, strict=True) if kind != _NONE}


def _by_group(value: Any, kinds: list[str]) -> Any:
    if not (isinstance(value, dict) and value and set(value) <= _KINDS):
        return value
    return [next(iter(value.values())) if kind == _NONE else value[kind] for kind in kinds]


def _lies_in(parameter: torch.Tensor, owner: torch.Tensor) -> bool:
    """Whether a parameter is a tensor that an optimizer steps, or a view of a part of it."""
    if parameter.untyped_storage().data_ptr() != owner.untyped_storage().data_ptr():
        return False
    # All parameters of a page share its storage, also where an optimizer steps them one by one.
    before = parameter.storage_offset() - owner.storage_offset()
    return before >= 0 and before + parameter.numel() <= owner.numel()


def _view(flat: torch.Tensor, parameter: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor like `owner` that stands for a parameter, in its shape."""
    offset = parameter.storage_offset() - owner.storage_offset()
    # By strides, since B lies transposed in its page; the offset is that within the owner, as moments are as long as
    # it.
    return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset() + offset)


def _part(value: Any, parameter: torch.Tensor, owner: torch.Tensor) -> Any:
    """Return a parameter's part of what is kept for its owner; numbers belong to all parts."""
    if not isinstance(value, torch.Tensor):
        return value
    is_of_page = owner is not parameter and value.shape == owner.shape
    return (_view(value, parameter, owner) if is_of_page else value).detach().clone().contiguous()


def _joined(members: Mapping[str, torch.Tensor], owner: torch.Tensor, moments: Mapping[str, Moments]) -> Moments:
    """Return what an optimizer keeps for an owner, made of what its members bring."""
    found = {name: moments.get(name, {}) for name in members}
    keys = {key for own in found.values() for key in own}
    joined: Moments = {}
    for name, parameter in members.items():
        missing = sorted(keys - set(found[name]))
        if missing:
            raise CheckpointError(
                f"optimizer: got no {', '.join(missing)} of {name}; allowed: a state of all parameters that are stepped"
                " together. Restore the whole checkpoint."
            )
        for key, value in found[name].items():
            if owner is parameter or not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
                joined[key] = value.clone() if isinstance(value, torch.Tensor) else value
            else:
                if key not in joined:
                    joined[key] = torch.zeros_like(owner, dtype=value.dtype, requires_grad=False)
                _view(joined[key], parameter, owner).copy_(value)
    return joined


def _copy_weight(name: str, weights: Mapping[str, torch.Tensor], parameter: nn.Parameter) -> None:
    found = weights.get(name)
    if found is None or found.shape != parameter.shape:
        got = "nothing" if found is None else f"shape {list(found.shape)}"
        raise CheckpointError(
            f"{name}: got {got}; allowed: a tensor of shape {list(parameter.shape)}. Resume with the adapter"
            " configuration that the checkpoint was written with."
        )
    parameter.copy_(found)
