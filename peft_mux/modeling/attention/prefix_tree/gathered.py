"""`Gathered`: parts of a prefix tree that share calls of attention: short nodes, and whole trees of few rows.

Shape letters: P rows of all rectangles, n nodes or trees of a rectangle, L its length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from peft_mux.modeling.attention.rectangles import LENGTH_STEP, Layout, build_layout, copied_to
from peft_mux.packing.prefix_tree import Node


class Gathered(NamedTuple):
    """Nodes, or whole trees, that share calls in rectangles of near-equal length.

    Attributes:
        layout: the rectangles of their tokens.
        places: int64, the place of each of their tokens in depth-first order.
        place_of_row: int64 `[P]`, the place whose token each row of the rectangles takes; any where it is padding.
        masks: for each rectangle `[n, 1, L, L]`, fp32, what is added to scores: 0 where a query sees a key, else minus
            infinity; `None` where each query sees those before it, as far as a window leaves them.
    """

    layout: Layout
    places: torch.Tensor
    place_of_row: torch.Tensor
    masks: tuple[torch.Tensor | None, ...]


def tree_mask(nodes: Sequence[Node], numbers: Sequence[int], window: int | None) -> np.ndarray:
    """Return which keys each query of a tree sees, booleans `[L, L]` in depth-first order.

    Args:
        nodes: the nodes of all trees.
        numbers: those of the tree, in depth-first order.
        window: a query sees this many tokens, itself included; `None` for all before it.
    """
    number = np.repeat(np.arange(len(numbers)), [nodes[one].length for one in numbers])
    position = np.concatenate([np.arange(nodes[one].length) + nodes[one].depth for one in numbers])
    place = {one: index for index, one in enumerate(numbers)}
    is_above = np.eye(len(numbers), dtype=bool)
    for index, one in enumerate(numbers[1:], start=1):
        is_above[index] |= is_above[place[nodes[one].parent]]
    apart = position[:, None] - position[None, :]
    return is_above[number[:, None], number[None, :]] & (apart >= 0) & (window is None or apart < window)


def gathered_parts(parts: Sequence[slice], seen: Sequence[np.ndarray | None], device: torch.device) -> Gathered:
    """Gather nodes, or trees.

    Args:
        parts: places of their tokens in depth-first order.
        seen: for each tree which keys its queries see (`tree_mask`); `None` for each node.
        device: where indices and masks are needed.
    """
    layout = build_layout(tuple(part.stop - part.start for part in parts), LENGTH_STEP, device)
    places = np.concatenate([np.arange(part.start, part.stop) for part in parts])
    place_of_row = np.zeros(layout.num_rows, dtype=np.int64)
    place_of_row[layout.row_of_token_on_host] = places
    starts = layout.row_of_token_on_host[np.cumsum([0, *(part.stop - part.start for part in parts[:-1])])]
    by_start = dict(zip(starts.tolist(), seen, strict=True))
    masks = []
    for rectangle in layout.rectangles:
        own = [by_start[start] for start in range(rectangle.start, rectangle.rows.stop, rectangle.length)]
        masks.append(None if own[0] is None else copied_to(_added(own, rectangle.length), device))
    on_device = [copied_to(torch.from_numpy(one), device) for one in (places, place_of_row)]
    return Gathered(layout, on_device[0], on_device[1], tuple(masks))


def _added(seen: Sequence[np.ndarray | None], length: int) -> torch.Tensor:
    """Return `[n, 1, L, L]`; rows of padding see themselves, as a query that sees nothing has no softmax."""
    is_seen = np.tile(np.eye(length, dtype=bool), (len(seen), 1, 1, 1))
    for own, one in zip(is_seen, seen, strict=True):
        assert one is not None, "rectangles are of nodes or of trees"
        own[0, : len(one), : len(one)] = one
    return torch.zeros(is_seen.shape).masked_fill_(torch.from_numpy(~is_seen), -math.inf)
