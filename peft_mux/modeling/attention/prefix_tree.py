"""`Gathered`: parts of a prefix tree that share calls of attention: short nodes, and whole trees of few rows.

Shape letters: P rows of all rectangles, n nodes or trees of a rectangle, L its length.
"""

# MERGED: `DepthFirst`: a prefix tree in the order in which blocks read it, the rows below each node right behind it.
# MERGED:     nodes in the stream    a [b] [c] d [e]    where b, c and e are below a, and d is a tree of its own
# MERGED:     depth first            a [b] [c] [e] d    the block of a: keys a, queries b c e
# MERGED: A tree of few rows, such as a question and its answers, is computed at once, as a sequence whose queries a
# MERGED: mask leads to
# MERGED: what they see: that is less than a call for each of its nodes and blocks.
# MERGED: Shape letters: U computed rows.
# MERGED: `TreeLayouts`: where the queries and keys of a prefix tree's nodes lie, built once per micro-batch for all
# MERGED: layers.
# MERGED: Shape letters: U computed rows, K keys of all nodes, P rows of all rectangles.
# MERGED: Attention over a prefix tree without a copy of any key: each node's keys meet all queries below it in one
# MERGED: product.
# MERGED: What a query sees is its own node and the nodes above it. Torch's fused attention on a CPU tells the
# MERGED: logarithm of the
# MERGED: softmax's divisor beside the outputs, so each of these is computed apart, and the outputs are joined by
# MERGED: their shares of
# MERGED: the whole divisor. Backwards, each of them is given the joined outputs and the whole divisor, which yields
# MERGED: exactly its
# MERGED: part of the gradients. A shared key's gradient is so one product over all queries below, in their order.
# MERGED:     prefix of 300 tokens, 8 sequences of 30    300 x 300 causal, 240 x 300 full, 8 times 30 x 30 causal
# MERGED: Shape letters: U computed rows, P rows of all rectangles, n nodes of a rectangle, L its length, H heads, G
# MERGED: key-value
# MERGED: heads, C channels of a head.
# MERGED: Attention over a prefix tree, by whichever way knows the device and what is done to scores.
# MERGED:     on CUDA        one call, keys gathered from the root to each node (`varlen`)
# MERGED:     on a CPU       blocks that read keys where they lie (`TreeBlocks`)
# MERGED:     what remains   rectangles behind gathered keys: soft-caps, sinks, other devices and precisions
# MERGED: No query shares arithmetic with one that is not of its own tree, so a poisoned sequence harms those alone
# MERGED: that have
# MERGED: tokens in common with it, and these are of its task.
# MERGED: Shape letters: U computed rows, K keys of all nodes, P rows of all rectangles, n nodes of a rectangle, L its
# MERGED: length, H
# MERGED: heads, G key-value heads, C channels of a head.

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from peft_mux.data.packing.passes import round_up
from peft_mux.data.packing.prefixes import Node, PrefixTree
from peft_mux.modeling.attention.rows import (
    LENGTH_STEP,
    Layout,
    ToRows,
    ToTokens,
    build_layout,
    copied_to,
    heads_first,
    take_rows,
)
from peft_mux.modeling.attention.scores import Scores, attend, causal_mask
from peft_mux.modeling.attention.varlen import varlen_attention


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


_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class TreeBlocks(torch.autograd.Function):
    """`[U, H, C]` queries, `[U, G, C]` keys and values in depth-first order `-> [U, H, C]`, on a CPU."""

    @staticmethod
    def forward(
        ctx: Any, q_UHC: torch.Tensor, k_UGC: torch.Tensor, v_UGC: torch.Tensor, tree: DepthFirst, scores: Scores
    ) -> torch.Tensor:
        """Return `[U, H, C]`."""
        out_UHC, lse_UH = _within_nodes((q_UHC, k_UGC, v_UGC), tree, scores)
        for queries, keys, window in tree.blocks:
            qkv = (_heads(x) for x in (q_UHC[queries], k_UGC[keys], v_UGC[keys]))
            options = _options(None if window is None else window.added, scores, q_UHC.dtype)
            out, lse = _FORWARD(*qkv, 0.0, False, **options)
            if window is not None:
                # Torch tells 0 for a query that sees nothing, which would be a key of score 0.
                lse = lse.masked_fill(window.is_blind, -math.inf)
            _join(out_UHC[queries], lse_UH[queries], out[0].transpose(0, 1), lse[0].transpose(0, 1))
        out_UHC = out_UHC.to(q_UHC.dtype)
        ctx.save_for_backward(q_UHC, k_UGC, v_UGC, out_UHC, lse_UH)
        ctx.tree, ctx.scores = tree, scores
        return out_UHC

    @staticmethod
    def backward(ctx: Any, grad_UHC: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradients of queries, keys and values."""
        saved, scores = (grad_UHC, *ctx.saved_tensors), ctx.scores
        grads = _within_nodes_backward(saved, ctx.tree, scores)
        grad, q, k, v, out, lse = saved
        for queries, keys, window in ctx.tree.blocks:
            own = (_heads(x) for x in (grad[queries], q[queries], k[keys], v[keys], out[queries]))
            options = _options(None if window is None else window.added, scores, q.dtype)
            parts = _BACKWARD(*own, lse[queries].transpose(0, 1)[None], 0.0, False, **options)
            for total, place, part in zip(grads, (queries, keys, keys), parts, strict=True):
                total[place] += part[0].transpose(0, 1)
        return (*grads, None, None)


def _within_nodes(qkv: Sequence[torch.Tensor], tree: DepthFirst, scores: Scores) -> tuple[torch.Tensor, torch.Tensor]:
    """Return outputs `[U, H, C]` and logarithms of divisors `[U, H]` of each node's queries over its own keys.

    Those of a tree that is computed at once are over all that they see. Both are in fp32 at least, as
    several of them will be joined.
    """
    q_UHC, wide = qkv[0], torch.promote_types(qkv[0].dtype, torch.float32)
    out_UHC, lse_UH = q_UHC.new_empty(q_UHC.shape, dtype=wide), q_UHC.new_empty(q_UHC.shape[:2], dtype=wide)
    for node in tree.long_nodes:
        out, lse = _forward_causal([_heads(x[node]) for x in qkv], scores)
        out_UHC[node], lse_UH[node] = out[0].transpose(0, 1), lse[0].transpose(0, 1)
    for gathered in tree.gathered:
        parts = []
        rows = [_to_rows(x, gathered) for x in qkv]
        for rectangle, mask in zip(gathered.layout.rectangles, gathered.masks, strict=True):
            own = [heads_first(x[rectangle.rows], rectangle) for x in rows]
            parts.append(_forward_causal(own, scores, mask))
        for total, own in zip((out_UHC, lse_UH), zip(*parts, strict=True), strict=True):
            _from_rows(total, own, gathered)
    return out_UHC, lse_UH


def _within_nodes_backward(saved: Sequence[torch.Tensor], tree: DepthFirst, scores: Scores) -> list[torch.Tensor]:
    """Return what queries, keys and values get from within their nodes; `saved` is what `_BACKWARD` reads."""
    grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in saved[1:4]]
    for node in tree.long_nodes:
        *states, lse = (x[node].transpose(0, 1)[None] for x in saved)
        for total, part in zip(grads, _backward_causal(states, lse, scores), strict=True):
            total[node] = part[0].transpose(0, 1)
    for gathered in tree.gathered:
        parts = []
        *rows, lse_PH = (_to_rows(x, gathered) for x in saved)
        for rectangle, mask in zip(gathered.layout.rectangles, gathered.masks, strict=True):
            states = [heads_first(x[rectangle.rows], rectangle) for x in rows]
            lse = lse_PH[rectangle.rows].view(rectangle.num_sequences, rectangle.length, -1).transpose(1, 2)
            parts.append(_backward_causal(states, lse, scores, mask))
        for total, own in zip(grads, zip(*parts, strict=True), strict=True):
            _from_rows(total, own, gathered)
    return grads


def _forward_causal(
    qkv: Sequence[torch.Tensor], scores: Scores, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    mask = _own_mask(qkv[0].shape[2], scores) if mask is None else mask
    return _FORWARD(*qkv, 0.0, mask is None, **_options(mask, scores, qkv[0].dtype))


def _backward_causal(
    states: Sequence[torch.Tensor], lse: torch.Tensor, scores: Scores, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, ...]:
    mask = _own_mask(states[0].shape[2], scores) if mask is None else mask
    return _BACKWARD(*states, lse, 0.0, mask is None, **_options(mask, scores, states[1].dtype))


def _own_mask(length: int, scores: Scores) -> torch.Tensor | None:
    """Return what is added to the scores of a node's own keys; `None` where plain causality says it all."""
    is_seen = causal_mask(length, length, scores.window, torch.device("cpu"))
    return None if is_seen is None else torch.zeros(is_seen.shape).masked_fill_(~is_seen, -math.inf)


def _options(mask: torch.Tensor | None, scores: Scores, dtype: torch.dtype) -> dict[str, Any]:
    # Masks are of the queries' precision, or of fp32.
    if mask is not None and dtype == torch.float64:
        mask = mask.double()
    return {"attn_mask": mask, "scale": scores.scaling}


def _to_rows(x_U: torch.Tensor, gathered: Gathered) -> torch.Tensor:
    """`[U, ...] -> [P, ...]`, with zeros in the padding, which must be finite: 0 * NaN = NaN."""
    return x_U.index_select(0, gathered.place_of_row).index_fill_(0, gathered.layout.padding_rows, 0.0)


def _from_rows(total_U: torch.Tensor, parts: Sequence[torch.Tensor], gathered: Gathered) -> None:
    """Put what calls have given for the rectangles, `[n, H, L, ...]`, into its places of a stream."""
    rows = [part.transpose(1, 2).flatten(0, 1) for part in parts]
    found_P = torch.cat(rows) if len(rows) > 1 else rows[0]
    found_U = found_P.index_select(0, gathered.layout.row_of_token)
    total_U.index_copy_(0, gathered.places, found_U.to(total_U.dtype))


def _join(out_UHC: torch.Tensor, lse_UH: torch.Tensor, other_UHC: torch.Tensor, other_lse_UH: torch.Tensor) -> None:
    """Let outputs and logarithms of divisors stand for further keys, too; in place."""
    share_UH1 = torch.sigmoid(other_lse_UH - lse_UH)[..., None]
    out_UHC.lerp_(other_UHC.to(out_UHC.dtype), share_UH1)
    torch.logaddexp(lse_UH, other_lse_UH, out=lse_UH)


def _heads(x_LHC: torch.Tensor) -> torch.Tensor:
    """`[L, H, C] -> [1, H, L, C]` as a view."""
    return x_LHC.transpose(0, 1)[None]


QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def tree_varlen(qkv: QKV, tree: TreeLayouts, scores: Scores) -> torch.Tensor:
    """Attend in one call for all nodes, each behind the keys of those above it.

    Args:
        qkv: queries `[U, H, C]`, keys and values `[U, G, C]` in the precision to compute in.
        tree: the layouts of the micro-batch.
        scores: what is done to scores.

    Returns:
        Outputs `[U, H, C]`.
    """
    window = tree.narrowed(scores.window)
    keys = tree.paths(window)
    k_KGC, v_KGC = (take_rows(x, keys.rows) for x in qkv[1:])
    return varlen_attention(
        qkv[0],
        k_KGC,
        v_KGC,
        tree.bounds,
        max(tree.lengths),
        is_causal=True,
        window=scores.window,
        scaling=scores.scaling,
        keys=(keys.bounds, max(keys.num_keys)),
    )


def tree_attention(qkv: QKV, tree: TreeLayouts, scores: Scores) -> torch.Tensor:
    """Attend by blocks, or by rectangles where blocks are not enough.

    Args:
        qkv: queries `[U, H, C]`, keys `[U, G, C]` and values `[U, G, C']`, in the precision to compute in.
        tree: the layouts of the micro-batch.
        scores: what is done to scores.

    Returns:
        Outputs `[U, H, C']`.
    """
    scores = scores._replace(window=tree.narrowed(scores.window))
    has_weights_written_out = scores.softcap is not None or scores.sinks is not None
    if not has_weights_written_out and qkv[0].device.type == "cpu" and qkv[0].shape[-1] == qkv[2].shape[-1]:
        return _by_blocks(qkv, tree, scores)
    return _by_rectangles(qkv, tree, scores)


def _by_blocks(qkv: QKV, tree: TreeLayouts, scores: Scores) -> torch.Tensor:
    found = tree.depth_first(scores.window)
    if found.order is None:
        return TreeBlocks.apply(*qkv, found, scores)  # type: ignore[return-value]
    # Each way a copy, forwards and backwards, as no row goes to two places.
    no_padding = found.order[:0]
    q, k, v = (ToTokens.apply(x, found.order, no_padding) for x in qkv)
    out_UHC = TreeBlocks.apply(q, k, v, found, scores)
    return ToRows.apply(out_UHC, found.order, no_padding, len(qkv[0]))


def _by_rectangles(qkv: QKV, tree: TreeLayouts, scores: Scores) -> torch.Tensor:
    before = tree.before(scores.window)
    layout = before.rectangles
    pairs = zip(*(take_rows(x, before.rows).split(before.sizes) for x in qkv[1:]), strict=True)
    outs = []
    for (rectangle, (q, k, v)), pair in zip(layout.apart(qkv), pairs, strict=True):
        if len(pair[0]):
            # What is before them, `[n * before, G, C]`.
            earlier = (x.unflatten(0, (rectangle.num_sequences, -1)).transpose(1, 2) for x in pair)
            k, v = (torch.cat(both, dim=2) for both in zip(earlier, (k, v), strict=True))
        outs.append(attend(q, k, v, scores))
    return layout.joined(outs)
