"""Random rows with common beginnings, for all tests of shared prefixes."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

Rows = list[np.ndarray]


@st.composite
def tries(draw: st.DrawFn, max_rows: int = 7, words: int = 5, max_run: int = 4) -> Rows:
    """Draw rows, most of which extend a beginning of an earlier one: cut anywhere, the whole, nothing, or equal."""
    rows: Rows = []
    for _ in range(draw(st.integers(1, max_rows))):
        rest = draw(st.lists(st.integers(1, words), min_size=0 if rows else 1, max_size=max_run))
        base = draw(st.sampled_from(rows)) if rows and draw(st.booleans()) else np.zeros(0, dtype=np.int64)
        kept = draw(st.integers(0, len(base)))
        row = np.concatenate([base[:kept], np.asarray(rest, dtype=np.int64)])
        rows.append(row if len(row) else np.asarray([1], dtype=np.int64))
    return rows


def hard_rows() -> Rows:
    """Return rows with every case that is easy to get wrong, for a minimum of 2 tokens."""
    listed = [
        [1, 2, 3, 4, 5],
        [9, 9],
        [1, 2, 3, 4, 5],  # identical
        [1, 2, 3],  # a beginning of another
        [1, 2, 3, 4, 6],  # a branch at the last token
        [1, 7, 8],  # a branch at the second token: less than the minimum in common
        [1, 2, 3, 4, 5, 6, 7, 8],  # extends where others end
        [2],
        [9, 9, 1],
    ]
    return [np.asarray(row, dtype=np.int64) for row in listed]
