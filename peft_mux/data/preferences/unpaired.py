"""Pairs of answers as single answers with a verdict, in the order in which TRL unpairs them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from peft_mux.data.cells import RowCells
from peft_mux.data.preferences.prompts import shared_length
from peft_mux.errors import DataError

_BLOCK = 1000
"""Rows that `datasets.Dataset.map` hands to TRL at a time: their chosen answers come before their rejected ones."""


class UnpairedRow(dict[str, Any]):
    """One answer of a pair.

    Attributes:
        origin: index of the pair among the rows as they were.
        column: the column that the answer stood in.
    """

    def __init__(self, row: Mapping[str, Any], origin: int, column: str) -> None:
        """Keep where the answer comes from."""
        super().__init__(row)
        self.origin = origin
        self.column = column


class UnpairedRows:
    """A dataset of pairs read as one of single answers, twice as long.

    Args:
        dataset: rows with `chosen` and `rejected`, and perhaps `prompt`.
        where: the dataset, for messages: `tasks.sql.train_dataset`.
    """

    def __init__(self, dataset: Any, where: str) -> None:
        """Keep the pairs."""
        self.dataset = dataset
        self.where = where

    def __len__(self) -> int:
        """Return the number of answers."""
        return 2 * len(self.dataset)

    def __iter__(self) -> Iterator[UnpairedRow]:
        """Yield the answers, the chosen ones of a block before its rejected ones.

        Raises:
            DataError: naming the pair that lacks an answer.
        """
        rows = iter(enumerate(islice(self.dataset, len(self.dataset))))
        while block := list(islice(rows, _BLOCK)):
            for column in ("chosen", "rejected"):
                for origin, row in block:
                    yield self._single(row, origin, column)

    def _single(self, row: Any, origin: int, column: str) -> UnpairedRow:
        cells = RowCells(self.where, None)
        if not isinstance(row, Mapping):
            raise DataError(f"{self.where} row {origin}: got {type(row).__name__}; allowed: a dict of columns.")
        for name in ("chosen", "rejected"):
            if row.get(name) is None or not isinstance(row[name], (str, list)) or not row[name]:
                raise cells.error(origin, name, f"{row.get(name)!r:.60}", "a text or a list of messages")
        others = {name: value for name, value in row.items() if name not in ("chosen", "rejected")}
        answer = row[column]
        if others.get("prompt") is None or (isinstance(others["prompt"], str) and isinstance(answer, list)):
            length = shared_length(row["chosen"], row["rejected"])
            others["prompt"], answer = answer[:length], answer[length:]
        return UnpairedRow({**others, "completion": answer, "label": column == "chosen"}, origin, column)


def unpaired(dataset: Any, where: str) -> Any:
    """Return a dataset of single answers; as it is where its first row is one.

    Args:
        dataset: rows that can be counted and read again.
        where: the dataset, for messages.
    """
    first = next(iter(dataset), None)
    is_paired = isinstance(first, Mapping) and "chosen" in first and "rejected" in first and "completion" not in first
    return UnpairedRows(dataset, where) if is_paired else dataset
