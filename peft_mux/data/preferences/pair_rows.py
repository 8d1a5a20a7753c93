"""Rows of a prompt, a chosen and a rejected answer, tokenised as TRL's `DPOTrainer` does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from peft_mux.data.formats import DataFormat
from peft_mux.data.preferences.layout import Answer, cut_answers, pair_of
from peft_mux.data.preferences.numbers import RowNumbers
from peft_mux.data.preferences.prompts import prompt_and_answers
from peft_mux.data.rows.row_reader import RowTools
from peft_mux.data.task_batch import TokenSequence

REFERENCE_COLUMNS = ("ref_chosen_logps", "ref_rejected_logps")
"""Log-probabilities of the answers under the reference, in nats, where the rows bring them."""


class PairRows:
    """Turns rows with a chosen and a rejected answer into rows of two sequences.

    `EOS` is added to answers that are texts; where tokens of a prompt and an answer merge, the answer begins before.
    Row values are the numbers of tokens of the two answers, and the columns of `REFERENCE_COLUMNS` where there are any.

    Args:
        tools: what the rows of the dataset are read with.
    """

    def __init__(self, tools: RowTools) -> None:
        """Keep what every row is read with."""
        self._tools = tools
        self._numbers = RowNumbers(REFERENCE_COLUMNS, tools.cells)

    def sequence(self, row: Mapping[str, Any], index: int) -> TokenSequence | None:
        """Return the sequence of a row, or `None` where the row is left out (and counted).

        Raises:
            DataError: naming the row and the column that cannot be trained on.
        """
        is_tokenised = self._tools.data_format is DataFormat.TOKENIZED_PREFERENCE
        answers = tokenised_pair(row, index, self._tools) if is_tokenised else self._encoded(row, index)
        values = self._numbers.read(row, index)
        kept = cut_answers(answers, index, self._tools)
        if kept is None:
            return None
        chosen, rejected = kept
        # Of the answers as they are, also where nothing comes before them that could predict their first token.
        values["chosen_tokens"] = float(len(chosen.ids) - chosen.start)
        values["rejected_tokens"] = float(len(rejected.ids) - rejected.start)
        return pair_of(chosen, rejected, index, values)

    def _encoded(self, row: Mapping[str, Any], index: int) -> tuple[Answer, Answer]:
        prompt, *answers = prompt_and_answers(row, index, self._tools.cells, self._tools.chat_rows)
        chosen, rejected = (encode_answer(prompt, answer, index, self._tools) for answer in answers)
        # One prompt for both, as the reader of one answer would not see where the other's tokens merge with it.
        start = min(chosen.start, rejected.start)
        return Answer(chosen.ids, start), Answer(rejected.ids, start)


def encode_answer(prompt: Any, answer: Any, index: int, tools: RowTools) -> Answer:
    """Return the tokens of a prompt with an answer to it, both texts or both messages.

    Args:
        prompt: what comes before.
        answer: what is learnt.
        index: index of the row.
        tools: what the rows of the dataset are read with.
    """
    ids, (mask, *_) = tools.prompt_completion({"prompt": prompt, "completion": answer}, index)
    return Answer(np.asarray(ids, dtype=np.int64), int(np.count_nonzero(~mask)))


def tokenised_pair(row: Mapping[str, Any], index: int, tools: RowTools) -> tuple[Answer, Answer]:
    """Return the chosen and the rejected answer of a row of ids, each after those in `prompt_ids`.

    Args:
        row: the row.
        index: index of the row.
        tools: what the rows of the dataset are read with.

    Raises:
        DataError: naming the row and the column that cannot be trained on.
    """
    chosen, rejected = (tokenised_answer(row, column, index, tools) for column in ("chosen_ids", "rejected_ids"))
    return chosen, rejected


def tokenised_answer(row: Mapping[str, Any], column: str, index: int, tools: RowTools) -> Answer:
    """Return the ids in a column after those in `prompt_ids`, which may be missing.

    Args:
        row: the row.
        column: the column of the answer.
        index: index of the row.
        tools: what the rows of the dataset are read with.

    Raises:
        DataError: if one of them is no list of token ids.
    """
    given = row.get("prompt_ids")
    prompt = tools.cells.integers([] if given is None else given, index, "prompt_ids")
    answer = tools.cells.integers(row[column], index, column)
    for name, ids in (("prompt_ids", prompt), (column, answer)):
        tools.cells.checked_ids(ids, index, name, empty_allowed=name == "prompt_ids")
    return Answer(np.concatenate((prompt, answer)), len(prompt))
