"""Backward only as deep as a task's lowest adapter: from there on down, its rows need no gradient.

A pass meets adapters from the bottom to the top. What a layer reads depends on the weights of a task only if an adapter
of the task was computed before; so the rows of tasks that a pass has not met yet (`Stream.unmet`) need no gradient
there. The products with frozen weights, which take most of a backward pass, are then made for the others alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import torch

from peft_mux.kernels.lora.slices import Rows, num_rows_in
from peft_mux.modeling.stream import RowSegment, Stream

_LAYER_OF_FACTOR = re.compile(r"^(?!.*\.experts\.)(?:[^.0-9][^.]*\.)+?(\d+)\..*\.lora_(?:A|B|magnitude_vector)\b")
"""The number of a layer in the name of a factor, as the first number among the names of modules."""
_LEAST_SHARE = 8
"""Less than one in so many rows is not left out, as taking rows apart takes a copy where they do not lie together."""


def lowest_layer(parameters: Iterable[str]) -> int:
    """Return the number of the lowest layer, from 0, that a task has weights in; 0 where its rows go all the way down.

    They do where weights lie elsewhere too, as in embeddings, experts and heads (`Stream.unmet`).

    Args:
        parameters: names of the task's parameters.
    """
    found = [_LAYER_OF_FACTOR.search(name) for name in parameters]
    return min((int(one.group(1)) if one is not None else 0 for one in found), default=0)


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
    num_left_out = num_rows - num_rows_in(needed)
    return None if num_left_out * _LEAST_SHARE < num_rows else tuple(needed)


def rows_needed_now(stream: Stream, num_rows: int) -> tuple[Rows, ...] | None:
    """Return the rows whose gradients are needed below where the pass in flight is now; `None` for all.

    Args:
        stream: the pass in flight.
        num_rows: rows of what is computed with; where they are not the stream's, whose they are is not known.
    """
    # A compiled graph must not depend on who was met.
    if torch.compiler.is_compiling() or not stream.unmet or num_rows != stream.num_rows:
        return None
    return rows_needed(stream.segments, stream.unmet)
