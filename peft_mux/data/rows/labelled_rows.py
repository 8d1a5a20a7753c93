"""Rows of sequence classification and regression to sequences: text, pairs of texts or token ids, and a label."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from peft_mux.data.cells import RowCells
from peft_mux.data.formats import LABEL_COLUMNS
from peft_mux.data.rows.length_limit import LengthLimit
from peft_mux.data.task_batch import TokenSequence

CLASS_LABELS = "class_labels"
"""Row value with a number for each class, of multi-label classification and of regressions on several values."""

_BEYOND_CLASSES, _BEYOND_NUMBERS = 2**31, 2**63
_truncation = threading.Lock()
"""Held while a tokenizer cuts: the limit is a setting of the one tokenizer that the threads of all tasks share."""


class LabelledRows:
    """Turns rows with a class or a value into sequences.

    Args:
        cells: reads the cells of the rows.
        limit: what becomes of rows that are too long.
        tokenizer: a tokenizer of transformers; may be `None` for rows that are tokenised already.
        is_tokenised: whether rows have `input_ids` rather than `text`.
        num_labels: number of classes; 1 for regression, `None` where it is not known.
    """

    def __init__(
        self, cells: RowCells, limit: LengthLimit, tokenizer: Any, *, is_tokenised: bool, num_labels: int | None
    ) -> None:
        """Keep what every row is read with."""
        self.is_tokenised = is_tokenised
        self.num_labels = num_labels
        self._cells = cells
        self._limit = limit
        self._tokenizer = tokenizer
        # Of every row as of the first one; `None` before it, 0 where rows have one class or one value.
        self._num_values: int | None = None

    def sequence(self, row: Mapping[str, Any], index: int) -> TokenSequence | None:
        """Return the sequence of a row with its label, or `None` where the row is left out (and counted).

        Raises:
            DataError: naming the row and the column that cannot be trained on.
        """
        column = next((name for name in LABEL_COLUMNS if row.get(name) is not None), None)
        if column is None:
            raise self._cells.error(index, "label", "no such column, or None", "a class (int) or a value (float)")
        encoded = self._token_ids(row, index) if self.is_tokenised else self._encoded_text(row, index)
        if encoded is None:
            return None
        ids, types = encoded
        ids = self._cells.checked_ids(ids, index, "input_ids")
        # Tokens carry no labels here, so the ids stand in for them.
        kept = self._limit.cut(ids, ids, index)
        if kept is None:
            return None
        # Rows are cut at their end, so the types are cut alike.
        types = None if types is None else types[: len(kept[0])]
        if isinstance(row[column], (list, tuple, np.ndarray)) and np.ndim(row[column]) > 0:
            values = {CLASS_LABELS: self._labels(row[column], index, column)}
            return TokenSequence(kept[0], kept[1], index, 0, types, row_values=values)
        if self._num_values:
            raise self._cells.error(
                index, column, repr(row[column]), f"a list of {self._num_values} numbers, as before"
            )
        self._num_values = 0
        return TokenSequence(kept[0], kept[1], index, self._label(row[column], index, column), types)

    def _labels(self, value: Any, index: int, column: str) -> np.ndarray:
        """Return the labels of a row that has one for each class: 0 to 1, or values of a regression."""
        if self._num_values == 0:
            raise self._cells.error(index, column, f"{value!r:.60}", "one class or one value, as before")
        with suppress(ValueError, TypeError):  # numpy's, of lists within lists and of None
            array = np.asarray(value, dtype=np.float32)
            count = self._num_values or self.num_labels or len(array)
            if array.ndim == 1 and len(array) == count and count > 1 and np.isfinite(array).all():
                self._num_values = count
                return array
        wanted = self._num_values or self.num_labels
        allowed = f"{wanted} finite numbers" if wanted else "finite numbers, at least two"
        raise self._cells.error(index, column, f"{value!r:.60}", f"a list of {allowed}, one for each class")

    def _token_ids(self, row: Mapping[str, Any], index: int) -> tuple[np.ndarray, np.ndarray | None]:
        ids = self._cells.integers(row["input_ids"], index, "input_ids")
        keep = self._cells.attended(row, index, len(ids))
        if row.get("token_type_ids") is None:
            return ids[keep], None
        return ids[keep], self._cells.integers(row["token_type_ids"], index, "token_type_ids")[keep]

    def _encoded_text(self, row: Mapping[str, Any], index: int) -> tuple[np.ndarray, np.ndarray | None] | None:
        pair = self._cells.text(row, "text_pair", index) if row.get("text_pair") is not None else None
        limit = self._limit.num_tokens
        text = self._cells.text(row, "text", index)
        with _truncation:
            # The tokenizer cuts, not we: it shortens the longer text of a pair and keeps the special tokens at the end.
            encoded = self._tokenizer(text, pair, truncation=True, max_length=limit)
            # Encoded once more without a limit, but only where the cut may have taken something.
            is_longer = len(encoded["input_ids"]) == limit and len(self._tokenizer(text, pair)["input_ids"]) > limit
        ids, types = np.asarray(encoded["input_ids"], dtype=np.int64), None
        # Zeros are what `None` stands for: streams without pairs carry no tensor of types.
        if encoded.get("token_type_ids") is not None and any(encoded["token_type_ids"]):
            types = np.asarray(encoded["token_type_ids"], dtype=np.int64)
        if is_longer and self._limit.drops(index, len(ids) + 1):
            return None
        return ids, types

    def _label(self, value: Any, index: int, column: str) -> int | float:
        # Rows in numpy format hold numpy's scalars, whose integers are no `int`.
        if isinstance(value, np.generic):
            value = value.item()
        classes = self.num_labels
        allowed = f"a class from 0 to {classes - 1}" if classes else "a class (int, at least 0) or a value (float)"
        if isinstance(value, float) and value == value and abs(value) != float("inf") and classes in (None, 1):
            return value
        if isinstance(value, int) and not isinstance(value, bool):
            # One class is a regression, where whole numbers are values, too.
            if classes == 1 and abs(value) < _BEYOND_NUMBERS:
                return float(value)
            if classes != 1 and 0 <= value < (classes or _BEYOND_CLASSES):
                return value
        raise self._cells.error(index, column, repr(value), allowed)
