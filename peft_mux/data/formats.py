"""Which of the row formats a dataset has; the columns and their meaning are TRL's."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from peft_mux.compat import StrEnum
from peft_mux.errors import DataError, closest


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
            `peft_mux.data.rows.row_reader`.
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
