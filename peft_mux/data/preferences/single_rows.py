"""Rows of a prompt, one answer and whether it is good, tokenised as TRL's `KTOTrainer` does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from peft_mux.data.formats import DataFormat
from peft_mux.data.preferences.layout import cut_answers
from peft_mux.data.preferences.numbers import RowNumbers
from peft_mux.data.preferences.pair_rows import encode_answer, tokenised_answer
from peft_mux.data.preferences.prompts import is_conversation, read_said, refuse_template_columns
from peft_mux.data.preferences.unpaired import UnpairedRow
from peft_mux.data.rows.row_reader import RowTools
from peft_mux.data.task_batch import TokenSequence


class SingleRows:
    """Turns rows with an answer and a verdict into sequences, with loss on the answer.

    Row values are `desirable`, 1 or 0, and `ref_logps` where the column is there.

    Args:
        tools: what the rows of the dataset are read with.
    """

    def __init__(self, tools: RowTools) -> None:
        """Keep what every row is read with."""
        self._tools = tools
        self._numbers = RowNumbers(("ref_logps",), tools.cells)

    def sequence(self, row: Mapping[str, Any], index: int) -> TokenSequence | None:
        """Return the sequence of a row, or `None` where the row is left out (and counted).

        Raises:
            DataError: naming the row and the column that cannot be trained on.
        """
        tools = self._tools
        desirable = self._verdict(row, index)
        values = {"desirable": desirable, **self._numbers.read(row, index)}
        if tools.data_format is DataFormat.TOKENIZED_UNPAIRED:
            answer = tokenised_answer(row, "completion_ids", index, tools)
        else:
            answer = encode_answer(*self._prompt_and_answer(row, index), index, tools)
        kept = cut_answers((answer,), index, tools)
        if kept is None:
            return None
        return TokenSequence(kept[0].ids, kept[0].labels(), index, is_one_term=True, row_values=values)

    def _prompt_and_answer(self, row: Mapping[str, Any], index: int) -> tuple[Any, Any]:
        cells = self._tools.cells
        # Of rows that were paired, errors name the row and the column as they were.
        column, index = (row.column, row.origin) if isinstance(row, UnpairedRow) else ("completion", index)
        refuse_template_columns(row, index, cells)
        named = {"prompt": row["prompt"], column: row["completion"]}
        prompt, answer = (read_said(named, name, index, cells, self._tools.chat_rows) for name in ("prompt", column))
        if is_conversation(prompt) != is_conversation(answer):
            kind = "messages" if is_conversation(prompt) else "a text"
            raise cells.error(index, column, type(row["completion"]).__name__, f"{kind}, as the prompt is")
        return prompt, answer

    def _verdict(self, row: Mapping[str, Any], index: int) -> float:
        value = row["label"]
        if isinstance(value, np.generic):
            value = value.item()
        # Files without booleans have 0 and 1; other numbers would be taken for scores.
        if isinstance(value, bool) or (isinstance(value, int) and value in (0, 1)):
            return float(value)
        raise self._tools.cells.error(index, "label", f"{value!r:.60}", "True for a good answer, False for a bad one")
