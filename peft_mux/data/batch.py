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

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate

import numpy as np
import torch

from peft_mux.data.parts import SequencePart

IGNORE_INDEX = -100
"""Label of a position that carries no loss, as in torch and transformers."""


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """The tokens of one row.

    Attributes:
        input_ids: int64 `[L]`, the row's L token ids.
        labels: int64 `[L]`, not shifted; `IGNORE_INDEX` where no loss is taken.
        row: index of the row in its dataset.
        class_label: class (int) or value (float) for sequence classification, else `None`.
        token_type_ids: int64 `[L]`, which text of a pair each token is of; `None` for zeros.
        is_one_term: whether the loss has one term for the whole sequence, as every loss with a class label has.
        num_virtual_tokens: how many of the first tokens stand for virtual ones (`peft_mux.data.rows.virtual_tokens`).
    """

    input_ids: np.ndarray
    labels: np.ndarray
    row: int
    class_label: int | float | None = None
    token_type_ids: np.ndarray | None = None
    is_one_term: bool = False
    num_virtual_tokens: int = 0

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.input_ids)

    @property
    def num_targets(self) -> int:
        """Number of loss terms: predicted tokens, or 1 where the loss is of the whole sequence."""
        if not self.can_be_split:
            return 1
        # The first token is predicted by none, as labels are not shifted yet.
        return int(np.count_nonzero(self.labels[1:] != IGNORE_INDEX))

    @property
    def can_be_split(self) -> bool:
        """Whether parts of it may lie in consecutive passes: not where one loss term is of all of its tokens."""
        return self.class_label is None and not self.is_one_term


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
        input_ids: int64 `[1, T]`, the token ids.
        position_ids: int64 `[1, T]`, restarting at each sequence; a later part of one goes on counting.
        labels: int64 `[1, T]`, already shifted: what position t predicts, never across sequences, but across parts.
        target_rows: int64 `[M]`, the positions that predict something.
        target_offsets: where each task's positions begin among the target rows, `N + 1` numbers.
        token_places: int64 `[T]`, place of the token within its task's global batch.
        cu_seqlens: int32 `[S + 1]`, cumulative sequence lengths.
        task_offsets: where each task's tokens begin, `N + 1` numbers.
        sequence_offsets: where each task's sequences begin, `N + 1` numbers.
        sequence_lengths: number of tokens of each of the S sequences.
        task_names: the N tasks, in stream order.
        task_seeds: seed of each of the N tasks.
        task_steps: index of each task's optimizer step, from 0.
        loss_weights: 1 / number of loss terms in the *global* batch of each task, so that the sum of a
            task's weighted losses over all its micro-batches is its mean loss (promise 1 of the design).
        num_padding_tokens: number of tokens that belong to no row (only where equal chunks were asked for).
        class_labels: `[S]` int64 or float32 for sequence classification, else `None`.
        token_type_ids: int64 `[1, T]`, which text of a pair each token is of; `None` for zeros.
        parts: which tokens of a row each of the S sequences is; empty where all are whole.
        virtual_tokens: virtual tokens in front of each sequence, for each of the N tasks; empty where there are none.
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
    virtual_tokens: tuple[int, ...] = ()

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

    def of_tasks(self, indices: Sequence[int]) -> MuxBatch:
        """Return the stream of some of the tasks.

        Args:
            indices: numbers of those tasks within `task_names`, ascending.
        """
        tokens, sequences, targets = (
            [(offsets[index], offsets[index + 1]) for index in indices]
            for offsets in (self.task_offsets, self.sequence_offsets, self.target_offsets)
        )
        task_offsets, sequence_offsets, target_offsets = (_offsets(pairs) for pairs in (tokens, sequences, targets))
        # Rows and bounds are counted within the stream, in which tasks move up to the front.
        moved = [start - new for (start, _), new in zip(tokens, task_offsets, strict=False)]
        lengths = [self.cu_seqlens[start + 1 : end + 1] for start, end in sequences]
        bounds = [part - by for part, by in zip(lengths, moved, strict=True)]
        rows = [self.target_rows[start:end] - by for (start, end), by in zip(targets, moved, strict=True)]
        types, classes = self.token_type_ids, self.class_labels
        return MuxBatch(
            input_ids=_chosen(self.input_ids, tokens, dim=1),
            position_ids=_chosen(self.position_ids, tokens, dim=1),
            labels=_chosen(self.labels, tokens, dim=1),
            target_rows=torch.cat(rows),
            target_offsets=target_offsets,
            token_places=_chosen(self.token_places, tokens),
            cu_seqlens=torch.cat([self.cu_seqlens[:1], *bounds]),
            task_offsets=task_offsets,
            sequence_offsets=sequence_offsets,
            sequence_lengths=tuple(length for start, end in sequences for length in self.sequence_lengths[start:end]),
            task_names=tuple(self.task_names[index] for index in indices),
            task_seeds=tuple(self.task_seeds[index] for index in indices),
            task_steps=tuple(self.task_steps[index] for index in indices),
            loss_weights=tuple(self.loss_weights[index] for index in indices),
            # A total: which part of it belongs to which task is not noted.
            num_padding_tokens=self.num_padding_tokens if len(indices) == len(self.task_names) else 0,
            class_labels=None if classes is None else _chosen(classes, sequences),
            token_type_ids=None if types is None else _chosen(types, tokens, dim=1),
            parts=tuple(part for start, end in sequences for part in self.parts[start:end]),
            virtual_tokens=tuple(self.virtual_tokens[index] for index in indices if self.virtual_tokens),
        )

    def to(self, device: torch.device | str) -> MuxBatch:
        """Return the batch with its tensors on `device`; to a GPU through pinned memory, without waiting."""
        # Copies from pageable memory would make the host wait; torch reuses pinned memory only after the copy.
        is_gpu = torch.device(device).type == "cuda"
        moved = {
            field.name: (value.pin_memory() if is_gpu and not value.is_cuda else value).to(device, non_blocking=True)
            for field in fields(self)
            if isinstance(value := getattr(self, field.name), torch.Tensor)
        }
        return replace(self, **moved)


def _chosen(tensor: torch.Tensor, bounds: Sequence[tuple[int, int]], dim: int = 0) -> torch.Tensor:
    """Return the parts of a tensor between some bounds, one after another."""
    return torch.cat([tensor.narrow(dim, start, end - start) for start, end in bounds], dim=dim)


def _offsets(bounds: Sequence[tuple[int, int]]) -> tuple[int, ...]:
    """Return where parts between some bounds begin and end when they lie one after another, from 0."""
    return (0, *accumulate(end - start for start, end in bounds))
