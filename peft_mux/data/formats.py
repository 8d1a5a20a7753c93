"""Which of the row formats a dataset has; the columns and their meaning are TRL's."""

from __future__ import annotations

from collections.abc import Iterable

from peft_mux.compat import StrEnum
from peft_mux.errors import DataError, closest


class DataFormat(StrEnum):
    """Row formats, in the order in which they are preferred where several could be meant."""

    TOKENIZED = "tokenized"
    MESSAGES = "messages"
    PROMPT_COMPLETION = "prompt_completion"
    TEXT = "text"


_REQUIRED: dict[DataFormat, tuple[str, ...]] = {
    DataFormat.TOKENIZED: ("input_ids",),
    DataFormat.PROMPT_COMPLETION: ("prompt", "completion"),
    DataFormat.MESSAGES: ("messages",),
    DataFormat.TEXT: ("text",),
}
_CLASSIFIED = (DataFormat.TOKENIZED, DataFormat.TEXT)
LABEL_COLUMNS = ("label", "labels")


def required_columns(data_format: DataFormat) -> tuple[str, ...]:
    """Return the columns that every row of a format has."""
    return _REQUIRED[data_format]


def detect_format(columns: Iterable[str], *, where: str, is_classification: bool) -> DataFormat:
    """Return the format that a dataset's columns tell.

    Args:
        columns: of the dataset.
        where: the dataset, for messages: `tasks.sql.train_dataset`.
        is_classification: whether each row also needs a `label`.

    Raises:
        DataError: if the columns are of no format, or the label is missing.
    """
    present = list(columns)
    formats = _CLASSIFIED if is_classification else tuple(_REQUIRED)
    for data_format in formats:
        if all(column in present for column in _REQUIRED[data_format]):
            if is_classification and not any(column in present for column in LABEL_COLUMNS):
                raise DataError(
                    f'{where}: got columns {_listed(present)}; allowed: a column "label" beside '
                    f'"{_REQUIRED[data_format][0]}", for sequence classification.'
                )
            return data_format
    options = "; ".join(" + ".join(_REQUIRED[data_format]) for data_format in formats)
    known = [column for data_format in formats for column in _REQUIRED[data_format]]
    hints = [hint for column in present if (hint := closest(str(column), known))]
    raise DataError(
        f"{where}: got columns {_listed(present)}; allowed: {options}. {hints[0] if hints else 'Rename the columns.'}"
    )


def _listed(columns: list[str]) -> str:
    return ", ".join(map(str, columns)) or "none"
