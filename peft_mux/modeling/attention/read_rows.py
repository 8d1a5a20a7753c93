"""`ReadRows`: the rows whose last hidden states a head reads, and attention of a layer that computes these alone.

Keys and values are of all rows, as those that are read see the others.

Shape letters: U computed rows, R rows that are read, H heads, G key-value heads, C channels of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from peft_mux.data.batch import MuxBatch

QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class ReadRows(NamedTuple):
    """Rows of the activations whose last hidden states are read.

    Attributes:
        rows: int64 `[R]`, their numbers among the U computed rows, ascending.
        offsets: where each task's rows begin among them, `N + 1` numbers.
    """

    rows: torch.Tensor
    offsets: tuple[int, ...]


def rows_of_targets(batch: MuxBatch) -> ReadRows:
    """Return the rows that predict something."""
    if batch.shared is None:
        return ReadRows(batch.target_rows, batch.target_offsets)
    return ReadRows(batch.shared.target_rows, batch.shared.target_offsets)


def nothing() -> None:
    """Do nothing."""


class KeysReady(Exception):
    """Ends a layer's first call: its keys and values are there."""


class LayerCalls:
    """What attention does in the two calls of a layer: first the keys of all rows, then the queries of those read.

    Args:
        rows: int64 `[R]`, numbers of the rows that are read.
        has_own_queries: whether queries are computed in the second call, of the rows that are read; otherwise one
            projection makes queries, keys and values, in the first.

    Attributes:
        attention: the module that attended in the first call; `None` before it.
        reached: what is done when the second call asks for attention; nothing by default.
    """

    def __init__(self, rows: torch.Tensor, *, has_own_queries: bool) -> None:
        """Expect the first call."""
        self.attention: Any = None
        self.reached: Callable[[], object] = nothing
        self._rows, self._has_own_queries = rows, has_own_queries
        self._of_all: QKV | None = None

    def of_all(self, module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> QKV:
        """Return queries `[1, H, U, C]`, keys and values `[1, G, U, C]` of all rows, in the second call.

        Queries of rows that are not read may be zeros: nobody reads what they attend to, and no gradient comes from it.

        Args:
            module: the attention module.
            query: those of the rows of this call.
            key: those of the rows of this call; in the second one of no meaning, as `value`.
            value: as `key`.

        Raises:
            KeysReady: in the first call.
        """
        if self._of_all is None:
            self.attention, self._of_all = module, (query, key, value)
            raise KeysReady
        self.reached()
        all_queries, keys, values = self._of_all
        if not self._has_own_queries:
            return all_queries, keys, values
        shape = (*query.shape[:2], keys.shape[2], query.shape[3])
        return query.new_zeros(shape).index_copy(2, self._rows, query), keys, values

    def of_read(self, out_1UHC: torch.Tensor) -> torch.Tensor:
        """Return the outputs `[1, R, H, C]` of the rows that are read."""
        return out_1UHC.index_select(1, self._rows)
