"""Prompts with answers to others: what KTO estimates on how far a model has moved from its reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from peft_mux.data.task_batch import IGNORE_INDEX, TokenSequence


def with_mismatched(rows: tuple[TokenSequence, ...], limit: int) -> tuple[TokenSequence, ...]:
    """Return the rows of a global batch, each with a second sequence: its prompt, and the answer of the row before.

    The first row gets the answer of the last, as in TRL's `KTOTrainer`, which rotates the answers of each batch of its
    dataset by one. TRL takes whole answers and cuts them to the limit behind their new prompt; here an answer that was
    cut to the limit behind its own prompt is no longer than that.

    Args:
        rows: rows of one sequence, with labels in the answer alone.
        limit: number of tokens to which sequences are cut.
    """
    answers = [rows[-1], *rows[:-1]]
    return tuple(_with_second(row, answer, limit) for row, answer in zip(rows, answers, strict=True))


def _with_second(row: TokenSequence, other: TokenSequence, limit: int) -> TokenSequence:
    prompt, answer = row.input_ids[: _start(row)], other.input_ids[_start(other) :]
    ids = np.concatenate((prompt, answer))[:limit]
    labels = ids.copy()
    labels[: len(prompt)] = IGNORE_INDEX
    return replace(
        row,
        input_ids=np.concatenate((row.input_ids, ids)),
        labels=np.concatenate((row.labels, labels)),
        starts=(len(row),),
    )


def _start(row: TokenSequence) -> int:
    """Return the place of the first token of the answer."""
    return int(np.argmax(row.labels != IGNORE_INDEX))
