"""Which of the row formats a dataset has; the columns and their meaning are TRL's."""

# MERGED: Single cells of a row, read and checked: a text, a list of integers, token ids, an attention mask.

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from peft_mux.errors import DataError, StrEnum, closest


class DataFormat(StrEnum):
    """Row formats, in the order in which they are preferred where several could be meant."""

    TOKENIZED = "tokenized"
    MESSAGES = "messages"
    PROMPT_COMPLETION = "prompt_completion"
    TEXT = "text"
    WORDS = "words"
    TOKENIZED_PREFERENCE = "tokenized_preference"
    PREFERENCE = "preference"
    TOKENIZED_UNPAIRED = "tokenized_unpaired_preference"
    UNPAIRED_PREFERENCE = "unpaired_preference"


_REQUIRED: dict[DataFormat, tuple[str, ...]] = {
    DataFormat.TOKENIZED: ("input_ids",),
    DataFormat.PROMPT_COMPLETION: ("prompt", "completion"),
    DataFormat.MESSAGES: ("messages",),
    DataFormat.TEXT: ("text",),
    DataFormat.WORDS: ("tokens",),
    DataFormat.TOKENIZED_PREFERENCE: ("chosen_ids", "rejected_ids"),
    DataFormat.PREFERENCE: ("chosen", "rejected"),
    DataFormat.TOKENIZED_UNPAIRED: ("prompt_ids", "completion_ids", "label"),
    DataFormat.UNPAIRED_PREFERENCE: ("prompt", "completion", "label"),
}
TOKENIZED_FORMATS = (DataFormat.TOKENIZED, DataFormat.TOKENIZED_PREFERENCE, DataFormat.TOKENIZED_UNPAIRED)
"""Formats of rows that need no tokenizer."""
ANSWER_FORMATS = (
    DataFormat.TOKENIZED_PREFERENCE,
    DataFormat.PREFERENCE,
    DataFormat.TOKENIZED_UNPAIRED,
    DataFormat.UNPAIRED_PREFERENCE,
)
"""Formats of rows that compare answers, which say by themselves where the loss is."""
LABEL_COLUMNS = ("label", "labels")
MEDIA_COLUMNS = ("image", "images", "video", "videos", "audio", "audios", "pixel_values")
"""Columns that TRL trains vision and audio models on; rows that have something in them are refused."""


@dataclass(frozen=True, slots=True)
class TokenColumn:
    """What a column with a number for each token may hold.

    Attributes:
        is_required: whether every row has to have it; otherwise every row of a dataset has it, or none.
        is_ids: whether it holds token ids; otherwise finite numbers.
        is_wide: whether there are several numbers a token, `[L, K]`; otherwise one, `[L]`.
        may_be_row: whether one number may stand for all tokens of the row.
        is_non_negative: whether its numbers may not be below 0.
        is_logprob: whether its numbers are logarithms of probabilities, so not above 0.
        beside: another column that it comes with, of the same shape; "" for none.
        not_beside: another column that it excludes; "" for none.
    """

    is_required: bool = False
    is_ids: bool = False
    is_wide: bool = False
    may_be_row: bool = False
    is_non_negative: bool = False
    is_logprob: bool = False
    beside: str = ""
    not_beside: str = ""


@dataclass(frozen=True, slots=True)
class RowForm:
    """What a loss reads of a row, as far as the data needs to know; each of `modeling.objectives` names one.

    Attributes:
        formats: the formats that rows may have, in the order in which they are looked for.
        needs_label: whether each row carries a class or a value in the column `label`.
        is_one_term: whether the loss has one term for each sequence rather than for each of its target tokens; such
            sequences are never split among passes.
        has_token_labels: whether each row carries classes of its tokens.
        token_columns: columns of tokenised rows with a number for each token, by name.
        reader: makes what reads the rows, where they are neither text to go on with nor text with a label; see
            `peft_mux.data.rows`.
        view: returns a dataset of which each row makes one sequence, given a dataset and its name for messages; `None`
            where every row does.
        num_labels: number of outputs that a head for these rows has; `None` where rows or task tell it.
        arrange: returns the rows of a global batch as the loss reads them, given those of the dataset and the number of
            tokens to which they are limited; `None` where they are the same.
        marks: columns by which a task without `objective` is known to want the loss of these rows; none for none.
    """

    formats: tuple[DataFormat, ...]
    needs_label: bool = False
    is_one_term: bool = False
    has_token_labels: bool = False
    token_columns: Mapping[str, TokenColumn] = field(default_factory=dict, hash=False)
    reader: Callable[[Any], Any] | None = None
    marks: tuple[str, ...] = ()
    view: Callable[[Any, str], Any] | None = None
    num_labels: int | None = None
    arrange: Callable[[tuple[Any, ...], int], tuple[Any, ...]] | None = None


FOREIGN_FORMATS: Mapping[str, tuple[str, ...]] = {
    "alpaca": ("instruction", "output"),
    "sharegpt": ("conversations",),
}
"""Columns by which rows of other projects are known, by the name that `row_format` gives them."""

TARGET_COLUMNS = {
    "weights": TokenColumn(is_non_negative=True, not_beside="target_ids"),
    "target_ids": TokenColumn(is_ids=True, is_wide=True, beside="target_weights"),
    "target_weights": TokenColumn(is_non_negative=True, is_wide=True, beside="target_ids"),
}
"""What tokenised rows may say of their targets: how much each counts, or several weighted targets for each token."""

_LANGUAGE = (DataFormat.TOKENIZED, DataFormat.PROMPT_COMPLETION, DataFormat.MESSAGES, DataFormat.TEXT)

LANGUAGE_ROWS = RowForm(_LANGUAGE, token_columns=TARGET_COLUMNS)
"""Text to learn to go on with."""
LABELLED_ROWS = RowForm((DataFormat.TOKENIZED, DataFormat.TEXT), needs_label=True, is_one_term=True)
"""Text with a class or a value."""


def required_columns(data_format: DataFormat) -> tuple[str, ...]:
    """Return the columns that every row of a format has."""
    return _REQUIRED[data_format]


def detect_format(columns: Iterable[str], *, where: str, row_form: RowForm) -> DataFormat:
    """Return the format that a dataset's columns tell.

    Args:
        columns: names of the dataset's columns.
        where: the dataset, for messages: `tasks.sql.train_dataset`.
        row_form: the form of rows that the task's loss reads.

    Raises:
        DataError: if the columns are of no format, or the label is missing.
    """
    present = list(columns)
    # In this order: rows that have tokens and text are taken as tokens.
    for data_format in row_form.formats:
        if all(column in present for column in _REQUIRED[data_format]):
            if row_form.needs_label and not any(column in present for column in LABEL_COLUMNS):
                raise DataError(
                    f'{where}: got columns {_listed(present)}; allowed: a column "label" beside '
                    f'"{_REQUIRED[data_format][0]}", for sequence classification.'
                )
            return data_format
    options = "; ".join(" + ".join(_REQUIRED[data_format]) for data_format in row_form.formats)
    raise DataError(f"{where}: got columns {_listed(present)}; allowed: {options}. {_hint(present, row_form)}")


def _hint(present: list[str], row_form: RowForm) -> str:
    """Return what to do about columns that are of no format: what they are elsewhere, or a slip in one of them."""
    for name, columns in FOREIGN_FORMATS.items():
        if all(column in present for column in columns):
            return f'These are {name} rows: set row_format="{name}" on the task.'
    if all(column in present for column in ("chosen", "rejected")):
        return 'Rows that compare answers are for other losses: set objective="dpo", "orpo" or "reward" on the task.'
    known = [column for data_format in row_form.formats for column in _REQUIRED[data_format]]
    others = [str(column) for column in present if column not in known]
    # A slip in a name, not a word that begins alike: `input` is no `input_ids`.
    slips = [column for column in others if difflib.get_close_matches(column, known, n=1, cutoff=0.75)]
    if slips:
        return closest(slips[0], known)
    for data_format in row_form.formats:
        needed = _REQUIRED[data_format]
        missing = [column for column in needed if column not in present]
        if len(missing) == 1 < len(needed) and others:
            given = ", ".join(f'"{column}": "{others[0] if column in missing else column}"' for column in needed)
            return f"{missing[0]} is missing: set row_format={{{given}}} on the task if {others[0]} has it."
    return 'Say which is which: row_format={"prompt": "question", "completion": "answer"}, say.'


def _listed(columns: list[str]) -> str:
    return ", ".join(map(str, columns)) or "none"


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
