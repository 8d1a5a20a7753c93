"""What losses read of rows beside their tokens: columns of numbers a token, values a row, and totals of the batch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from peft_mux.data.batch import Columns
from peft_mux.data.task_batch import IGNORE_INDEX, TokenSequence


class RowValues:
    """Collects, row by row and task by task, what a micro-batch tells losses of its rows."""

    def __init__(self) -> None:
        """Begin without a row."""
        self._row_sequences: list[int] = []
        self._row_offsets = [0]
        self._columns: list[Columns] = []
        self._values: list[Columns] = []
        self._totals: list[Mapping[str, float]] = []
        self._rows: list[tuple[TokenSequence, int, int]] = []

    def add_row(self, sequence: TokenSequence, start: int, end: int) -> None:
        """Add a row, or the tokens from `start` to `end` of one."""
        self._row_sequences.append(1 + len(sequence.starts))
        self._rows.append((sequence, start, end))

    def end_task(self, totals: Mapping[str, float]) -> None:
        """End the rows of a task; `totals` are the sums over its global batch."""
        rows, self._rows = self._rows, []
        self._row_offsets.append(len(self._row_sequences))
        self._totals.append(totals)
        names = rows[0][0].token_columns if rows else ()
        self._columns.append({name: _column(name, rows) for name in names})
        values = rows[0][0].row_values if rows else ()
        self._values.append({name: _values(name, rows) for name in values})

    def add_padding(self) -> None:
        """Count the padding of the last task as one more row, without targets and values."""
        self._row_sequences.append(1)
        self._row_offsets[-1] += 1

    def fields(self) -> dict[str, Any]:
        """Return these as fields of a `MuxBatch`."""
        return {
            "row_sequences": tuple(self._row_sequences),
            "row_offsets": tuple(self._row_offsets),
            "target_columns": tuple(self._columns),
            "row_values": tuple(self._values),
            "totals": tuple(self._totals),
        }


def _column(name: str, rows: list[tuple[TokenSequence, int, int]]) -> torch.Tensor:
    """Return a column at the targets of some rows, `[M, ...]`, in the order of the stream."""
    parts = []
    for sequence, start, end in rows:
        labels = sequence.labels.copy()
        labels[[first for first, _ in sequence.sequence_bounds]] = IGNORE_INDEX
        # What the positions from `start` to `end` predict: the tokens after them.
        parts.append(
            sequence.token_columns[name][np.flatnonzero(labels[start + 1 : end + 1] != IGNORE_INDEX) + start + 1]
        )
    return torch.from_numpy(np.concatenate(parts))


def _values(name: str, rows: list[tuple[TokenSequence, int, int]]) -> torch.Tensor:
    return torch.from_numpy(np.asarray([sequence.row_values[name] for sequence, _, _ in rows], dtype=np.float32))
