"""Backward only as deep as a task's lowest adapter: from there on down, its rows need no gradient.

A pass meets adapters from the bottom to the top. What a layer reads depends on the weights of a task only if an adapter
of the task was computed before; so the rows of tasks that a pass has not met yet (`Stream.unmet`) need no gradient
there. The products with frozen weights, which take most of a backward pass, are then made for the others alone.
"""

from __future__ import annotations

from collections.abc import Sequence

from peft_mux.kernels.lora.reference import Rows
from peft_mux.modeling.stream import RowSegment

_LEAST_SHARE = 8
"""Less than one in so many rows is not left out, as taking rows apart takes a copy where they do not lie together."""


def rows_needed(segments: Sequence[RowSegment], unmet: frozenset[str]) -> tuple[Rows, ...] | None:
    """Return the rows whose gradients a layer below needs, as ranges in order; `None` for all.

    Args:
        segments: rows of each task, in order.
        unmet: adapters that the pass has not come to yet.
    """
    needed: list[Rows] = []
    for segment in segments:
        if segment.adapter not in unmet:
            # Neighbours are one range, so that most often nothing is copied.
            joined = bool(needed) and needed[-1].end == segment.start
            start = needed.pop().start if joined else segment.start
            needed.append(Rows(start, segment.end))
    num_rows = sum(segment.end - segment.start for segment in segments)
    num_left_out = num_rows - sum(rows.end - rows.start for rows in needed)
    return None if num_left_out * _LEAST_SHARE < num_rows else tuple(needed)
