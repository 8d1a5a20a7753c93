"""Single cells of a row, read and checked: a text, a list of integers, token ids, an attention mask."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from peft_mux.data.formats import MEDIA_COLUMNS
from peft_mux.errors import DataError


class RowCells:
    """Reads the cells of one dataset's rows, and refuses those that cannot be trained on by row and column.

    Args:
        where: the dataset, for messages, such as `tasks.sql.train_dataset`.
        vocab_size: token ids must be below it; `None` for no check.
    """

    def __init__(self, where: str, vocab_size: int | None) -> None:
        """Keep the dataset's name and the size of the vocabulary."""
        self.where = where
        self.vocab_size = vocab_size

    def error(self, index: int, column: str, got: str, allowed: str) -> DataError:
        """Return the error for one cell."""
        return DataError(f"{self.where} row {index} column {column}: got {got}; allowed: {allowed}.")

    def text(self, row: Mapping[str, Any], column: str, index: int) -> str:
        """Return a cell that must be a string of valid Unicode without NUL.

        Raises:
            DataError: if it is anything else.
        """
        value = row[column]
        if not isinstance(value, str):
            # The usual way to numbers: CSV has no types, and digits are taken for them.
            fix = f'. Of a CSV file: load_rows(...).cast_column("{column}", Value("string"))'
            allowed = f"a string{fix if isinstance(value, (int, float)) else ''}"
            raise self.error(index, column, f"{value!r:.60} ({type(value).__name__})", allowed)
        try:
            # A tokenizer would raise as well, but could not say in which row.
            value.encode("utf-8")
        except UnicodeEncodeError as error:
            raise self.error(index, column, f"a lone surrogate at character {error.start}", "valid Unicode") from error
        if "\0" in value:
            raise self.error(index, column, f"a NUL character at {value.index(chr(0))}", "text without NUL")
        return value

    def integers(self, value: Any, index: int, column: str) -> np.ndarray:
        """Return a cell that must be a flat list of integers as an int64 array.

        Raises:
            DataError: if it is anything else.
        """
        array = None
        if isinstance(value, (list, tuple, np.ndarray)) or hasattr(value, "__array__"):
            with suppress(ValueError):  # numpy's, of lists of unequal lengths
                array = np.asarray(value)
        # Booleans pass, as masks are written with them; an empty list has no kind of its own.
        if array is None or array.ndim != 1 or (array.size and array.dtype.kind not in "iub"):
            raise self.error(index, column, f"{value!r:.60} ({type(value).__name__})", "a list of integers")
        # Beyond int64 they would turn into other numbers, such as the label that is ignored.
        if array.dtype.kind == "u" and array.size and int(array.max()) > np.iinfo(np.int64).max:
            raise self.error(index, column, str(array.max()), "integers of 64 bits")
        return array.astype(np.int64)

    def refuse_media(self, row: Mapping[str, Any], index: int) -> None:
        """Refuse a row with images, videos or sounds, which a run would pass over without a word.

        Raises:
            DataError: naming the first column that holds some; empty ones, as mixed datasets have them, are let be.
        """
        for column in MEDIA_COLUMNS:
            value = row.get(column)
            if value is not None and not (isinstance(value, (list, tuple, str)) and not value):
                allowed = "None or nothing, as only text is trained on: no images, videos or sounds, on any backbone"
                raise self.error(index, column, type(value).__name__, allowed)

    def attended(self, row: Mapping[str, Any], index: int, length: int) -> np.ndarray:
        """Return which positions are no padding, as a boolean array; all of them without an `attention_mask`.

        Raises:
            DataError: if the mask is of another length than `length` or has a hole in the middle.
        """
        if row.get("attention_mask") is None:
            return np.ones(length, dtype=bool)
        mask = self.integers(row["attention_mask"], index, "attention_mask") != 0
        if len(mask) != length:
            raise self.error(index, "attention_mask", f"{len(mask)} entries", f"{length}, one for each of input_ids")
        places = np.flatnonzero(mask)
        # Padding is cut off; a hole would bring tokens together that were apart, under other positions.
        if len(places) and places[-1] - places[0] + 1 != len(places):
            raise self.error(index, "attention_mask", "a hole in the middle", "zeros at the ends only (padding)")
        return mask

    def checked_ids(self, ids: np.ndarray, index: int, column: str, *, empty_allowed: bool = False) -> np.ndarray:
        """Return token ids as they are.

        Raises:
            DataError: if there are none (unless `empty_allowed`), or if one lies outside the vocabulary.
        """
        if len(ids) == 0:
            if empty_allowed:
                return ids
            raise self.error(index, column, "no tokens", "at least one token")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or (self.vocab_size is not None and high >= self.vocab_size):
            limit = "" if self.vocab_size is None else f" to {self.vocab_size - 1}, the backbone's vocabulary"
            raise self.error(index, column, f"token id {low if low < 0 else high}", f"ids from 0{limit}")
        return ids
