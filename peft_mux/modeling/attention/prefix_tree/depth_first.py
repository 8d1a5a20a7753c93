"""`DepthFirst`: a prefix tree in the order in which blocks read it, the rows below each node right behind it.

    nodes in the stream    a [b] [c] d [e]    where b, c and e are below a, and d is a tree of its own
    depth first            a [b] [c] [e] d    the block of a: keys a, queries b c e

Shape letters: U computed rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from peft_mux.modeling.attention.rectangles import LENGTH_STEP, Layout, build_layout, copied_to
from peft_mux.packing.prefix_tree import Node, PrefixTree


class Block(NamedTuple):
    """Queries that see keys of one node: those of the nodes below it.

    Attributes:
        queries: their places in depth-first order.
        keys: places there of the node's keys; of its last ones, where a window hides the others from all queries.
        window: what each query sees of the keys; `None` where it is all of them.
    """

    queries: slice
    keys: slice
    window: WindowMask | None


class WindowMask(NamedTuple):
    """Which keys of a block a sliding window leaves to its queries.

    Attributes:
        added: fp32, for each query and key what is added to the score: 0 where it is seen, else minus infinity.
        is_blind: for each query whether it sees none of the keys.
    """

    added: torch.Tensor
    is_blind: torch.Tensor


@dataclass(frozen=True, slots=True)
class DepthFirst:
    """A tree in depth-first order, in which all rows below a node lie one after another, right behind it.

    Attributes:
        order: int64 `[U]`, the computed row at each place; `None` where rows lie so already.
        rectangles: the nodes, each seeing itself alone, grouped by near-equal length.
        blocks: what the nodes see of those above them, parents before children.
    """

    order: torch.Tensor | None
    rectangles: Layout
    blocks: tuple[Block, ...]


def depth_first(tree: PrefixTree, window: int | None, device: torch.device) -> DepthFirst:
    """Return a tree in depth-first order.

    Args:
        tree: the tree.
        window: a query sees this many tokens, itself included; `None` for all before it.
        device: where indices and masks are needed.
    """
    nodes, visited = tree.nodes, _visited(tree.nodes)
    order = np.concatenate([np.arange(nodes[one].start, nodes[one].start + nodes[one].length) for one in visited])
    return DepthFirst(
        None if visited == sorted(visited) else copied_to(torch.from_numpy(order), device),
        build_layout(tuple(nodes[one].length for one in visited), LENGTH_STEP, device),
        tuple(_blocks(nodes, visited, window, device)),
    )


def _visited(nodes: Sequence[Node]) -> list[int]:
    """Return the numbers of all nodes, each before all below it, and these before any other."""
    children: list[list[int]] = [[] for _ in nodes]
    stack = []
    for number, node in reversed(list(enumerate(nodes))):
        (stack if node.parent < 0 else children[node.parent]).append(number)
    visited = []
    while stack:
        visited.append(stack.pop())
        stack += children[visited[-1]]
    return visited


def _blocks(nodes: Sequence[Node], visited: Sequence[int], window: int | None, device: torch.device) -> Iterator[Block]:
    # Rows of a node and of all below it; parents come before children.
    num_rows = [node.length for node in nodes]
    for number, node in reversed(list(enumerate(nodes))):
        if node.parent >= 0:
            num_rows[node.parent] += num_rows[number]
    positions = np.concatenate([np.arange(nodes[one].length) + nodes[one].depth for one in visited])
    start = 0
    for number in visited:
        end, last = start + nodes[number].length, start + num_rows[number]
        if last > end:
            # The first query below the node is one token behind its last key.
            first = start if window is None else max(start, end - window + 1)
            if first < end:
                mask = _window_mask(positions[end:last], positions[first:end], window, device)
                yield Block(slice(end, last), slice(first, end), mask)
        start = end


def _window_mask(queries: np.ndarray, keys: np.ndarray, window: int | None, device: torch.device) -> WindowMask | None:
    """Return what queries at these places of their sequences see of keys at those."""
    if window is None or queries.max() - keys[0] < window:
        return None
    is_seen = torch.from_numpy(queries[:, None] - keys[None, :] < window)
    added = torch.zeros(is_seen.shape).masked_fill_(~is_seen, -math.inf)
    return WindowMask(copied_to(added, device), copied_to(~is_seen.any(dim=1), device))
