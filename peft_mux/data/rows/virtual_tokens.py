"""Virtual tokens: what a learnt prompt puts in front of every sequence of its task, as rows of the stream.

A row of 3 tokens with a prompt of 2 (x = -100)::

    input_ids      0  0 | a  b  c        placeholders, whose embeddings the model replaces
    labels         x  x | a  b  c        not shifted yet: the last virtual token predicts the first real one

As rows of their own they count wherever tokens do: in packs, chunks, plans, positions and the places of dropout.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any

import numpy as np

from peft_mux.data.batch import MuxBatch
from peft_mux.data.task_batch import IGNORE_INDEX, TokenSequence

PLACEHOLDER_ID = 0
"""Token id in the place of a virtual token; any that every vocabulary has."""


def with_virtual_tokens(sequence: TokenSequence, labels: Sequence[int]) -> TokenSequence:
    """Return a row with virtual tokens in front of each of its sequences; the row itself where there are none.

    Args:
        sequence: a row of tokens.
        labels: label of each virtual token, as it would be before labels are shifted.
    """
    if not labels:
        return sequence
    count, starts = len(labels), sequence.starts

    def spread(values: np.ndarray, before: Sequence[int] | None = None) -> np.ndarray:
        # Whatever a row says of each of its tokens; of virtual ones there is nothing to say.
        filled = np.full((count, *values.shape[1:]), PLACEHOLDER_ID, dtype=values.dtype)
        if before is not None:
            filled[:] = before
        return np.concatenate([part for own in np.split(values, starts) for part in (filled, own)])

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
    """Return how many rows of each of the S sequences of a stream are of virtual tokens.

    A later part of a long sequence has those of them that earlier parts have left over, most often none.
    """
    if not batch.virtual_tokens:
        return (0,) * batch.num_sequences
    wanted = np.repeat(batch.virtual_tokens, [end - start for start, end in pairwise(batch.sequence_offsets)])
    starts = [part.start for part in batch.parts] or [0] * batch.num_sequences
    counts = np.minimum(np.maximum(wanted - np.asarray(starts), 0), batch.sequence_lengths)
    return tuple(counts.tolist())


def ignored(num_tokens: int) -> tuple[int, ...]:
    """Return the labels of so many virtual tokens that nothing is to predict."""
    return (IGNORE_INDEX,) * num_tokens
