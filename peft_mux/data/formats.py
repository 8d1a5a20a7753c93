"""Which of the row formats a dataset has, and what a loss reads of a row; columns and their meaning are TRL's."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from peft_mux.errors import DataError, StrEnum, closest


class DataFormat(StrEnum):
    """Row formats."""

    TOKENIZED = "tokenized"
    MESSAGES = "messages"
    PROMPT_COMPLETION = "prompt_completion"
    TEXT = "text"
    WORDS = "words"
    TOKENIZED_PREFERENCE = "tokenized_preference"
    PREFERENCE = "preference"
    TOKENIZED_UNPAIRED = "tokenized_unpaired_preference"
    UNPAIRED_PREFERENCE = "unpaired_preference"


REQUIRED_COLUMNS: Mapping[DataFormat, tuple[str, ...]] = {
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
"""The columns that every row of a format has."""
TOKENIZED_FORMATS = (DataFormat.TOKENIZED, DataFormat.TOKENIZED_PREFERENCE, DataFormat.TOKENIZED_UNPAIRED)
"""Formats of rows that need no tokenizer."""
ANSWER_FORMATS = (
    DataFormat.TOKENIZED_PREFERENCE,
    DataFormat.PREFERENCE,
    DataFormat.TOKENIZED_UNPAIRED,
    DataFormat.UNPAIRED_PREFERENCE,
)
"""Formats of rows that compare answers, which already define where the loss is."""
LABEL_COLUMNS = ("label", "labels")


@dataclass(frozen=True, slots=True)
class TokenColumn:
    """What a column with a number for each token may hold.

    Attributes:
        is_required: whether every row must have it; otherwise all rows of a dataset have it, or none.
        is_ids: whether it holds token ids; otherwise finite numbers.
        is_wide: whether there are several numbers per token, `[L, K]`; otherwise one, `[L]`.
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
        needs_label: whether each row has a class or a value in the column `label`.
        is_one_term: whether the loss has one term for each sequence rather than for each of its target tokens; such
            sequences are never split among passes.
        has_token_labels: whether each row has classes of its tokens.
        token_columns: columns of tokenised rows with a number for each token, by name.
        read: takes a `RowTokenizer`, a row and its index, and returns its `TokenSequence`, or `None` if it is left out
            (and counted); `None` for text to continue, which `RowTokenizer` reads itself.
        view: takes the rows of a dataset and its name for messages, and yields rows of which each makes one sequence;
            `None` if every row does.
        num_labels: number of outputs of a head for these rows; `None` if it follows from the rows or the task.
        arrange: takes the rows of a global batch and the number of tokens to which they are limited, and returns them
            as the loss reads them; `None` if they are the same.
        marks: columns by which a task without `objective` is known to want the loss of these rows; empty for none.
    """

    formats: tuple[DataFormat, ...]
    needs_label: bool = False
    is_one_term: bool = False
    has_token_labels: bool = False
    token_columns: Mapping[str, TokenColumn] = field(default_factory=dict, hash=False)
    read: Callable[[Any, Mapping[str, Any], int], Any] | None = None
    marks: tuple[str, ...] = ()
    view: Callable[[Iterator[Any], str], Iterator[Any]] | None = None
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

LANGUAGE_ROWS = RowForm(
    (DataFormat.TOKENIZED, DataFormat.PROMPT_COMPLETION, DataFormat.MESSAGES, DataFormat.TEXT),
    token_columns=TARGET_COLUMNS,
)
"""Text to learn to continue."""


def detect_format(columns: Iterable[str], *, where: str, row_form: RowForm) -> DataFormat:
    """Return the format of a dataset with some columns.

    Args:
        columns: names of the dataset's columns.
        where: the dataset, for messages: `tasks.sql.train_dataset`.
        row_form: the form of rows that the task's loss reads.

    Raises:
        DataError: if the columns are of no format, or the label is missing.
    """
    present = list(columns)
    listed = ", ".join(map(str, present)) or "none"
    # In this order: rows that have tokens and text are taken as tokens.
    for data_format in row_form.formats:
        needed = REQUIRED_COLUMNS[data_format]
        if all(column in present for column in needed):
            if row_form.needs_label and not any(column in present for column in LABEL_COLUMNS):
                allowed = f'a column "label" beside "{needed[0]}", for sequence classification'
                raise DataError(f"{where}: got columns {listed}; allowed: {allowed}.")
            return data_format
    options = "; ".join(" + ".join(REQUIRED_COLUMNS[data_format]) for data_format in row_form.formats)
    raise DataError(f"{where}: got columns {listed}; allowed: {options}. {_hint(present, row_form)}")


def _hint(present: list[str], row_form: RowForm) -> str:
    """Return what to do about columns of no format: what they are in other projects, or a slip in one of them."""
    for name, columns in FOREIGN_FORMATS.items():
        if all(column in present for column in columns):
            return f'These are {name} rows: set row_format="{name}" on the task.'
    if all(column in present for column in ("chosen", "rejected")):
        names = '"dpo", "cpo", "orpo" or "reward"'
        return f"Rows that compare answers are for other losses: set objective={names} on the task."
    known = [column for data_format in row_form.formats for column in REQUIRED_COLUMNS[data_format]]
    others = [str(column) for column in present if column not in known]
    # A slip in a name, not a word with the same beginning: `input` is no `input_ids`.
    slips = [column for column in others if difflib.get_close_matches(column, known, n=1, cutoff=0.75)]
    if slips:
        return closest(slips[0], known)
    for data_format in row_form.formats:
        needed = REQUIRED_COLUMNS[data_format]
        missing = [column for column in needed if column not in present]
        if len(missing) == 1 < len(needed) and others:
            given = ", ".join(f'"{column}": "{others[0] if column in missing else column}"' for column in needed)
            return f"{missing[0]} is missing: set row_format={{{given}}} on the task if {others[0]} has it."
    return 'Say which is which: row_format={"prompt": "question", "completion": "answer"}, say.'
