"""The state of one task by the names of its parameters, whatever pages, stages or processes it lies in.

An optimizer that steps the pages of a slab keeps its moments as flat as the pages are, and how pages are cut depends on
which layers lie in a process. Here a page's moments become one tensor for each parameter, in the parameter's own shape,
and the other way round; so any layout can go on from any other::

    page      | q.A | k.A | q.B^T | k.B^T |          exp_avg, exp_avg_sq: as long as the page;  step: one number
    by name   q.A: {exp_avg [R, D], exp_avg_sq [R, D], step}   q.B: {exp_avg [K, R], ...}   ...
"""

# MERGED: Whole tasks out of the parts that processes hold, and the other way round: what checkpoints and resuming need.
# MERGED: A checkpoint knows nothing of layouts: it holds every parameter whole, as plain PEFT does. The processes of
# MERGED: the first
# MERGED: replica hold each parameter at least once, so they hand their parts to rank 0, each in one message of words
# MERGED: and one of
# MERGED: numbers. Whoever resumes takes of the whole what its own pieces are, in whatever layout.
# MERGED: All tensors of a task that a checkpoint holds, by the names of its parameters: out of a run, and back into
# MERGED: one.
# MERGED: Nothing in a `TaskState` depends on how the task lies in memory: pages, stages, shards. So what one layout
# MERGED: of processes
# MERGED: has written, any other goes on from.

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from peft_mux.engine.layout import ParallelLayout
from peft_mux.engine.processes import Processes
from peft_mux.engine.tasks.optimizer import TaskOptimizer
from peft_mux.engine.tasks.task_run import TaskRun
from peft_mux.errors import CheckpointError
from peft_mux.modeling.sharding import Piece
from peft_mux.modeling.slabs import decays
from peft_mux.storage import pack_state, unpack_state

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


class HeldState(NamedTuple):
    """What a process has of a task.

    Attributes:
        pieces: which part of each parameter the process holds, by name of the parameter.
        state: the state of these parts.
    """

    pieces: Mapping[str, Piece]
    state: TaskState


def gather_task(
    processes: Processes, layout: ParallelLayout, pieces: Mapping[str, Piece], own: TaskState
) -> TaskState | None:
    """Return a task's state, whole, at rank 0; `None` elsewhere.

    Every process of the first replica calls this; others may, and nothing is done in them.

    Args:
        processes: the processes of the run, connected.
        layout: which process holds which part of which replica.
        pieces: which part of each parameter this process holds, as `TaskRegistry.pieces_of` has it.
        own: the state of these parts, from `split_state`, with any copies.

    Raises:
        ProcessError: if another process fails, dies, or does not answer within the time limit.
        CheckpointError: if the parts are not a whole.
    """
    ranks = [rank for rank in range(layout.world_size) if layout.place(rank).replica == 0]
    # Replicas hold the same weights, so those of the first one are enough.
    if processes.rank not in ranks:
        return None
    if processes.rank != 0:
        processes.send(*_packed(pieces, own), target=0)
        return None
    parts = [HeldState(pieces, own)]
    parts += [_unpacked(*processes.receive(rank)) for rank in ranks[1:]]
    return join_parts(parts)


def join_parts(parts: Sequence[HeldState]) -> TaskState:
    """Return the whole state that all parts together are; where they overlap, any of them.

    Args:
        parts: what each process of one replica holds of the task.

    Raises:
        CheckpointError: if something of a parameter is in none of them, or an optimizer keeps for a parameter that is
            cut what cannot be cut with it.
    """
    whole = merge_states(part.state for part in parts)
    pieces: dict[str, list[tuple[Piece, TaskState]]] = {}
    for part in parts:
        for name, piece in part.pieces.items():
            pieces.setdefault(name, []).append((piece, part.state))
    for name, held in pieces.items():
        # Parameters that are held whole are alike on all their holders, and need no joining.
        if any(piece.is_whole for piece, _ in held):
            piece, state = next(one for one in held if one[0].is_whole)
            _take_over(whole, name, state)
            continue
        _check_complete(name, [piece for piece, _ in held])
        whole.weights[name] = _joined_full_state(name, [(piece, state.weights.get(name)) for piece, state in held])
        for copy, own in whole.copies.items():
            if name in own:
                own[name] = _joined_full_state(
                    name, [(piece, state.copies.get(copy, {}).get(name)) for piece, state in held]
                )
        if name in whole.moments:
            whole.moments[name] = _joined_moments(name, [(piece, state.moments.get(name, {})) for piece, state in held])
    return whole


def take_part(state: TaskState, pieces: Mapping[str, Piece]) -> TaskState:
    """Return what a process needs of a whole state; views of it where they can be.

    Args:
        state: the state of the whole task.
        pieces: which part of each parameter the process holds, by name of the parameter.

    Raises:
        CheckpointError: if a parameter is not in the state, or of another shape.
    """
    weights = _taken(state.weights, pieces)
    copies = {copy: _taken(own, {n: p for n, p in pieces.items() if n in own}) for copy, own in state.copies.items()}
    moments: dict[str, Moments] = {}
    for name, piece in pieces.items():
        if name in state.moments:
            moments[name] = {key: _moment_part(value, piece) for key, value in state.moments[name].items()}
    return replace(state, weights=weights, moments=moments, copies=copies)


# ------------------------------------------------------------------- joining


def _take_over(whole: TaskState, name: str, state: TaskState) -> None:
    """Let a parameter be what one process has of it, whole."""
    whole.weights[name] = state.weights[name]
    if name in state.moments:
        whole.moments[name] = state.moments[name]
    for copy, own in state.copies.items():
        if name in own:
            whole.copies[copy][name] = own[name]


def _joined_full_state(name: str, parts: Iterable[tuple[Piece, torch.Tensor | None]]) -> torch.Tensor:
    """Return a tensor made of its parts, on the CPU."""
    whole: torch.Tensor | None = None
    for piece, part in parts:
        if part is None or tuple(part.shape) != piece.part_shape:
            got = "nothing" if part is None else f"a part of shape {list(part.shape)}"
            raise CheckpointError(
                f"{name}: got {got}; allowed: shape {list(piece.part_shape)}, as its process holds. All processes of a"
                " replica have to save the same things of a task."
            )
        if whole is None:
            whole = torch.zeros(piece.shape, dtype=part.dtype)
        piece.put(whole, part.to(whole.device))
    assert whole is not None, "a parameter has at least one piece"
    return whole


def _joined_moments(name: str, parts: Sequence[tuple[Piece, Moments]]) -> Moments:
    """Return what an optimizer keeps for a parameter, made of what it keeps for its parts."""
    joined: Moments = {}
    for key in dict.fromkeys(key for _, moments in parts for key in moments):
        if any(key not in moments for _, moments in parts):
            raise CheckpointError(
                f"{name}, {key}: got it from some processes only; allowed: an optimizer that keeps the same things in"
                " every process of a replica. Train with one optimizer."
            )
        piece, first = parts[0][0], parts[0][1][key]
        # Step counters: the same in all parts, which step together.
        if not isinstance(first, torch.Tensor) or first.dim() == 0:
            joined[key] = first
        elif tuple(first.shape) == piece.part_shape:
            joined[key] = _joined_full_state(f"{name}, {key}", [(piece, moments.get(key)) for piece, moments in parts])
        else:
            raise CheckpointError(
                f"{name}, {key}: got shape {list(first.shape)} for a part of shape {list(piece.part_shape)}; allowed:"
                " an optimizer that treats every element alike, where a parameter is cut. Set optim to adamw_torch, or"
                " tensor_parallel_size to 1."
            )
    return joined


def _check_complete(name: str, pieces: Sequence[Piece]) -> None:
    size, last = pieces[0].shape[pieces[0].dim], 0
    # Ranges of fused projections interleave between ranks, so gaps are looked for in sorted order.
    for start, end in sorted(edge for piece in pieces for edge in piece.ranges):
        if start > last:
            break
        last = max(last, end)
    if last < size:
        raise CheckpointError(
            f"{name}: got nothing of index {last} along dimension {pieces[0].dim}, of {size}; allowed: all of it from"
            " the processes of one replica. Load the same model and adapter in each."
        )


# -------------------------------------------------------------------- taking


def _taken(tensors: Mapping[str, torch.Tensor], pieces: Mapping[str, Piece]) -> dict[str, torch.Tensor]:
    parts = {}
    for name, piece in pieces.items():
        found = tensors.get(name)
        if found is None or tuple(found.shape) != piece.shape:
            got = "nothing" if found is None else f"shape {list(found.shape)}"
            raise CheckpointError(
                f"{name}: got {got}; allowed: a tensor of shape {list(piece.shape)}. Resume with the adapter"
                " configuration that the checkpoint was written with."
            )
        parts[name] = piece.take(found)
    return parts


def _moment_part(value: Any, piece: Piece) -> Any:
    """Return the part of a tensor like the parameter; numbers belong to all parts."""
    is_like = isinstance(value, torch.Tensor) and tuple(value.shape) == piece.shape
    return piece.take(value) if is_like else value


# ------------------------------------------------------------------ messages


def _packed(pieces: Mapping[str, Piece], state: TaskState) -> tuple[Any, torch.Tensor]:
    """Return a part as words and the bytes of all its tensors."""
    fields = {name: getattr(state, name) for name in ("weights", "moments", "settings", "schedule", "copies")}
    tensors, tree = pack_state(fields)
    described = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    # As bytes, so that tensors of all dtypes travel in one message.
    flat = [tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors.values()]
    buffer = torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)
    return (dict(pieces), tree, described), buffer


def _unpacked(words: Any, buffer: torch.Tensor) -> HeldState:
    """Return what `_packed` was given."""
    pieces, tree, described = words
    sizes = [torch.Size(shape).numel() * dtype.itemsize for _, shape, dtype in described]
    # A copy begins at an address of its own, which fits every dtype.
    tensors = {
        name: part.clone().view(dtype).view(shape)
        for (name, shape, dtype), part in zip(described, buffer.split(sizes), strict=True)
    }
    return HeldState(pieces, TaskState(**unpack_state(tensors, tree)))


LAST_GOOD = "last_good"
"""Copy of the weights when loss and gradients were last seen to be finite."""
BEST = "best"
"""Copy of the weights of the best evaluation; empty without one."""


def take_snapshot(run: TaskRun, model: Any) -> TaskState:
    """Return what this process has of a task, copied.

    Args:
        run: the task that is copied.
        model: the model with the adapter of the task, or a part of it.
    """
    parameters = model.task_parameters(run.name)
    state = split_state(parameters, run.optimizer)
    if run.last_good is None:
        return state
    last_good = {
        name: part.detach().clone().contiguous()
        for page, copy in zip(model.registry.slab_of(run.name).pages, run.last_good.state().values(), strict=True)
        for name, parameter in parameters.items()
        if (part := page.part(parameter, copy)) is not None
    }
    return replace(state, copies={LAST_GOOD: last_good, BEST: dict(run.best_weights)})


@torch.no_grad()
def put_snapshot(run: TaskRun, model: Any, state: TaskState, *, from_step: int | None = None) -> None:
    """Put a task back to a state of all of it; this process takes what lies here.

    Args:
        run: the task, with its optimizer built, or ended.
        model: the model with the adapter of the task, or a part of it.
        state: the state of the whole task.
        from_step: step from which on the present settings of the optimizer and the schedule hold, not those of the
            state; `None` where they are the same.

    Raises:
        CheckpointError: if it is not of this task's parameters.
    """
    parameters = model.task_parameters(run.name)
    # By this process's own pieces, so the layout that wrote the state does not matter.
    own = take_part(state, model.registry.pieces_of(run.name))
    join_state(own, parameters, run.optimizer, from_step)
    if run.last_good is None:
        return
    # An ended task has none but the weights that it ended with.
    last_good = own.copies.get(LAST_GOOD) or own.weights
    for page, copy in zip(model.registry.slab_of(run.name).pages, run.last_good.state().values(), strict=True):
        for name, parameter in parameters.items():
            part = page.part(parameter, copy)
            if part is not None and name in last_good:
                # Into the present copy, which the optimizer's joint update refers to by address.
                part.copy_(last_good[name])
    run.best_weights = {name: tensor.contiguous() for name, tensor in own.copies.get(BEST, {}).items()}
