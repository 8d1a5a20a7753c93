"""`DepthFirst`: a prefix tree in the order in which blocks read it, the rows below each node right behind it.

    nodes in the stream    a [b] [c] d [e]    where b, c and e are below a, and d is a tree of its own
    depth first            a [b] [c] [e] d    the block of a: keys a, queries b c e

A tree of few rows, such as a question and its answers, is computed at once, as a sequence whose queries a mask leads to
what they see: that is less than a call for each of its nodes and blocks.

Shape letters: U computed rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from peft_mux.modeling.attention.prefix_tree.gathered import Gathered, gathered_parts, tree_mask
from peft_mux.modeling.attention.rectangles import LENGTH_STEP, copied_to
from peft_mux.packing.chunking import round_up
from peft_mux.packing.prefix_tree import Node, PrefixTree

_LONG = 32
"""Tokens from which on a node fills a call of its own, and copying it into a rectangle costs more than that call."""
_PAIRS_OF_CALL = 2048
"""Pairs of a query and a key whose scores take about as long as one more call, with what joins its outputs."""


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
        gathered: the other nodes, and whole trees of few rows.
        blocks: what the nodes see of those above them, parents before children; of whole trees none.
    """

    order: torch.Tensor | None
    long_nodes: tuple[slice, ...]
    gathered: tuple[Gathered, ...]
    blocks: tuple[Block, ...]


class _Tree(NamedTuple):
    """A root and all below it: their nodes' numbers in depth-first order, and their places."""

    numbers: list[int]
    places: slice


def depth_first(tree: PrefixTree, window: int | None, device: torch.device) -> DepthFirst:
    """Return a tree in depth-first order.

    Args:
        tree: the tree.
        window: a query sees this many tokens, itself included; `None` for all before it.
        device: where indices and masks are needed.
    """
    nodes, visited = tree.nodes, _visited(tree.nodes)
    order = np.concatenate([np.arange(nodes[one].start, nodes[one].start + nodes[one].length) for one in visited])
    ends = np.cumsum([nodes[one].length for one in visited]).tolist()
    place_of = {one: slice(end - nodes[one].length, end) for one, end in zip(visited, ends, strict=True)}
    blocks = list(_blocks(nodes, visited, window, device))
    whole, at_once = [], set()
    for root in _trees(nodes, visited, place_of):
        if _is_whole(root, [place_of[one] for one in root.numbers], blocks):
            whole.append((root.places, tree_mask(nodes, root.numbers, window)))
            at_once.update(range(root.places.start, root.places.stop))
    others = [place for place in place_of.values() if place.start not in at_once]
    short = [node for node in others if node.stop - node.start < _LONG]
    return DepthFirst(
        None if visited == sorted(visited) else copied_to(torch.from_numpy(order), device),
        tuple(node for node in others if node.stop - node.start >= _LONG),
        tuple(
            gathered_parts([place for place, _ in own], [mask for _, mask in own], device)
            for own in ([(node, None) for node in short], whole)
            if own
        ),
        tuple(block for block in blocks if block.queries.start not in at_once),
    )


def _trees(nodes: Sequence[Node], visited: Sequence[int], place_of: Mapping[int, slice]) -> list[_Tree]:
    """Return the trees of several nodes."""
    starts = [place for place, one in enumerate(visited) if nodes[one].parent < 0]
    found = []
    for first, last in pairwise([*starts, len(visited)]):
        numbers = list(visited[first:last])
        if len(numbers) > 1:
            found.append(_Tree(numbers, slice(place_of[numbers[0]].start, place_of[numbers[-1]].stop)))
    return found


def _is_whole(tree: _Tree, nodes: Sequence[slice], blocks: Sequence[Block]) -> bool:
    """Return whether a tree is computed at once; that depends on nothing but itself."""

    def size(part: slice) -> int:
        return part.stop - part.start

    own = [block for block in blocks if tree.places.start <= block.queries.start < tree.places.stop]
    pairs = sum(size(block.queries) * size(block.keys) for block in own) + sum(size(node) ** 2 for node in nodes)
    calls = len(own) + sum(size(node) >= _LONG for node in nodes)
    return round_up(size(tree.places), LENGTH_STEP) ** 2 <= pairs + calls * _PAIRS_OF_CALL


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
