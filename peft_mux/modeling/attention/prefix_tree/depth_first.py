"""`DepthFirst`: a prefix tree in the order in which blocks read it, the rows below each node right behind it.

    nodes in the stream    a [b] [c] d [e]    where b, c and e are below a, and d is a tree of its own
    depth first            a [b] [c] [e] d    the block of a: keys a, queries b c e

Shape letters: U computed rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch

from peft_mux.modeling.attention.rectangles import LENGTH_STEP, Layout, build_layout, copied_to
from peft_mux.packing.prefix_tree import Node, PrefixTree

_LONG = 32
"""Tokens from which on a node fills a call of its own, and copying it into a rectangle costs more than that call."""


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
        long_nodes: places of the nodes that are long enough for a call of their own, and are read where they lie.
        short_nodes: the others; `None` where there are none.
        blocks: what the nodes see of those above them, parents before children.
    """

    order: torch.Tensor | None
    long_nodes: tuple[slice, ...]
    short_nodes: ShortNodes | None
    blocks: tuple[Block, ...]


class ShortNodes(NamedTuple):
    """Nodes that share calls, gathered into rectangles of near-equal length.

    Attributes:
        layout: the rectangles of their tokens.
        places: int64, the place of each of their tokens in depth-first order.
        place_of_row: int64 `[P]`, the place whose token each row of the rectangles takes; any where it is padding.
    """

    layout: Layout
    places: torch.Tensor
    place_of_row: torch.Tensor


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
        *_by_length([nodes[one].length for one in visited], device),
        tuple(_blocks(nodes, visited, window, device)),
    )


def _by_length(lengths: Sequence[int], device: torch.device) -> tuple[tuple[slice, ...], ShortNodes | None]:
    """Return the long nodes and the short ones; which a node is depends on its own length alone."""
    ends = list(accumulate(lengths))
    nodes = [slice(end - length, end) for length, end in zip(lengths, ends, strict=True)]
    long_nodes = tuple(node for node, length in zip(nodes, lengths, strict=True) if length >= _LONG)
    short = [node for node, length in zip(nodes, lengths, strict=True) if length < _LONG]
    if not short:
        return long_nodes, None
    layout = build_layout(tuple(node.stop - node.start for node in short), LENGTH_STEP, device)
    places = np.concatenate([np.arange(node.start, node.stop) for node in short])
    place_of_row = np.zeros(layout.num_rows, dtype=np.int64)
    place_of_row[layout.row_of_token_on_host] = places
    on_device = (copied_to(torch.from_numpy(one), device) for one in (places, place_of_row))
    return long_nodes, ShortNodes(layout, *on_device)


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
