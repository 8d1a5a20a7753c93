"""`MuxBatch`: the flat token stream that one multiplexed forward pass reads, and what it is made of.

Shape letters: T tokens of the stream, S sequences, N tasks.

A stream of two tasks, `a` with sequences of 3 and 2 tokens and `b` with one of 4 (T=9, S=3, N=2)::

    input_ids     a0 a0 a0 a1 a1 | b0 b0 b0 b0
    position_ids   0  1  2  0  1 |  0  1  2  3      restart at each sequence
    labels        a0 a0  x a1  x | b0 b0 b0  x      the token that a position predicts; x = -100
    token_places   0  1  2  3  4 |  0  1  2  3      place within the task's global batch
    cu_seqlens     0 3 5 9        task_offsets 0 5 9        sequence_offsets 0 2 3
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import torch

from peft_mux.data.parts import SequencePart

IGNORE_INDEX = -100
"""Label of a position that carries no loss, as in torch and transformers."""


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """One tokenised row.

    Attributes:
        input_ids: int64 `[L]`.
        labels: int64 `[L]`, not shifted; `IGNORE_INDEX` where no loss is taken.
        row: index of the row in its dataset.
        class_label: class (int) or value (float) for sequence classification, else `None`.
        token_type_ids: int64 `[L]`, or `None` for zeros.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    row: int
    class_label: int | float | None = None
    token_type_ids: np.ndarray | None = None

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.input_ids)

    @property
    def num_targets(self) -> int:
        """Number of loss terms: predicted tokens, or 1 for a classified sequence."""
        if self.class_label is not None:
            return 1
        return int(np.count_nonzero(self.labels[1:] != IGNORE_INDEX))


@dataclass(frozen=True, slots=True)
class TaskBatch:
    """One global batch of one task: the sequences of one of its optimizer steps.

    Attributes:
        task: name of the task.
        step: index of the optimizer step of this task, from 0.
        seed: the task's seed; with `step` and a token's place it fixes every dropout draw.
        sequences: the rows, in the task's own data order.
    """

    task: str
    step: int
    seed: int
    sequences: tuple[TokenSequence, ...]

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all sequences."""
        return sum(len(sequence) for sequence in self.sequences)

    @property
    def num_targets(self) -> int:
        """Number of loss terms of the global batch: the divisor of the task's loss."""
        return sum(sequence.num_targets for sequence in self.sequences)


@dataclass(frozen=True, slots=True)
class MuxBatch:
    """Packed tokens of several tasks, sorted by task; batch dimension 1.

    Host-side tuples repeat what the tensors say, so that no code has to read a device tensor back.
    What predicts something is listed here, where the labels are at hand: finding it on a device would wait for it.

    Attributes:
        input_ids: int64 `[1, T]`.
        position_ids: int64 `[1, T]`, restarting at each sequence; a later part of one goes on counting.
        labels: int64 `[1, T]`, already shifted: what position t predicts, never across sequences, but across parts.
        target_rows: int64 `[M]`, the positions that predict something.
        target_offsets: of the tasks among them, `N + 1` numbers.
        token_places: int64 `[T]`, place of the token within its task's global batch.
        cu_seqlens: int32 `[S + 1]`, cumulative sequence lengths.
        task_offsets: token offsets of the tasks, `N + 1` numbers.
        sequence_offsets: sequence offsets of the tasks, `N + 1` numbers.
        sequence_lengths: lengths of the S sequences.
        task_names: the N tasks, in stream order.
        task_seeds: seed of each task.
        task_steps: optimizer step of each task.
        loss_weights: 1 / number of loss terms in the *global* batch of each task, so that the sum of a
            task's weighted losses over all its micro-batches is its mean loss (promise 1 of the design).
        num_padding_tokens: tokens that belong to no row (only where equal chunks were asked for).
        class_labels: `[S]` int64 or float32 for sequence classification, else `None`.
        token_type_ids: int64 `[1, T]` or `None`.
        parts: for each of the S sequences, which tokens of a row it is; empty where all are whole.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    labels: torch.Tensor
    target_rows: torch.Tensor
    target_offsets: tuple[int, ...]
    token_places: torch.Tensor
    cu_seqlens: torch.Tensor
    task_offsets: tuple[int, ...]
    sequence_offsets: tuple[int, ...]
    sequence_lengths: tuple[int, ...]
    task_names: tuple[str, ...]
    task_seeds: tuple[int, ...]
    task_steps: tuple[int, ...]
    loss_weights: tuple[float, ...]
    num_padding_tokens: int = 0
    class_labels: torch.Tensor | None = None
    token_type_ids: torch.Tensor | None = None
    parts: tuple[SequencePart, ...] = ()

    @property
    def has_more(self) -> bool:
        """Whether a sequence goes on in the next micro-batch."""
        return any(part.has_more for part in self.parts)

    @property
    def num_tokens(self) -> int:
        """Number of tokens T of the stream, padding included."""
        return self.task_offsets[-1]

    @property
    def num_sequences(self) -> int:
        """Number of sequences S."""
        return len(self.sequence_lengths)

    def to(self, device: torch.device | str) -> MuxBatch:
        """Return the batch with its tensors on `device`; to a GPU through pinned memory, without waiting."""
        is_gpu = torch.device(device).type == "cuda"
        moved = {
            field.name: (value.pin_memory() if is_gpu and not value.is_cuda else value).to(device, non_blocking=True)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), torch.Tensor)
        }
        return replace(self, **moved)
