"""`TokenSequence` and `TaskBatch`: the rows of one optimizer step of one task, before they are packed into a stream.

A row may consist of several sequences, such as a chosen and a rejected answer. Datasets, plans and packing treat it as
one row with all its tokens; in a stream its sequences are adjacent, without labels or attention across them.

A learnt prompt puts virtual tokens in front of every sequence of its task. A row of 3 tokens with a prompt of 2
(x = -100)::

    input_ids      0  0 | a  b  c        placeholders, whose embeddings the model replaces
    labels         x  x | a  b  c        not shifted yet: the last virtual token predicts the first real one

Virtual tokens count as tokens everywhere: in packs, chunks, plans, positions and dropout places.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from peft_mux.data.batch import MuxBatch
from peft_mux.data.packing.prefixes import RowTrie, row_trie

IGNORE_INDEX = -100
"""Label of a position that carries no loss, as in torch and transformers."""

_MOST_COMPUTED = 0.95
"""Fraction of computed tokens of a global batch above which prefix sharing does not pay for its gathers."""


@dataclass(frozen=True, slots=True)
class TokenSequence:
    """The tokens of one row.

    Attributes:
        input_ids: int64 `[L]`, the row's L token ids.
        labels: int64 `[L]`, not shifted; `IGNORE_INDEX` for tokens without loss.
        row: index of the row in its dataset.
        class_label: class (int) or value (float) for sequence classification, else `None`.
        token_type_ids: int64 `[L]`, token types of a text pair; `None` for zeros.
        is_one_term: whether the loss has one term for the whole row, as with a class label.
        starts: indices in the row at which its second and further sequences begin; empty for one sequence.
        token_columns: numbers of each token, `[L]` or `[L, K]`, by name. Like labels, they belong to the target token,
            not to the position that predicts it; with `labels_itself` both belong to the position.
        row_values: numbers of the row, by name; `[C]` if a name has several.
        labels_itself: whether a label belongs to its own token (token classification, targets of `Calls`), not to the
            prediction at the previous token.
        num_virtual_tokens: number of virtual tokens at the start of each sequence.
    """

    input_ids: np.ndarray
    labels: np.ndarray
    row: int
    class_label: int | float | None = None
    token_type_ids: np.ndarray | None = None
    is_one_term: bool = False
    starts: tuple[int, ...] = ()
    token_columns: Mapping[str, np.ndarray] = field(default_factory=dict)
    row_values: Mapping[str, float | np.ndarray] = field(default_factory=dict)
    labels_itself: bool = False
    num_virtual_tokens: int = 0

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.input_ids)

    @property
    def num_targets(self) -> int:
        """Number of loss terms: predicted tokens, or 1 if the loss has one term for the whole row."""
        return 1 if self.class_label is not None or self.is_one_term else self.num_target_tokens

    @property
    def num_target_tokens(self) -> int:
        """Number of predicted tokens, even if the loss has one term for the whole row."""
        if self.starts:
            return sum(self.target_token_counts)
        return int(np.count_nonzero(self.labels[0 if self.labels_itself else 1 :] != IGNORE_INDEX))

    @property
    def target_token_counts(self) -> tuple[int, ...]:
        """Number of predicted tokens of each sequence of the row."""
        # The first token of a sequence is not predicted; labels are not shifted yet.
        return tuple(
            int(np.count_nonzero(self.labels[start + 1 : end] != IGNORE_INDEX)) for start, end in self.sequence_bounds
        )

    @property
    def sequence_bounds(self) -> tuple[tuple[int, int], ...]:
        """First token, and one past the last, of each sequence of the row."""
        return tuple(pairwise((0, *self.starts, len(self.input_ids))))

    @property
    def can_be_split(self) -> bool:
        """Whether the row may be split into parts in consecutive passes: not if one loss term needs all its tokens."""
        return self.class_label is None and not (self.is_one_term or self.starts or self.labels_itself)


def joined(sequences: Sequence[TokenSequence]) -> TokenSequence:
    """Return one row that consists of several rows of one sequence each; its other fields are those of the first."""
    first = sequences[0]
    return replace(
        first,
        input_ids=np.concatenate([sequence.input_ids for sequence in sequences]),
        labels=np.concatenate([sequence.labels for sequence in sequences]),
        starts=tuple(accumulate(map(len, sequences[:-1]))),
        token_columns={
            name: np.concatenate([sequence.token_columns[name] for sequence in sequences])
            for name in first.token_columns
        },
    )


Arrange = Callable[[tuple[TokenSequence, ...]], tuple[TokenSequence, ...]]
"""Converts the rows of a global batch for a loss that combines several rows."""


@dataclass(frozen=True, slots=True)
class TaskBatch:
    """One global batch of one task: the sequences of one of its optimizer steps.

    Attributes:
        task: name of the task.
        step: index of the optimizer step of this task, from 0.
        seed: the task's seed; together with `step` and a token's place it determines all dropout masks.
        sequences: the rows, in the task's own data order.
        totals: divisors of losses; see `batch_totals`. By default computed from these rows; an evaluation, which has
            several batches, passes the totals of all of them.
        trie: shared prefixes of the rows, if they are to be computed once; `None` to compute all tokens.
    """

    task: str
    step: int
    seed: int
    sequences: tuple[TokenSequence, ...]
    totals: Mapping[str, float] | None = None
    trie: RowTrie | None = None

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all sequences."""
        return sum(len(sequence) for sequence in self.sequences)

    @property
    def num_targets(self) -> int:
        """Number of loss terms of the global batch: the divisor of the task's loss."""
        return sum(sequence.num_targets for sequence in self.sequences)


def prefix_trie(rows: Sequence[TokenSequence]) -> RowTrie | None:
    """Return the shared prefixes of the rows of a global batch; `None` if sharing them does not pay off."""
    # Equal tokens may have different token types.
    if any(row.token_type_ids is not None for row in rows):
        return None
    trie = row_trie([[row.input_ids[start:end] for start, end in row.sequence_bounds] for row in rows])
    if trie is None or trie.num_computed(range(len(rows))) > _MOST_COMPUTED * sum(map(len, rows)):
        return None
    return trie


def batch_totals(batch: TaskBatch) -> Mapping[str, float]:
    """Return the sums over the rows of a global batch that losses use as divisors.

    Args:
        batch: the rows; if `batch.totals` is set, it is returned.

    Returns:
        `num_rows`; `num_target_tokens`; for rows with several sequences `num_target_tokens/<number>` of each sequence,
        counted from 0; the sum of each token column over the targets, and of each row value, by name.
    """
    if batch.totals is not None:
        return batch.totals
    totals = {"num_rows": float(len(batch.sequences)), "num_target_tokens": 0.0}
    for sequence in batch.sequences:
        totals["num_target_tokens"] += sequence.num_target_tokens
        if not (sequence.starts or sequence.token_columns or sequence.row_values):
            continue
        sums = {name: value for name, value in sequence.row_values.items() if not isinstance(value, np.ndarray)}
        if sequence.starts:
            counts = sequence.target_token_counts
            sums |= {f"num_target_tokens/{number}": count for number, count in enumerate(counts)}
        if sequence.token_columns:
            is_target = sequence.labels != IGNORE_INDEX
            if not sequence.labels_itself:
                is_target[[start for start, _ in sequence.sequence_bounds]] = False
            for name, values in sequence.token_columns.items():
                sums[name] = float(values[is_target].sum(dtype=np.float64))
        for name, value in sums.items():
            totals[name] = totals.get(name, 0.0) + value
    return totals


PLACEHOLDER_ID = 0
"""Token id of virtual tokens; any id that every vocabulary has."""


def with_virtual_tokens(sequence: TokenSequence, labels: Sequence[int]) -> TokenSequence:
    """Return a row with virtual tokens in front of each of its sequences; the row itself if there are none.

    Args:
        sequence: a row of tokens.
        labels: label of each virtual token, not shifted.
    """
    if not labels:
        return sequence
    count, starts = len(labels), sequence.starts

    def spread(values: np.ndarray, before: Sequence[int] | None = None) -> np.ndarray:
        # Columns have no values for virtual tokens; fill in the placeholder.
        filled = np.full((count, *values.shape[1:]), PLACEHOLDER_ID, dtype=values.dtype)
        if before is not None:
            filled[:] = before
        return np.concatenate([part for row in np.split(values, starts) for part in (filled, row)])

    changed: dict[str, Any] = {
        field.name: spread(values)
        for field in fields(sequence)
        if isinstance(values := getattr(sequence, field.name), np.ndarray) and field.name != "labels"
    }
    return replace(
        sequence,
        **changed,
        labels=spread(sequence.labels, labels),
        token_columns={name: spread(values) for name, values in sequence.token_columns.items()},
        starts=tuple(start + count * number for number, start in enumerate(starts, 1)),
        num_virtual_tokens=count,
    )


def virtual_tokens_of_sequences(batch: MuxBatch) -> tuple[int, ...]:
    """Return the number of virtual tokens in each of the S sequences of a stream.

    A later part of a split sequence has those that did not fit into earlier parts, usually none.
    """
    if not batch.virtual_tokens:
        return (0,) * batch.num_sequences
    wanted = np.repeat(batch.virtual_tokens, [end - start for start, end in pairwise(batch.sequence_offsets)])
    starts = [part.start for part in batch.parts] or [0] * batch.num_sequences
    counts = np.minimum(np.maximum(wanted - np.asarray(starts), 0), batch.sequence_lengths)
    return tuple(counts.tolist())
