"""`TreeLayouts`: where the queries and keys of a prefix tree's nodes lie, built once per micro-batch for all layers.

Shape letters: U computed rows, K keys of all nodes, P rows of all rectangles.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from peft_mux.modeling.attention.prefix_tree.depth_first import DepthFirst, depth_first
from peft_mux.modeling.attention.rectangles import LENGTH_STEP, Layout, build_layout, copied_to
from peft_mux.packing.prefix_tree import PrefixTree


@dataclass(frozen=True, slots=True)
class PathKeys:
    """The keys of each node from the root on, one node after another.

    Attributes:
        rows: int64 `[K]`, the computed row of each key.
        num_keys: number of keys of each node, its own included.
        bounds: int32, where the keys of each node begin and end.
    """

    rows: torch.Tensor
    num_keys: tuple[int, ...]
    bounds: torch.Tensor


@dataclass(frozen=True, slots=True)
class KeysBefore:
    """The nodes in rectangles of near-equal length and equally many keys before them.

    Attributes:
        rectangles: the nodes without what is before them.
        rows: int64, the computed rows of the keys before the nodes, node by node in the order of the rectangles.
        num_before: for each rectangle, how many keys are before each of its nodes.
    """

    rectangles: Layout
    rows: torch.Tensor
    num_before: tuple[int, ...]

    @property
    def sizes(self) -> list[int]:
        """How many of `rows` each rectangle has."""
        shapes = zip(self.rectangles.rectangles, self.num_before, strict=True)
        return [rectangle.num_sequences * before for rectangle, before in shapes]


class TreeLayouts:
    """The layouts of one micro-batch's tree.

    Args:
        tree: the tree.
        device: where indices are needed.

    Attributes:
        lengths: tokens of each node.
        deepest: most tokens that a query sees where no window slides.
    """

    def __init__(self, tree: PrefixTree, device: torch.device) -> None:
        """Build nothing yet."""
        self.lengths = tuple(node.length for node in tree.nodes)
        self.deepest = max(node.depth + node.length for node in tree.nodes)
        self._tree, self._device = tree, device
        # By window, as a model may have layers with and without.
        self._depth_first: dict[int | None, DepthFirst] = {}
        self._paths: dict[int | None, PathKeys] = {}
        self._before: dict[int | None, KeysBefore] = {}

    def narrowed(self, window: int | None) -> int | None:
        """Return a window, or `None` where every query sees all before it anyway.

        Args:
            window: a query sees this many tokens, itself included.
        """
        return None if window is None or window >= self.deepest else window

    @cached_property
    def bounds(self) -> torch.Tensor:
        """Int32, where the computed rows of each node begin and end."""
        return self._bounds(self.lengths)

    def depth_first(self, window: int | None) -> DepthFirst:
        """Return the tree in depth-first order.

        Args:
            window: a query sees this many tokens, itself included; `None` for all before it.
        """
        if window not in self._depth_first:
            self._depth_first[window] = depth_first(self._tree, window, self._device)
        return self._depth_first[window]

    def paths(self, window: int | None) -> PathKeys:
        """Return the keys of each node from the root on, or from the first that one of its queries sees.

        Args:
            window: a query sees this many tokens, itself included; `None` for all before it.
        """
        if window not in self._paths:
            nodes = range(len(self._tree.nodes))
            rows = [np.concatenate([self._rows_before(number, window), self._own_rows(number)]) for number in nodes]
            num_keys = tuple(len(own) for own in rows)
            found = PathKeys(self._on_device(np.concatenate(rows)), num_keys, self._bounds(num_keys))
            self._paths[window] = found
        return self._paths[window]

    def before(self, window: int | None) -> KeysBefore:
        """Return the nodes in rectangles, and what each of them sees before itself.

        Args:
            window: a query sees this many tokens, itself included; `None` for all before it.
        """
        if window not in self._before:
            of_nodes = [self._rows_before(number, window) for number in range(len(self._tree.nodes))]
            num_before = tuple(len(rows) for rows in of_nodes)
            layout = build_layout(self.lengths, LENGTH_STEP, self._device, kinds=num_before)
            # Where each node's first row went tells the order of the nodes.
            starts = layout.row_of_token_on_host[[node.start for node in self._tree.nodes]]
            rows = np.concatenate([of_nodes[number] for number in np.argsort(starts)])
            of_rectangles = tuple(num_before[rectangle.first] for rectangle in layout.rectangles)
            self._before[window] = KeysBefore(layout, self._on_device(rows), of_rectangles)
        return self._before[window]

    def _own_rows(self, number: int) -> np.ndarray:
        node = self._tree.nodes[number]
        return np.arange(node.start, node.start + node.length)

    def _rows_before(self, number: int, window: int | None) -> np.ndarray:
        """Return the computed rows before a node that its first query sees."""
        path = self._tree.path(number)[:-1]
        rows = np.concatenate([np.empty(0, np.int64), *(self._own_rows(one) for one in path)])
        return rows if window is None else rows[max(len(rows) - window + 1, 0) :]

    def _bounds(self, sizes: tuple[int, ...]) -> torch.Tensor:
        bounds = torch.tensor([0, *np.cumsum(sizes)], dtype=torch.int32)
        return copied_to(bounds, self._device)

    def _on_device(self, rows: np.ndarray) -> torch.Tensor:
        return copied_to(torch.from_numpy(rows), self._device)
