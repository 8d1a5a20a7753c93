"""States of whole tasks from the parts that several processes hold.

With several processes, those of the first replica hold each parameter at least once; optimizers that are sharded keep
the state of a task on one process. `gather_state` sends the parts to rank 0, which joins them (`join_parts`). On
resuming, each process takes its own pieces of the whole (`checkpoint.task_state.take_part`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from peft_mux.checkpoint.task_state import Moments, TaskState, take_snapshot
from peft_mux.engine.processes import Processes
from peft_mux.engine.tasks.active_task import ActiveTask
from peft_mux.errors import CheckpointError
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.modeling.pieces import Piece
from peft_mux.modeling.slabs import PAGE_KINDS
from peft_mux.scheduler.parallel_layout import ParallelLayout
from peft_mux.storage import pack_state, unpack_state


def gather_state(
    processes: Processes,
    layout: ParallelLayout,
    model: MultiTaskPeftModel,
    task: ActiveTask,
    *,
    only_weights: bool = False,
) -> TaskState | None:
    """Return the whole state of a task on rank 0, and `None` on other ranks; all processes call this.

    Args:
        processes: the processes of the run, connected.
        layout: which process holds which part of which replica. With data parallelism optimizers are sharded, and the
            task's keeper has its state.
        model: the model of this process.
        task: the task.
        only_weights: leave out everything but the weights.

    Raises:
        ProcessError: if another process fails, dies, or does not answer within the time limit.
        CheckpointError: if the parts are not a whole.
    """
    if not layout.is_data_parallel:
        # Replicas hold equal adapters after every step, so the first one is enough.
        if layout.place(processes.rank).replica > 0:
            return None
        state = take_snapshot(task, model, only_weights=only_weights)
        return gather_parts(processes, layout, model.registry.pieces_of(task.name), state)
    keeper = 0 if only_weights or task.optimizer is None else task.optimizer.keeper
    if processes.rank == keeper:
        state = take_snapshot(task, model, only_weights=only_weights)
        if keeper == 0:
            return state
        processes.send(*_packed({}, state), target=0)
    return _unpacked(*processes.receive(keeper))[1] if processes.rank == 0 else None


def gather_parts(
    processes: Processes, layout: ParallelLayout, pieces: Mapping[str, Piece], state: TaskState
) -> TaskState | None:
    """Return the whole state of a task from the parts of the first replica on rank 0, and `None` on other ranks.

    Every process of the first replica calls this; on others it does nothing.

    Args:
        processes: the processes of the run, connected.
        layout: which process holds which part of which replica.
        pieces: which part of each parameter this process holds, from `TaskRegistry.pieces_of`.
        state: of these parts, from `take_snapshot` or `split_state`.

    Raises:
        ProcessError: if another process fails, dies, or does not answer within the time limit.
        CheckpointError: if the parts are not a whole.
    """
    ranks = [rank for rank in range(layout.world_size) if layout.place(rank).replica == 0]
    if processes.rank not in ranks:
        return None
    if processes.rank != 0:
        processes.send(*_packed(pieces, state), target=0)
        return None
    return join_parts([(pieces, state), *(_unpacked(*processes.receive(rank)) for rank in ranks[1:])])


def join_parts(parts: Sequence[tuple[Mapping[str, Piece], TaskState]]) -> TaskState:
    """Return the whole state of a task from the parts of the processes of one replica.

    Args:
        parts: for each process its pieces by parameter, and the state of these pieces. Pieces may overlap.

    Raises:
        CheckpointError: if no part has some elements of a parameter, or an optimizer keeps state for a cut parameter
            that cannot be cut with it.
    """
    whole = merge_states(state for _, state in parts)
    holders: dict[str, list[tuple[Piece, TaskState]]] = {}
    for pieces, state in parts:
        for name, piece in pieces.items():
            holders.setdefault(name, []).append((piece, state))
    for name, held in holders.items():
        # All processes that hold a parameter whole hold the same, and `whole` has it from one of them.
        if all(piece.is_whole for piece, _ in held):
            continue
        dim, last = held[0][0].dim, 0
        size = held[0][0].shape[dim]
        # Sorted, because the ranges of fused projections interleave between ranks.
        for start, end in sorted(edge for piece, _ in held for edge in piece.ranges):
            if start > last:
                break
            last = max(last, end)
        if last < size:
            raise CheckpointError(
                f"{name}: the processes of one replica must have all of it, got nothing of index {last} along "
                f"dimension {dim}, of {size}. Load the same model and adapter in each."
            )
        whole.weights[name] = _assembled([(piece, state.weights[name]) for piece, state in held])
        for copy, tensors in whole.copies.items():
            if name in tensors:
                tensors[name] = _assembled([(piece, state.copies[copy][name]) for piece, state in held])
        if name in whole.moments:
            whole.moments[name] = _assembled_moments(name, [(piece, state.moments[name]) for piece, state in held])
    return whole


def merge_states(parts: Iterable[TaskState]) -> TaskState:
    """Return the state of a whole task from parts that hold different parameters; their settings are equal."""
    whole = TaskState({}, {}, {}, {})
    for part in parts:
        whole.weights.update(part.weights)
        whole.moments.update(part.moments)
        whole.settings.update(part.settings)
        for key, value in part.schedule.items():
            is_by_kind = isinstance(value, dict) and set(value) <= set(PAGE_KINDS)
            whole.schedule[key] = {**whole.schedule.get(key, {}), **value} if is_by_kind else value
        for copy, tensors in part.copies.items():
            whole.copies.setdefault(copy, {}).update(tensors)
    return whole


def _assembled(parts: Sequence[tuple[Piece, torch.Tensor]]) -> torch.Tensor:
    """Return a tensor made of its parts, on the CPU."""
    piece, first = parts[0]
    whole = torch.zeros(piece.shape, dtype=first.dtype)
    for piece, part in parts:
        piece.put(whole, part.cpu())
    return whole


def _assembled_moments(name: str, parts: Sequence[tuple[Piece, Moments]]) -> Moments:
    """Return an optimizer's state of a parameter, joined from the states of its parts."""
    joined: Moments = {}
    piece, moments_of_first = parts[0]
    for key, first in moments_of_first.items():
        # Step counters are the same in all parts, which step together.
        if not isinstance(first, torch.Tensor) or first.dim() == 0:
            joined[key] = first
        elif tuple(first.shape) == piece.part_shape:
            joined[key] = _assembled([(piece, moments[key]) for piece, moments in parts])
        else:
            raise CheckpointError(
                f"{name}, {key}: a divided parameter needs an optimizer that treats all elements equally, got shape "
                f"{list(first.shape)} for a part of shape {list(piece.part_shape)}. Set optim to adamw_torch, or "
                "tensor_parallel_size to 1."
            )
    return joined


def _packed(pieces: Mapping[str, Piece], state: TaskState) -> tuple[Any, torch.Tensor]:
    """Return a part as a description and one buffer with the bytes of all its tensors, of whatever dtypes."""
    fields = {name: getattr(state, name) for name in ("weights", "moments", "settings", "schedule", "copies")}
    tensors, tree = pack_state(fields)
    described = [(name, tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()]
    flat = [tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors.values()]
    buffer = torch.cat(flat) if flat else torch.empty(0, dtype=torch.uint8)
    return (dict(pieces), tree, described), buffer


def _unpacked(words: Any, buffer: torch.Tensor) -> tuple[Mapping[str, Piece], TaskState]:
    """Return what `_packed` was given."""
    pieces, tree, described = words
    sizes = [torch.Size(shape).numel() * dtype.itemsize for _, shape, dtype in described]
    # Cloned, because a view of another dtype needs an aligned address.
    tensors = {
        name: part.clone().view(dtype).view(shape)
        for (name, shape, dtype), part in zip(described, buffer.split(sizes), strict=True)
    }
    return pieces, TaskState(**unpack_state(tensors, tree))
