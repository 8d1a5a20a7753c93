"""Rows of token classification: token ids with a class for each, or words with a class for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from peft_mux.data.formats import DataFormat, RowForm
from peft_mux.data.rows.row_reader import RowTools
from peft_mux.data.task_batch import IGNORE_INDEX, TokenSequence

TAG_COLUMNS = ("labels", "ner_tags", "pos_tags", "chunk_tags", "tags", "label")
"""Columns that may hold the classes of words, in the order in which they are looked for."""


class TaggedRows:
    """Turns rows with a class for each token, or for each word, into sequences.

    Of a word that becomes several tokens the first alone has the class, as in the examples of transformers.

    Args:
        tools: what the rows of one dataset are read with.
    """

    def __init__(self, tools: RowTools) -> None:
        """Keep what every row is read with."""
        self._tools = tools
        self._cells = tools.cells

    def sequence(self, row: Mapping[str, Any], index: int) -> TokenSequence | None:
        """Return the sequence of a row, or `None` where the row is left out (and counted).

        Raises:
            DataError: naming the row and the column that cannot be trained on.
        """
        is_tokenised = self._tools.data_format is DataFormat.TOKENIZED
        ids, labels = self._tokenised(row, index) if is_tokenised else self._words(row, index)
        ids = self._cells.checked_ids(ids, index, "input_ids")
        kept = self._tools.limit.cut(ids, labels, index)
        if kept is None:
            return None
        if not np.any(kept[1] != IGNORE_INDEX):
            self._tools.counts.num_without_targets += 1
            self._tools.counts.num_masked += not np.any(labels != IGNORE_INDEX)
            return None
        return TokenSequence(kept[0], kept[1], index, labels_itself=True)

    def _tokenised(self, row: Mapping[str, Any], index: int) -> tuple[np.ndarray, np.ndarray]:
        ids = self._cells.integers(row["input_ids"], index, "input_ids")
        keep = self._cells.attended(row, index, len(ids))
        return ids[keep], self._classes(row, index, ("labels",), len(ids))[keep]

    def _words(self, row: Mapping[str, Any], index: int) -> tuple[np.ndarray, np.ndarray]:
        words = row["tokens"]
        if not isinstance(words, (list, tuple)) or not words or not all(isinstance(word, str) for word in words):
            raise self._cells.error(index, "tokens", f"{words!r:.60}", "a list of words (strings), at least one")
        classes = self._classes(row, index, TAG_COLUMNS, len(words))
        if not getattr(self._tools.tokenizer, "is_fast", False):
            got = "words, with a tokenizer that does not tell which word a token is of"
            raise self._cells.error(index, "tokens", got, "a fast tokenizer, or rows with input_ids and labels")
        encoded = self._tools.tokenizer(list(words), is_split_into_words=True)
        labels, before = [], None
        for word in encoded.word_ids():
            labels.append(IGNORE_INDEX if word is None or word == before else int(classes[word]))
            before = word
        return np.asarray(encoded["input_ids"], dtype=np.int64), np.asarray(labels, dtype=np.int64)

    def _classes(self, row: Mapping[str, Any], index: int, columns: tuple[str, ...], count: int) -> np.ndarray:
        """Return the class of each token or word, checked."""
        column = next((name for name in columns if row.get(name) is not None), None)
        if column is None:
            raise self._cells.error(index, columns[0], "no such column, or None", f"{count} classes, one for each")
        labels = self._cells.integers(row[column], index, column)
        if len(labels) != count:
            raise self._cells.error(index, column, f"{len(labels)} classes", f"{count}, one for each")
        greatest = (self._tools.num_labels or 2**31) - 1
        wrong = (labels != IGNORE_INDEX) & ((labels < 0) | (labels > greatest))
        if wrong.any():
            allowed = f"classes from 0{f' to {greatest}' if self._tools.num_labels else ''}, or -100 for none"
            raise self._cells.error(index, column, str(labels[wrong][0]), allowed)
        return labels


TAGGED_ROWS = RowForm((DataFormat.TOKENIZED, DataFormat.WORDS), has_token_labels=True, reader=TaggedRows)
"""Tokens or words with a class for each."""
