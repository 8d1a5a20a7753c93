"""`RowReader`: how rows of a form of their own become sequences, and what such a reader is made with.

A loss whose rows are neither text nor text with a label names a maker of readers in its `RowForm`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from peft_mux.data.cells import RowCells
from peft_mux.data.formats import DataFormat
from peft_mux.data.rows.chat_rows import ChatRows
from peft_mux.data.rows.length_limit import LengthLimit, RowCounts
from peft_mux.data.task_batch import TokenSequence


@dataclass(frozen=True, slots=True)
class RowTools:
    """What a reader reads the rows of one dataset with.

    Attributes:
        data_format: the format that was recognised.
        cells: reads single cells, and makes the error that names row and column.
        limit: what becomes of rows that are too long.
        counts: counts the rows that are left out.
        chat_rows: applies the chat template to lists of messages.
        tokenizer: a tokenizer of transformers; may be `None` for rows that are tokenised already.
        prompt_completion: returns the ids of a prompt with its completion, and masks of what carries loss, with TRL's
            meaning (`EOS` added, the completion begins where the tokens of the prompt alone end); given a mapping with
            `prompt` and `completion`, texts or messages, and the index of the row.
        num_labels: number of classes; 1 for regression, `None` where it is not known.
    """

    data_format: DataFormat
    cells: RowCells
    limit: LengthLimit
    counts: RowCounts
    chat_rows: ChatRows
    tokenizer: Any
    prompt_completion: Callable[[Mapping[str, Any], int], tuple[Sequence[int], list[np.ndarray]]]
    num_labels: int | None


class RowReader(Protocol):
    """Turns rows of one form into sequences."""

    def sequence(self, row: Mapping[str, Any], index: int) -> TokenSequence | None:
        """Return the sequence of a row, or `None` where the row is left out (and counted).

        Raises:
            DataError: naming the row and the column that cannot be trained on.
        """
        ...


RowReaderMaker = Callable[[RowTools], RowReader]
"""Makes the reader of one dataset."""
