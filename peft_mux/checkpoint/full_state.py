"""Whole tasks out of the parts that processes hold, and the other way round: what checkpoints and resuming need.

A checkpoint knows nothing of layouts: it holds every parameter whole, as plain PEFT does. The processes of the first
replica hold each parameter at least once, so they hand their parts to rank 0, each in one message of words and one of
numbers. Whoever resumes takes of the whole what its own pieces are, in whatever layout.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from peft_mux.checkpoint.task_state import Moments, TaskState, merge_states
from peft_mux.engine.processes.processes import Processes
from peft_mux.engine.replicas.layout import ParallelLayout
from peft_mux.errors import CheckpointError
from peft_mux.modeling.sharding.pieces import Piece
from peft_mux.storage import pack_state, unpack_state


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
        whole.weights[name] = _joined(name, [(piece, state.weights.get(name)) for piece, state in held])
        for copy, own in whole.copies.items():
            if name in own:
                own[name] = _joined(name, [(piece, state.copies.get(copy, {}).get(name)) for piece, state in held])
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


def _joined(name: str, parts: Iterable[tuple[Piece, torch.Tensor | None]]) -> torch.Tensor:
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
            joined[key] = _joined(f"{name}, {key}", [(piece, moments.get(key)) for piece, moments in parts])
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
