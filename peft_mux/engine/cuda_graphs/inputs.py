"""What a captured pass reads: tensors of a fixed shape that every micro-batch of that shape is written into.

A graph replays launches over the same memory, so sizes may not follow the micro-batch: they are rounded up, and what is
left over is padding that belongs to nobody.

    tokens      a a a b b b b b . . .    the padding is one more sequence, of a segment without an adapter
    cu_seqlens  0 3 8 11 11 11           entries that are not used repeat the end: sequences of no token
    targets     0 1 3 4 5 6 10 10        rows that are not used point at the last token, which is always padding

Shape letters: T tokens, S sequences, M targets, N tasks, all with their padding.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from peft_mux.data.batch import MuxBatch

TOKEN_STEP = 256
"""Tokens are rounded up to a multiple of this."""

_TARGET_STEPS = 8
"""Steps from one power of two to the next in which targets are rounded up: each one costs a row of logits."""

_LEAST_TARGETS = 16

_NOBODY = -1
_ALIGNMENT = 16
_DTYPES = {np.int64: torch.int64, np.int32: torch.int32, np.float32: torch.float32}


class Shape(NamedTuple):
    """Sizes of a captured pass; micro-batches of one shape share a graph.

    Attributes:
        num_tokens: T, number of tokens; at least one of them is padding.
        num_sequences: S, number of sequences; one of them is the padding.
        num_targets: M, number of targets.
        longest: number of tokens that no sequence exceeds, the padding included.
        has_token_types: whether the tokens have types.
    """

    num_tokens: int
    num_sequences: int
    num_targets: int
    longest: int
    has_token_types: bool

    @classmethod
    def of(cls, batch: MuxBatch) -> Shape:
        """Return the shape that a micro-batch is padded to."""
        # One more than there are: unused targets point at the last token, which must belong to nobody.
        num_tokens = _round_up(batch.num_tokens + 1, TOKEN_STEP)
        return cls(
            num_tokens=num_tokens,
            num_sequences=_power_of_two(batch.num_sequences + 1),
            num_targets=_round_up_finely(batch.target_offsets[-1]),
            # The padding is one more sequence, of up to `TOKEN_STEP` tokens.
            longest=_power_of_two(max(*batch.sequence_lengths, TOKEN_STEP)),
            has_token_types=batch.token_type_ids is not None,
        )


class StaticInputs:
    """The tensors of one shape for one set of tasks, in one buffer on the device.

    Args:
        shape: sizes that micro-batches are padded to.
        task_names: names of the N tasks, in stream order.
        device: device of the model.

    Attributes:
        shape: sizes that micro-batches are padded to.
        batch: the tensors as a micro-batch. Of what it says on the host, only the number of tokens and the names are
            true, as nothing else stays the same.
        owner_M: int64 `[M]`, index of each target's task.
        weight_M: float32 `[M]`, what each target's loss is multiplied with.
    """

    def __init__(self, shape: Shape, task_names: tuple[str, ...], device: torch.device) -> None:
        """Allocate; nothing is written yet."""
        self.shape = shape
        self._layout = _Layout(shape)
        self._buffer = torch.zeros(self._layout.num_bytes, dtype=torch.uint8, device=device)
        parts = self._layout.tensors(self._buffer)
        self.owner_M, self.weight_M = parts["owners"], parts["weights"]
        self._task_N = torch.arange(len(task_names), device=device)
        nothing = (0,) * len(task_names)
        self.batch = MuxBatch(
            input_ids=parts["input_ids"][None],
            position_ids=parts["position_ids"][None],
            labels=parts["labels"][None],
            target_rows=parts["target_rows"],
            target_offsets=(*nothing, shape.num_targets),
            token_places=parts["token_places"],
            cu_seqlens=parts["cu_seqlens"],
            task_offsets=(*nothing, shape.num_tokens),
            sequence_offsets=(*nothing, shape.num_sequences),
            sequence_lengths=(shape.num_tokens,),
            task_names=task_names,
            task_seeds=nothing,
            task_steps=nothing,
            loss_weights=(0.0,) * len(task_names),
            token_type_ids=parts["token_type_ids"][None] if shape.has_token_types else None,
        )

    def fill(self, batch: MuxBatch) -> None:
        """Write a micro-batch of the same tasks, in one copy to the device that nobody waits for.

        Args:
            batch: a micro-batch whose tensors are on the host.

        Raises:
            ValueError: if the micro-batch has another shape, or other tasks.
        """
        if Shape.of(batch) != self.shape or batch.task_names != self.batch.task_names:
            raise ValueError(
                f"{Shape.of(batch)} of tasks {', '.join(batch.task_names)}; allowed: {self.shape} of tasks "
                f"{', '.join(self.batch.task_names)}."
            )
        # One buffer and one copy: a copy for each tensor would cost as many launches, which graphs are there to save.
        host = np.zeros(self._layout.num_bytes, dtype=np.uint8)
        _write(batch, self._layout.arrays(host))
        source = torch.from_numpy(host)
        # Pinned anew every time: the memory is handed back once the copy is done, which may be after the next step.
        if self._buffer.is_cuda:
            source = source.pin_memory()
        self._buffer.copy_(source, non_blocking=True)

    def per_task(self, terms_M: torch.Tensor) -> torch.Tensor:
        """Return `[N]`, the weighted sum of each task's own losses.

        Others' losses are left out, not multiplied by 0, which would hand on a NaN.

        Args:
            terms_M: `[M]` loss of each target.
        """
        own_NM = self.owner_M == self._task_N[:, None]
        return torch.where(own_NM, terms_M * self.weight_M, 0.0).sum(dim=1)


class _Slot(NamedTuple):
    begin: int
    end: int
    dtype: type[np.generic]


class _Layout:
    """Where each tensor lies in the buffer."""

    def __init__(self, shape: Shape) -> None:
        by_token = ["input_ids", "position_ids", "labels", "token_places"]
        by_token += ["token_type_ids"] if shape.has_token_types else []
        sizes: list[tuple[str, int, type[np.generic]]] = [(name, shape.num_tokens, np.int64) for name in by_token]
        sizes += [("target_rows", shape.num_targets, np.int64), ("owners", shape.num_targets, np.int64)]
        sizes += [("weights", shape.num_targets, np.float32), ("cu_seqlens", shape.num_sequences + 1, np.int32)]
        self._slots: dict[str, _Slot] = {}
        self.num_bytes = 0
        for name, count, dtype in sizes:
            end = self.num_bytes + count * np.dtype(dtype).itemsize
            self._slots[name] = _Slot(self.num_bytes, end, dtype)
            # A view of another dtype has to begin at a multiple of its own size.
            self.num_bytes = _round_up(end, _ALIGNMENT)

    def tensors(self, buffer: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the parts of the buffer on the device."""
        return {name: buffer[slot.begin : slot.end].view(_DTYPES[slot.dtype]) for name, slot in self._slots.items()}

    def arrays(self, buffer: np.ndarray) -> dict[str, np.ndarray]:
        """Return the parts of a buffer on the host."""
        return {name: buffer[slot.begin : slot.end].view(slot.dtype) for name, slot in self._slots.items()}


def _write(batch: MuxBatch, parts: dict[str, np.ndarray]) -> None:
    """Write a micro-batch and its padding over zeros.

    All padding tokens have id, place and position 0, which every model knows, and label 0, which every head has.
    """
    for name in ("input_ids", "position_ids", "labels", "token_places", "token_type_ids"):
        values = getattr(batch, name)
        if values is not None:
            parts[name][: batch.num_tokens] = values.reshape(-1).numpy()
    num_targets = batch.target_offsets[-1]
    counts = np.diff(batch.target_offsets)
    parts["target_rows"][:] = len(parts["input_ids"]) - 1
    parts["target_rows"][:num_targets] = batch.target_rows.numpy()
    parts["owners"][:] = _NOBODY
    parts["owners"][:num_targets] = np.repeat(np.arange(len(counts)), counts)
    parts["weights"][:num_targets] = np.repeat(np.asarray(batch.loss_weights, dtype=np.float32), counts)
    parts["cu_seqlens"][:] = len(parts["input_ids"])
    parts["cu_seqlens"][: batch.num_sequences + 1] = batch.cu_seqlens.numpy()


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()


def _round_up_finely(value: int) -> int:
    """Round up so that little is padding and yet few sizes occur."""
    value = max(value, 1)
    return _round_up(value, max(_power_of_two(value) // 2 // _TARGET_STEPS, _LEAST_TARGETS))
