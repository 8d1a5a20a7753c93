"""Numbers of rows that compare answers: log-probabilities of a reference, and margins."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from peft_mux.data.cells import RowCells


class RowNumbers:
    """Reads columns of one number a row, which all rows of a dataset have, or none.

    Args:
        names: the columns that may be there, all of them together or none.
        cells: makes the error that names row and column.
    """

    def __init__(self, names: Sequence[str], cells: RowCells) -> None:
        """Have seen no row yet."""
        self._names = tuple(names)
        self._cells = cells
        self._are_there: bool | None = None

    def read(self, row: Mapping[str, Any], index: int) -> dict[str, float]:
        """Return the numbers of a row, by column; nothing where the dataset has none.

        Raises:
            DataError: if one is missing where others are there, or is no finite number.
        """
        if self._are_there is None:
            self._are_there = any(row.get(name) is not None for name in self._names)
        return {name: self._number(row, name, index) for name in self._names if self._is_read(row, name)}

    def _is_read(self, row: Mapping[str, Any], name: str) -> bool:
        return bool(self._are_there) or row.get(name) is not None

    def _number(self, row: Mapping[str, Any], name: str, index: int) -> float:
        value = row.get(name)
        if isinstance(value, np.generic):
            value = value.item()
        if self._are_there and isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
        got = "no such column" if name not in row else repr(value)
        together = f", with {', '.join(self._names)}" if len(self._names) > 1 else ""
        raise self._cells.error(index, name, got, f"a finite number in every row, or in none{together}")
