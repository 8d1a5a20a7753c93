"""Rows of a better and a worse text, tokenised as TRL's `RewardTrainer` does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from peft_mux.data.formats import DataFormat
from peft_mux.data.preferences.layout import Answer
from peft_mux.data.preferences.numbers import RowNumbers
from peft_mux.data.preferences.pair_rows import tokenised_answer
from peft_mux.data.preferences.prompts import is_conversation, read_said, refuse_template_columns
from peft_mux.data.rows.row_reader import RowTools
from peft_mux.data.task_batch import TokenSequence


class ScoredRows:
    """Turns rows with a chosen and a rejected text into rows of two sequences, each scored as a whole.

    A prompt comes before both texts, and `EOS` after texts that are no messages. Rows of which one text is longer than
    the limit are left out, as in TRL: a score is read at the end, which a cut would take away. There is a row value
    `margin` where the column is.

    Args:
        tools: what the rows of the dataset are read with.
    """

    def __init__(self, tools: RowTools) -> None:
        """Keep what every row is read with."""
        self._tools = tools
        self._numbers = RowNumbers(("margin",), tools.cells)

    def sequence(self, row: Mapping[str, Any], index: int) -> TokenSequence | None:
        """Return the sequence of a row, or `None` where the row is left out (and counted).

        Raises:
            DataError: naming the row and the column that cannot be trained on.
        """
        tools = self._tools
        is_tokenised = tools.data_format is DataFormat.TOKENIZED_PREFERENCE
        texts = self._tokenised(row, index) if is_tokenised else self._encoded(row, index)
        values = self._numbers.read(row, index)
        for text in texts:
            tools.cells.checked_ids(text, index, "input_ids")
        longest = max(len(text) for text in texts)
        if longest > tools.limit.num_tokens:
            if tools.limit.policy == "error":
                tools.limit.drops(index, longest)
            tools.counts.num_dropped_long += 1
            return None
        ids = np.concatenate(texts)
        # Tokens carry no labels here, so the ids stand in for them; and a value is what classifiers' rows have.
        return TokenSequence(ids, ids.copy(), index, 0.0, is_one_term=True, starts=(len(texts[0]),), row_values=values)

    def _tokenised(self, row: Mapping[str, Any], index: int) -> list[np.ndarray]:
        pair: list[Answer] = [
            tokenised_answer(row, name, index, self._tools) for name in ("chosen_ids", "rejected_ids")
        ]
        return [answer.ids for answer in pair]

    def _encoded(self, row: Mapping[str, Any], index: int) -> list[np.ndarray]:
        tools = self._tools
        refuse_template_columns(row, index, tools.cells)
        said = {
            name: read_said(row, name, index, tools.cells, tools.chat_rows)
            for name in ("prompt", "chosen", "rejected")
            if name != "prompt" or row.get(name) is not None
        }
        for name in ("rejected", "prompt"):
            if name in said and is_conversation(said[name]) != is_conversation(said["chosen"]):
                kind = "messages" if is_conversation(said["chosen"]) else "a text"
                raise tools.cells.error(index, name, type(row[name]).__name__, f"{kind}, as chosen is")
        return [np.asarray(self._ids(said, name, index), dtype=np.int64) for name in ("chosen", "rejected")]

    def _ids(self, said: Mapping[str, Any], name: str, index: int) -> list[int]:
        text = said[name]
        if is_conversation(text):
            return self._tools.chat_rows.encode([*said.get("prompt", ()), *text], name, index)[0]
        eos = getattr(self._tools.tokenizer, "eos_token", None)
        # A text that ends in EOS gets no second one, as in TRL.
        end = eos if eos and not text.endswith(eos) else ""
        return self._tools.tokenizer(said.get("prompt", "") + text + end)["input_ids"]
