"""All tensors of a task that a checkpoint holds, by the names of its parameters, in any layout of pages and processes.

An optimizer that steps the pages of a slab keeps its moments in one flat tensor per page, and how pages are cut depends
on which layers a process holds. `split_state` turns these into one tensor per parameter, in the parameter's own shape,
and `join_state` does the reverse, so that a run can resume in any layout::

    page      | q.A | k.A | q.B^T | k.B^T |          exp_avg, exp_avg_sq: as long as the page;  step: one number
    by name   q.A: {exp_avg [R, D], exp_avg_sq [R, D], step}   q.B: {exp_avg [K, R], ...}   ...

On resuming, each process takes its own pieces of the whole (`take_part`). `peft_mux.parallel.task_states` makes a whole
of the parts that several processes hold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from peft_mux.engine.tasks.active_task import ActiveTask
from peft_mux.engine.tasks.optimizer import TaskOptimizer
from peft_mux.errors import CheckpointError
from peft_mux.modeling.pieces import Piece
from peft_mux.modeling.slabs import PAGE_KINDS

Moments = dict[str, Any]
"""What an optimizer keeps for one parameter: tensors and plain numbers."""
LAST_GOOD = "last_good"
"""Copy of the weights from when loss and gradients were last finite."""
BEST = "best"
"""Copy of the weights of the best evaluation; empty without one."""
GRADIENTS = "gradients"
"""What calls have added up since the last step (`peft_mux.calls`); a run has none between steps."""
_KINDS = set(PAGE_KINDS)
_NONE = "none"
"""Kind of a group without elements, in a process that holds no adapter of the task."""


@dataclass(frozen=True, slots=True)
class TaskState:
    """Weights, optimizer and schedule of a task, or of the part of it that one process holds.

    Attributes:
        weights: the weights, by the parameters' PEFT names without the adapter id.
        moments: what the optimizer keeps for each parameter, by its name; empty before the first step.
        settings: the settings of the optimizer's parameter groups, by their kinds (`PAGE_KINDS`).
        schedule: the state of the schedule; lists with one entry per group are dicts by these kinds.
        copies: tensors like the weights, by parameter: weights from other times (`LAST_GOOD`, `BEST`), and `GRADIENTS`.
    """

    weights: dict[str, torch.Tensor]
    moments: dict[str, Moments]
    settings: dict[str, dict[str, Any]]
    schedule: dict[str, Any]
    copies: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)


# ---------------------------------------------------------------- out of a run, and into one


def take_snapshot(task: ActiveTask, model: Any, *, only_weights: bool = False) -> TaskState:
    """Return a copy of this process's part of a task, or only of its weights.

    Args:
        task: the task.
        model: has the adapter of the task, or a part of it.
        only_weights: leave out everything but the weights.
    """
    parameters = model.task_parameters(task.name)
    state = split_state(parameters, None if only_weights else task.optimizer)
    if only_weights or task.last_good is None:
        return state
    last_good = {
        name: part.detach().clone().contiguous()
        for page, copy in zip(model.registry.slab_of(task.name).pages, task.last_good.weights.values(), strict=True)
        for name, parameter in parameters.items()
        if (part := page.part(parameter, copy)) is not None
    }
    return replace(state, copies={LAST_GOOD: last_good, BEST: dict(task.best_weights)})


@torch.no_grad()
def put_snapshot(task: ActiveTask, model: Any, state: TaskState, *, from_step: int | None = None) -> None:
    """Restore a task from the state of the whole task; this process takes the parts that it holds.

    Args:
        task: the task, with its optimizer built, or ended.
        model: the model with the adapter of the task, or a part of it.
        state: the state of the whole task.
        from_step: step from which the present settings of optimizer and schedule hold; `None` for those of the state.

    Raises:
        CheckpointError: if the state is not of this task's parameters.
    """
    parameters = model.task_parameters(task.name)
    # By this process's own pieces, so that the layout that wrote the state does not matter.
    piece = take_part(state, model.registry.pieces_of(task.name))
    if task.optimizer is not None and not task.optimizer.steps_here:
        piece = replace(piece, moments={})
    join_state(piece, parameters, task.optimizer, from_step)
    if task.last_good is None:
        return
    # The state of an ended task has only the weights that it ended with.
    last_good = piece.copies.get(LAST_GOOD) or piece.weights
    for page, copy in zip(model.registry.slab_of(task.name).pages, task.last_good.weights.values(), strict=True):
        for name, parameter in parameters.items():
            part = page.part(parameter, copy)
            if part is not None and name in last_good:
                # In place, because the optimizer's joint update refers to the copy by address.
                part.copy_(last_good[name])
    task.best_weights = {name: tensor.contiguous() for name, tensor in piece.copies.get(BEST, {}).items()}


@torch.no_grad()
def split_state(parameters: Mapping[str, nn.Parameter], optimizer: TaskOptimizer | None) -> TaskState:
    """Return a copy of a task's state by parameter.

    Args:
        parameters: the parameters of the task in this process, by name.
        optimizer: the optimizer of these parameters; `None` if there are none.
    """
    weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
    if optimizer is None:
        return TaskState(weights, {}, {}, {})
    moments: dict[str, Moments] = {}
    for owner in optimizer.parameters:
        members = {name: item for name, item in parameters.items() if _lies_in(item, owner)}
        for key, value in optimizer.optimizer.state.get(owner, {}).items():
            for name, parameter in members.items():
                part = value
                if isinstance(value, torch.Tensor):  # numbers belong to all members
                    is_of_page = owner is not parameter and value.shape == owner.shape
                    part = _view(value, parameter, owner) if is_of_page else value
                    part = part.detach().clone().contiguous()
                moments.setdefault(name, {})[key] = part
    kinds = _kinds(optimizer, parameters)
    settings = {
        kind: {key: value for key, value in group.items() if key != "params"}
        for kind, group in zip(kinds, optimizer.optimizer.param_groups, strict=True)
        if kind != _NONE
    }
    schedule = optimizer.schedule.state_dict()
    for key, value in schedule.items():
        if isinstance(value, list) and len(value) == len(kinds):
            schedule[key] = {kind: item for kind, item in zip(kinds, value, strict=True) if kind != _NONE}
    return TaskState(weights, moments, settings, schedule)


@torch.no_grad()
def join_state(
    state: TaskState,
    parameters: Mapping[str, nn.Parameter],
    optimizer: TaskOptimizer | None,
    from_step: int | None = None,
) -> None:
    """Load a state that `split_state` or `merge_states` returned into parameters and optimizer.

    Args:
        state: the state of the whole task, or of at least these parameters.
        parameters: the parameters of the task in this process, by name.
        optimizer: the optimizer of these parameters; `None` if there are none.
        from_step: step from which the optimizer's own settings and schedule hold; `None` for those of the state.

    Raises:
        CheckpointError: if a parameter is not in the state, or has another shape.
    """
    # Before the first of them is written.
    weights = {name: _checked(name, state.weights.get(name), item.shape) for name, item in parameters.items()}
    for name, parameter in parameters.items():
        parameter.copy_(weights[name])
    if optimizer is None:
        return
    kinds = _kinds(optimizer, parameters)
    read = optimizer.optimizer.state_dict()
    for kind, group in zip(kinds, read["param_groups"], strict=True) if from_step is None else ():
        if kind != _NONE and kind not in state.settings:
            raise CheckpointError(
                f"optimizer must have settings for parameters of kind {kind!r}, which this task has, got settings "
                f"for {', '.join(state.settings) or 'nothing'}. Resume with the same adapter configuration."
            )
        # The rate is the same for groups without elements.
        group.update(next(iter(state.settings.values()), {}) if kind == _NONE else state.settings[kind])
    # The moments of this run so far are dropped: state that a checkpoint does not have must not survive the resumption.
    read["state"] = {}
    for number, owner in enumerate(optimizer.parameters):
        members = {name: item for name, item in parameters.items() if _lies_in(item, owner)}
        moments = {name: state.moments.get(name, {}) for name in members}
        keys = {key for entries in moments.values() for key in entries}
        joined: Moments = {}
        for name, parameter in members.items():
            if missing := sorted(keys - set(moments[name])):
                raise CheckpointError(
                    "optimizer must have a state of all parameters that are updated together, got no "
                    f"{', '.join(missing)} of {name}. Restore the whole checkpoint."
                )
            for key, value in moments[name].items():
                if owner is parameter or not isinstance(value, torch.Tensor) or value.shape != parameter.shape:
                    joined[key] = value.clone() if isinstance(value, torch.Tensor) else value
                else:
                    if key not in joined:
                        joined[key] = torch.zeros_like(owner, dtype=value.dtype, requires_grad=False)
                    _view(joined[key], parameter, owner).copy_(value)
        if joined:
            read["state"][number] = joined
    # Torch casts and moves the state as each optimizer needs it.
    optimizer.optimizer.load_state_dict(read)
    if from_step is not None:
        optimizer.go_on_from(from_step)
        return
    schedule = dict(state.schedule)
    for key, value in schedule.items():
        if isinstance(value, dict) and value and set(value) <= _KINDS:
            schedule[key] = [next(iter(value.values())) if kind == _NONE else value[kind] for kind in kinds]
    optimizer.schedule.load_state_dict(schedule)


def take_part(state: TaskState, pieces: Mapping[str, Piece]) -> TaskState:
    """Return the pieces of a whole state that a process holds, as views if possible.

    Raises:
        CheckpointError: if a parameter is not in the state, or has another shape.
    """
    weights = {name: piece.take(_checked(name, state.weights.get(name), piece.shape)) for name, piece in pieces.items()}
    copies = {
        copy: {
            name: piece.take(_checked(name, tensors[name], piece.shape))
            for name, piece in pieces.items()
            if name in tensors
        }
        for copy, tensors in state.copies.items()
    }
    moments: dict[str, Moments] = {}
    for name, piece in pieces.items():
        for key, value in state.moments.get(name, {}).items():
            # Only tensors like the parameter are cut with it; numbers belong to all pieces.
            is_cut = isinstance(value, torch.Tensor) and tuple(value.shape) == piece.shape
            moments.setdefault(name, {})[key] = piece.take(value) if is_cut else value
    return replace(state, weights=weights, moments=moments, copies=copies)


def _kinds(optimizer: TaskOptimizer, parameters: Mapping[str, nn.Parameter]) -> list[str]:
    """Return the kind of each parameter group of an optimizer."""
    groups = zip(optimizer.kinds, optimizer.optimizer.param_groups, strict=True)
    return [
        kind if any(_lies_in(item, group["params"][0]) for item in parameters.values()) else _NONE
        for kind, group in groups
    ]


def _lies_in(parameter: torch.Tensor, owner: torch.Tensor) -> bool:
    """Whether a parameter is a tensor that an optimizer steps, or a view of a part of it."""
    if parameter.untyped_storage().data_ptr() != owner.untyped_storage().data_ptr():
        return False
    # All parameters of a page share its storage, even if an optimizer steps them one by one.
    before = parameter.storage_offset() - owner.storage_offset()
    return before >= 0 and before + parameter.numel() <= owner.numel()


def _view(flat: torch.Tensor, parameter: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
    """Return the part of a tensor as long as `owner` that stands for a parameter, in the parameter's shape."""
    offset = parameter.storage_offset() - owner.storage_offset()
    # By strides, since B lies transposed in its page.
    return flat.as_strided(parameter.shape, parameter.stride(), flat.storage_offset() + offset)


def _checked(name: str, tensor: torch.Tensor | None, shape: Sequence[int]) -> torch.Tensor:
    """Return a tensor of a state that has to have a shape."""
    if tensor is None or tuple(tensor.shape) != tuple(shape):
        got = "nothing" if tensor is None else f"shape {list(tensor.shape)}"
        raise CheckpointError(
            f"{name} must be a tensor of shape {list(shape)}, got {got}. Resume with the adapter configuration that "
            "the checkpoint was written with."
        )
    return tensor
