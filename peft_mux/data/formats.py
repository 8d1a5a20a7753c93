"""Row formats and their detection, with the columns of TRL, and `RowForm`, the rows that a loss reads."""

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
"""The required columns of each format."""
TOKENIZED_FORMATS = (DataFormat.TOKENIZED, DataFormat.TOKENIZED_PREFERENCE, DataFormat.TOKENIZED_UNPAIRED)
"""Formats that need no tokenizer."""
ANSWER_FORMATS = (
    DataFormat.TOKENIZED_PREFERENCE,
    DataFormat.PREFERENCE,
    DataFormat.TOKENIZED_UNPAIRED,
    DataFormat.UNPAIRED_PREFERENCE,
)
"""Preference formats, which already determine which tokens carry loss."""
LABEL_COLUMNS = ("label", "labels")


@dataclass(frozen=True, slots=True)
class TokenColumn:
    """Allowed values of a column with a number for each token.

    Attributes:
        is_required: whether every row must have it; otherwise either all rows of a dataset have it or none.
        is_ids: whether it holds token ids; otherwise finite numbers.
        is_wide: whether there are several numbers per token, `[L, K]`; otherwise one, `[L]`.
        may_be_row: whether a single number may be given for all tokens of the row.
        is_non_negative: whether its numbers must not be negative.
        is_logprob: whether its numbers are log-probabilities, which must not be positive.
        requires: another column that must be present, with the same shape; "" for none.
        excludes: another column that must be absent; "" for none.
    """

    is_required: bool = False
    is_ids: bool = False
    is_wide: bool = False
    may_be_row: bool = False
    is_non_negative: bool = False
    is_logprob: bool = False
    requires: str = ""
    excludes: str = ""


@dataclass(frozen=True, slots=True)
class RowForm:
    """The kind of rows that a loss reads; each objective in `modeling.objectives` has one.

    Attributes:
        formats: the allowed formats, in order of precedence.
        needs_label: whether each row has a class or a value in the column `label`.
        is_one_term: whether the loss has one term for each sequence rather than for each of its target tokens; such
            sequences are never split across passes.
        has_token_labels: whether each row has classes of its tokens.
        token_columns: columns of tokenised rows with a number for each token, by name.
        read: takes a `RowTokenizer`, a row and its index, and returns its `TokenSequence`, or `None` if it is dropped
            (and counted). `None` for language modeling, which `RowTokenizer` implements itself.
        view: converts the rows of a dataset, given its name for messages, so that each becomes one sequence; `None` if
            this is already the case.
        num_labels: number of outputs of the head; `None` if it follows from the rows or the task.
        arrange: converts the rows of a global batch, given the maximum number of tokens, into the rows that the loss
            reads; `None` if they are the same.
        marks: columns from which this loss is inferred for a task without `objective`; empty for none.
        trained_on: which tokens carry loss, in words, if `read` decides that; "" if the loss is not one of tokens.
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
    trained_on: str = ""


FOREIGN_FORMATS: Mapping[str, tuple[str, ...]] = {
    "alpaca": ("instruction", "output"),
    "sharegpt": ("conversations",),
}
"""Columns that identify rows of other projects, by the name of their `row_format`."""

TARGET_COLUMNS = {
    "weights": TokenColumn(is_non_negative=True, excludes="target_ids"),
    "target_ids": TokenColumn(is_ids=True, is_wide=True, requires="target_weights"),
    "target_weights": TokenColumn(is_non_negative=True, is_wide=True, requires="target_ids"),
}
"""Optional target columns of tokenised rows: a weight per token, or several weighted targets per token."""

LANGUAGE_ROWS = RowForm(
    (DataFormat.TOKENIZED, DataFormat.PROMPT_COMPLETION, DataFormat.MESSAGES, DataFormat.TEXT),
    token_columns=TARGET_COLUMNS,
)
"""Rows for language modeling."""


def detect_format(columns: Iterable[str], *, where: str, row_form: RowForm) -> DataFormat:
    """Return the format of a dataset with some columns.

    Args:
        columns: names of the dataset's columns.
        where: the dataset, for messages: `tasks.sql.train_dataset`.
        row_form: the form of rows that the task's loss reads.

    Raises:
        DataError: if the columns match no format, or if the label is missing.
    """
    present = list(columns)
    listed = ", ".join(map(str, present)) or "none"
    # The order matters: rows with both tokens and text count as tokenised.
    for data_format in row_form.formats:
        needed = REQUIRED_COLUMNS[data_format]
        if all(column in present for column in needed):
            if row_form.needs_label and not any(column in present for column in LABEL_COLUMNS):
                allowed = f'"{needed[0]}" and "label", for sequence classification'
                raise DataError(f"{where} must have {allowed}, got columns {listed}.")
            return data_format
    options = "; ".join(" + ".join(REQUIRED_COLUMNS[data_format]) for data_format in row_form.formats)
    raise DataError(f"{where} must have the columns {options}, got columns {listed}. {_hint(present, row_form)}")


def _hint(present: list[str], row_form: RowForm) -> str:
    """Return advice for columns that match no format: a foreign format, another loss, or a typo in a name."""
    for name, columns in FOREIGN_FORMATS.items():
        if all(column in present for column in columns):
            return f'These are {name} rows: set row_format="{name}" on the task.'
    if all(column in present for column in ("chosen", "rejected")):
        names = '"dpo", "cpo", "orpo" or "reward"'
        return f"Preference rows are for other losses: set objective={names} on the task."
    known = [column for data_format in row_form.formats for column in REQUIRED_COLUMNS[data_format]]
    others = [str(column) for column in present if column not in known]
    # The cutoff accepts typos but not words with the same beginning: `input` is not `input_ids`.
    slips = [column for column in others if difflib.get_close_matches(column, known, n=1, cutoff=0.75)]
    if slips:
        return closest(slips[0], known)
    for data_format in row_form.formats:
        needed = REQUIRED_COLUMNS[data_format]
        missing = [column for column in needed if column not in present]
        if len(missing) == 1 < len(needed) and others:
            given = ", ".join(f'"{column}": "{others[0] if column in missing else column}"' for column in needed)
            return f"{missing[0]} is missing: set row_format={{{given}}} on the task if {others[0]} has it."
    return 'Map your columns, for example row_format={"prompt": "question", "completion": "answer"}.'
