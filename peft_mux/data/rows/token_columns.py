"""Columns of tokenised rows with a number for each token: weights, advantages, log-probabilities of a teacher."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np

from peft_mux.data.cells import RowCells
from peft_mux.data.formats import TokenColumn
from peft_mux.data.task_batch import IGNORE_INDEX

_ROUNDING = 0.01
"""By how much a log-probability may exceed 0: half precision of another program rounds so."""


def read_columns(
    columns: Mapping[str, TokenColumn], row: Mapping[str, Any], index: int, keep: np.ndarray, cells: RowCells
) -> dict[str, np.ndarray]:
    """Return the token columns of a tokenised row, by name: float32 or int64, `[L]` or `[L, K]`.

    Args:
        columns: the columns that the loss reads.
        row: the row.
        index: index of the row.
        keep: bool, which of the row's `input_ids` are no padding; L of them.
        cells: makes the error that names row and column.

    Raises:
        DataError: naming the row and the column that cannot be read.
    """
    found: dict[str, np.ndarray] = {}
    for name, column in columns.items():
        if row.get(name) is None:
            if column.is_required:
                raise cells.error(index, name, "no such column, or None", "a number for each of input_ids")
            if column.beside and row.get(column.beside) is not None:
                raise cells.error(index, name, "no such column, or None", f'one beside "{column.beside}"')
            continue
        values = _array(name, column, row[name], index, len(keep), cells)[keep]
        _check_values(name, column, values, index, cells)
        found[name] = values
    for name in found:
        if columns[name].not_beside in found:
            raise cells.error(index, name, f'a value beside "{columns[name].not_beside}"', "one of the two")
        other = columns[name].beside
        if other and found[other].shape != found[name].shape:
            got = f"shape {list(found[name].shape)}"
            raise cells.error(index, name, got, f'{list(found[other].shape)}, as "{other}" has')
    return found


def with_given_targets(labels: np.ndarray, columns: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return labels of the tokens that are learnt: those whose weight, or weights of several targets, are not all 0.

    Several targets of a token are told by the first of them; a token that is ignored in the row stays so.

    Args:
        labels: `[L]`, of the row as it came.
        columns: token columns of the row; without `weights` or `target_ids` the labels stay as they are.
    """
    # Where no weight is above 0 nothing is learnt, so the position never meets the output head.
    if "weights" in columns:
        return np.where(columns["weights"] > 0, labels, IGNORE_INDEX)
    if "target_ids" not in columns:
        return labels
    is_target = (columns["target_weights"] > 0).any(axis=1)
    return np.where(is_target & (labels != IGNORE_INDEX), columns["target_ids"][:, 0], IGNORE_INDEX)


def _array(name: str, column: TokenColumn, value: Any, index: int, length: int, cells: RowCells) -> np.ndarray:
    shape = f"{length} lists of K numbers" if column.is_wide else f"{length} numbers"
    shape += ", one for each of input_ids" + (" (or one number for all)" if column.may_be_row else "")
    array = None
    with suppress(ValueError, TypeError):  # numpy's, of lists of unequal lengths and of None
        array = np.asarray(value, dtype=np.float64)
    if array is not None and array.ndim == 0 and column.may_be_row:
        array = np.full(length, array)
    if array is None or array.ndim != 1 + column.is_wide or len(array) != length or array.size == 0:
        got = f"{value!r:.60}" if array is None else f"shape {list(array.shape)}"
        raise cells.error(index, name, got, shape)
    return (
        array.astype(np.int64) if column.is_ids and np.array_equal(array, np.floor(array)) else array.astype(np.float32)
    )


def _check_values(name: str, column: TokenColumn, values: np.ndarray, index: int, cells: RowCells) -> None:
    if column.is_ids:
        if values.dtype != np.int64:
            raise cells.error(index, name, "numbers with fractions, or no numbers", "token ids")
        cells.checked_ids(values.reshape(-1), index, name, empty_allowed=True)
    elif not np.isfinite(values).all():
        raise cells.error(index, name, "a number that is not finite", "finite numbers")
    elif column.is_non_negative and values.size and float(values.min()) < 0:
        raise cells.error(index, name, str(values.min()), "numbers of at least 0")
    elif column.is_logprob and values.size and float(values.max()) > _ROUNDING:
        raise cells.error(index, name, str(values.max()), "natural logarithms of probabilities, at most 0")
