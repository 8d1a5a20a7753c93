"""Attention over a prefix tree: sequences with a common prefix share its rows.

What a query sees is its own node and the nodes above it. There are three ways to compute it:

    on CUDA        one call, keys gathered from the root to each node (`tree_varlen`)
    on a CPU       blocks that read keys where they are (`TreeBlocks`)
    what remains   rectangles behind gathered keys: soft-caps, sinks, other devices and precisions (`tree_rectangles`)

Blocks copy no key: each node's keys meet all queries below it in one product. Torch's fused attention on a CPU returns
the logarithm of the softmax's divisor with the outputs, so each product is computed by itself, and the outputs are
joined by their shares of the whole divisor. Backwards, each product gets the joined outputs and the whole divisor,
which yields exactly its part of the gradients. So a shared key's gradient is one product over all queries below, in
their order::

    prefix of 300 tokens, 8 sequences of 30    300 x 300 causal, 240 x 300 full, 8 times 30 x 30 causal

Blocks read the tree depth first, the rows below each node right behind it::

    nodes in the stream    a [b] [c] d [e]    where b, c and e are below a, and d is a tree by itself
    depth first            a [b] [c] [e] d    the block of a: keys a, queries b c e

A tree of few rows, such as a question and its answers, is computed at once, as a sequence whose queries a mask leads to
what they see: that is less than a call for each of its nodes and blocks. Short nodes share calls in rectangles.

No query shares arithmetic with one of another tree, so a poisoned sequence harms only those that have tokens in common
with it, and these belong to its task.

Shape letters: U computed rows, K keys of all nodes, P rows of all rectangles, n nodes or trees of a rectangle, L its
length, H heads, G key-value heads, C channels of a head.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from peft_mux.data.packing.passes import round_up
from peft_mux.data.packing.prefixes import Node, PrefixTree
from peft_mux.modeling.attention.rows import (
    LENGTH_STEP,
    QKV,
    Layout,
    Scores,
    ToRows,
    ToTokens,
    attend,
    build_layout,
    copied_to,
    take_rows,
    visible_mask,
)
from peft_mux.modeling.attention.varlen import varlen_attention

_LONG = 32
"""Tokens from which on a node fills a call of its own, and copying it into a rectangle costs more than that call."""
_PAIRS_OF_CALL = 2048
"""Pairs of a query and a key whose scores take about as long as one more call, with what joins its outputs."""

# ----------------------------------------------------------------------- layouts


class Block(NamedTuple):
    """Queries that see keys of one node: those of the nodes below it.

    Attributes:
        queries: their places in depth-first order.
        keys: places there of the node's keys; only of its last ones, if a window hides the others from all queries.
        mask: fp32, added to the score of each query and key: 0 if it is seen, else minus infinity; `None` if a window
            hides nothing.
        is_blind: for each query whether the window hides all keys from it; `None` as `mask`.
    """

    queries: slice
    keys: slice
    mask: torch.Tensor | None
    is_blind: torch.Tensor | None


class Gathered(NamedTuple):
    """Nodes, or whole trees, that share calls in rectangles of near-equal length.

    Attributes:
        layout: the rectangles of their tokens.
        places: int64, the place of each of their tokens in depth-first order.
        place_of_row: int64 `[P]`, the place whose token each row of the rectangles takes; any for padding.
        masks: for each rectangle `[n, 1, L, L]`, fp32, what is added to scores: 0 if a query sees a key, else minus
            infinity; `None` if each query sees those before it, as far as a window leaves them.
    """

    layout: Layout
    places: torch.Tensor
    place_of_row: torch.Tensor
    masks: tuple[torch.Tensor | None, ...]


class DepthFirst(NamedTuple):
    """A tree in depth-first order, in which all rows below a node follow it directly.

    Attributes:
        order: int64 `[U]`, the computed row at each place; `None` if rows are in this order already.
        long_nodes: places of nodes of trees that are long enough for a call of their own, and are read where they are.
        gathered: the other nodes, and whole trees of few rows.
        blocks: what the nodes see of those above them, parents before children; of whole trees none.
    """

    order: torch.Tensor | None
    long_nodes: tuple[slice, ...]
    gathered: tuple[Gathered, ...]
    blocks: tuple[Block, ...]


class TreeLayouts:
    """Where the queries and keys of a prefix tree's nodes are, built once per micro-batch for all layers.

    Args:
        tree: the tree.
        device: where indices are needed.
        window: a query sees this many tokens, itself included; `None` for all before it.

    Attributes:
        lengths: tokens of each node.
        window: as given.
    """

    def __init__(self, tree: PrefixTree, device: torch.device, window: int | None = None) -> None:
        self.lengths, self.window = tuple(node.length for node in tree.nodes), window
        self._tree, self._device = tree, device
        self._deepest = max(node.depth + node.length for node in tree.nodes)
        # A model may have layers with and without a window.
        self._by_window: dict[int | None, TreeLayouts] = {window: self}

    def within(self, window: int | None) -> TreeLayouts:
        """Return the layouts for a window; a window as long as the longest sequence is none."""
        window = None if window is None or window >= self._deepest else window
        if window not in self._by_window:
            self._by_window[window] = TreeLayouts(self._tree, self._device, window)
        return self._by_window[window]

    @cached_property
    def bounds(self) -> torch.Tensor:
        """Int32, where the computed rows of each node begin and end."""
        return copied_to(torch.tensor([0, *np.cumsum(self.lengths)], dtype=torch.int32), self._device)

    @cached_property
    def depth_first(self) -> DepthFirst:
        """The tree in depth-first order."""
        nodes, window, device = self._tree.nodes, self.window, self._device
        children: list[list[int]] = [[] for _ in nodes]
        stack = []
        for number, node in reversed(list(enumerate(nodes))):
            (stack if node.parent < 0 else children[node.parent]).append(number)
        visited: list[int] = []  # numbers of the nodes, depth first
        while stack:
            visited.append(stack.pop())
            stack += children[visited[-1]]
        ends = np.cumsum([nodes[number].length for number in visited]).tolist()
        place_of = {number: slice(end - nodes[number].length, end) for number, end in zip(visited, ends, strict=True)}
        blocks = list(_blocks(nodes, visited, window, device))
        # Trees that are computed at once, and the places of their rows.
        whole: list[tuple[slice, np.ndarray]] = []
        at_once: set[int] = set()
        unshared: set[int] = set()
        roots = [place for place, number in enumerate(visited) if nodes[number].parent < 0]
        for first, last in pairwise([*roots, len(visited)]):
            members = visited[first:last]
            if len(members) == 1:
                # Goes into a rectangle, as where no sequence shares tokens, so that it has the same bits there.
                unshared.add(place_of[members[0]].start)
                continue
            places = slice(place_of[members[0]].start, place_of[members[-1]].stop)
            blocks_of_tree = [block for block in blocks if places.start <= block.queries.start < places.stop]
            lengths = [nodes[number].length for number in members]
            pairs = sum(_size(block.queries) * _size(block.keys) for block in blocks_of_tree)
            pairs += sum(length**2 for length in lengths)
            num_calls = len(blocks_of_tree) + sum(length >= _LONG for length in lengths)
            # Depends on nothing but the tree itself.
            if round_up(_size(places), LENGTH_STEP) ** 2 <= pairs + num_calls * _PAIRS_OF_CALL:
                whole.append((places, _tree_mask(nodes, members, window)))
                at_once.update(range(places.start, places.stop))
        others = [place for place in place_of.values() if place.start not in at_once]
        long = [place for place in others if _size(place) >= _LONG and place.start not in unshared]
        short = [place for place in others if place not in long]
        gathered = []
        if short:
            gathered.append(_gather(short, [None] * len(short), device))
        if whole:
            gathered.append(_gather([place for place, _ in whole], [mask for _, mask in whole], device))
        order = np.concatenate([_rows_of(nodes[number]) for number in visited])
        return DepthFirst(
            None if visited == sorted(visited) else copied_to(torch.from_numpy(order), device),
            tuple(long),
            tuple(gathered),
            tuple(block for block in blocks if block.queries.start not in at_once),
        )

    @cached_property
    def paths(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """The keys of each node from the root on, or from the first that one of its queries sees, node by node.

        Int64 `[K]`, the computed row of each key; int32, where the keys of each node begin and end; and the most keys
        that a node has, its own included.
        """
        rows = [
            np.concatenate([before, _rows_of(node)])
            for before, node in zip(self._rows_before, self._tree.nodes, strict=True)
        ]
        num_keys = list(map(len, rows))
        bounds = torch.tensor([0, *np.cumsum(num_keys)], dtype=torch.int32)
        on_device = copied_to(torch.from_numpy(np.concatenate(rows)), self._device)
        return on_device, copied_to(bounds, self._device), max(num_keys)

    @cached_property
    def before(self) -> tuple[Layout, torch.Tensor, list[int]]:
        """The nodes in rectangles of near-equal length and equally many keys before them, and these keys.

        The rectangles have the nodes without what is before them. Then int64, the computed rows of the keys before the
        nodes, node by node in the order of the rectangles; and how many of these each rectangle has.
        """
        rows_before = self._rows_before
        layout = build_layout(self.lengths, LENGTH_STEP, self._device, kinds=[len(rows) for rows in rows_before])
        # Where each node's first row went gives the order of the nodes.
        starts = layout.row_of_token_on_host[[node.start for node in self._tree.nodes]]
        rows = np.concatenate([rows_before[number] for number in np.argsort(starts)])
        sizes = [rectangle.num_sequences * len(rows_before[rectangle.first]) for rectangle in layout.rectangles]
        return layout, copied_to(torch.from_numpy(rows), self._device), sizes

    @cached_property
    def _rows_before(self) -> list[np.ndarray]:
        """The computed rows before each node that its first query sees."""
        rows_before = []
        for number in range(len(self._tree.nodes)):
            above = [_rows_of(self._tree.nodes[parent]) for parent in self._tree.path(number)[:-1]]
            rows = np.concatenate([np.empty(0, np.int64), *above])
            rows_before.append(rows if self.window is None else rows[max(len(rows) - self.window + 1, 0) :])
        return rows_before


def _rows_of(node: Node) -> np.ndarray:
    return np.arange(node.start, node.start + node.length)


def _size(part: slice) -> int:
    return part.stop - part.start


def _blocks(nodes: Sequence[Node], visited: Sequence[int], window: int | None, device: torch.device) -> Iterator[Block]:
    # Rows of a node and of all below it; parents come before children.
    num_rows = [node.length for node in nodes]
    for number, node in reversed(list(enumerate(nodes))):
        if node.parent >= 0:
            num_rows[node.parent] += num_rows[number]
    positions = np.concatenate([np.arange(nodes[number].length) + nodes[number].depth for number in visited])
    start = 0
    for number in visited:
        end, last = start + nodes[number].length, start + num_rows[number]
        # The first query below the node is one token behind its last key.
        first = start if window is None else max(start, end - window + 1)
        if last > end and first < end:
            queries, keys, mask, is_blind = positions[end:last], positions[first:end], None, None
            if window is not None and queries.max() - keys[0] >= window:
                is_seen = torch.from_numpy(queries[:, None] - keys[None, :] < window)
                mask = copied_to(torch.zeros(is_seen.shape).masked_fill_(~is_seen, -math.inf), device)
                is_blind = copied_to(~is_seen.any(dim=1), device)
            yield Block(slice(end, last), slice(first, end), mask, is_blind)
        start = end


def _tree_mask(nodes: Sequence[Node], members: Sequence[int], window: int | None) -> np.ndarray:
    """Return which keys each query of a tree sees, booleans `[L, L]`; its members are in depth-first order."""
    node_L = np.repeat(np.arange(len(members)), [nodes[number].length for number in members])
    position_L = np.concatenate([np.arange(nodes[number].length) + nodes[number].depth for number in members])
    index_of = {number: index for index, number in enumerate(members)}
    is_above = np.eye(len(members), dtype=bool)
    for index, number in enumerate(members[1:], start=1):
        is_above[index] |= is_above[index_of[nodes[number].parent]]
    distance = position_L[:, None] - position_L[None, :]
    return is_above[node_L[:, None], node_L[None, :]] & (distance >= 0) & (window is None or distance < window)


def _gather(parts: Sequence[slice], seen: Sequence[np.ndarray | None], device: torch.device) -> Gathered:
    """Gather nodes, or trees.

    Args:
        parts: places of their tokens in depth-first order.
        seen: for each tree which keys its queries see (`_tree_mask`); `None` for each node.
        device: where indices and masks are needed.
    """
    lengths = [_size(part) for part in parts]
    layout = build_layout(lengths, LENGTH_STEP, device)
    places = np.concatenate([np.arange(part.start, part.stop) for part in parts])
    place_of_row = np.zeros(layout.num_rows, dtype=np.int64)
    place_of_row[layout.row_of_token_on_host] = places
    first_rows = layout.row_of_token_on_host[np.cumsum([0, *lengths[:-1]])]
    by_first_row = dict(zip(first_rows.tolist(), seen, strict=True))
    masks: list[torch.Tensor | None] = []
    for rectangle in layout.rectangles:
        seen_n = [by_first_row[row] for row in range(rectangle.start, rectangle.rows.stop, rectangle.length)]
        if seen_n[0] is None:
            masks.append(None)
            continue
        # Rows of padding see themselves, as a query that sees nothing has no softmax.
        is_seen = np.tile(np.eye(rectangle.length, dtype=bool), (len(seen_n), 1, 1, 1))
        for rows, mask in zip(is_seen, seen_n, strict=True):
            assert mask is not None, "rectangles are of nodes or of trees"
            rows[0, : len(mask), : len(mask)] = mask
        added = torch.zeros(is_seen.shape).masked_fill_(torch.from_numpy(~is_seen), -math.inf)
        masks.append(copied_to(added, device))
    places_on_device, place_of_row_on_device = (
        copied_to(torch.from_numpy(numbers), device) for numbers in (places, place_of_row)
    )
    return Gathered(layout, places_on_device, place_of_row_on_device, tuple(masks))


# --------------------------------------------------------------------- attention


def tree_varlen(qkv: QKV, tree: TreeLayouts, scores: Scores) -> torch.Tensor:
    """Attend in one call for all nodes, each behind the keys of those above it.

    Args:
        qkv: queries `[U, H, C]`, keys and values `[U, G, C]` in the precision to compute in.
        tree: the layouts of the micro-batch.
        scores: what is done to scores.

    Returns:
        Outputs `[U, H, C]`.
    """
    rows, bounds, longest = tree.within(scores.window).paths
    k_KGC, v_KGC = (take_rows(x, rows) for x in qkv[1:])
    options: dict[str, Any] = {"is_causal": True, "window": scores.window, "scaling": scores.scaling}
    keys = bounds, longest
    return varlen_attention(qkv[0], k_KGC, v_KGC, tree.bounds, max(tree.lengths), keys=keys, **options)


def tree_attention(qkv: QKV, tree: TreeLayouts, scores: Scores) -> torch.Tensor:
    """Attend by blocks, or by rectangles if blocks are not enough.

    Args:
        qkv: queries `[U, H, C]`, keys `[U, G, C]` and values `[U, G, C']`, in the precision to compute in.
        tree: the layouts of the micro-batch.
        scores: what is done to scores.

    Returns:
        Outputs `[U, H, C']`.
    """
    q_UHC, _, v_UGC = qkv
    needs_weights = scores.softcap is not None or scores.sinks is not None
    if needs_weights or q_UHC.device.type != "cpu" or q_UHC.shape[-1] != v_UGC.shape[-1]:
        return tree_rectangles(qkv, tree, scores)
    tree = tree.within(scores.window)
    depth_first, scores = tree.depth_first, scores._replace(window=tree.window)
    order = depth_first.order
    if order is None:
        return TreeBlocks.apply(*qkv, depth_first, scores)  # type: ignore[return-value]
    # Each way a copy, forwards and backwards, as no row goes to two places.
    no_padding = order[:0]
    q, k, v = (ToTokens.apply(x, order, no_padding) for x in qkv)
    return ToRows.apply(TreeBlocks.apply(q, k, v, depth_first, scores), order, no_padding, len(q_UHC))


def tree_rectangles(qkv: QKV, tree: TreeLayouts, scores: Scores) -> torch.Tensor:
    """Attend as `tree_attention` does, by rectangles behind gathered keys."""
    tree = tree.within(scores.window)
    rectangles, rows, sizes = tree.before
    gathered = zip(*(take_rows(x, rows).split(sizes) for x in qkv[1:]), strict=True)
    outs = []
    for (rectangle, (q, k, v)), earlier in zip(rectangles.apart(qkv), gathered, strict=True):
        if len(earlier[0]):
            # The keys and values before the nodes, `[n * before, G, C]`.
            k, v = (
                torch.cat([before.unflatten(0, (rectangle.num_sequences, -1)).transpose(1, 2), x], dim=2)
                for before, x in zip(earlier, (k, v), strict=True)
            )
        mask = visible_mask(q.shape[2], k.shape[2], tree.window, q.device)
        outs.append(attend(q, k, v, scores, mask))
    return rectangles.joined(outs)


_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class TreeBlocks(torch.autograd.Function):
    """`[U, H, C]` queries, `[U, G, C]` keys and values in depth-first order `-> [U, H, C]`, on a CPU."""

    @staticmethod
    def forward(
        ctx: Any, q_UHC: torch.Tensor, k_UGC: torch.Tensor, v_UGC: torch.Tensor, tree: DepthFirst, scores: Scores
    ) -> torch.Tensor:
        """Return `[U, H, C]`."""
        qkv = (q_UHC, k_UGC, v_UGC)
        # In fp32 at least, as outputs of several products will be joined.
        wide = torch.promote_types(q_UHC.dtype, torch.float32)
        out_UHC, lse_UH = q_UHC.new_empty(q_UHC.shape, dtype=wide), q_UHC.new_empty(q_UHC.shape[:2], dtype=wide)
        for node in tree.long_nodes:
            is_causal, options = _options(scores, q_UHC.dtype, None, _size(node))
            out, lse = _FORWARD(*(_heads_first(x[node]) for x in qkv), 0.0, is_causal, **options)
            out_UHC[node], lse_UH[node] = out[0].transpose(0, 1), lse[0].transpose(0, 1)
        for gathered in tree.gathered:
            rows, parts = [_to_rows(x, gathered) for x in qkv], []
            for rectangle, mask in zip(gathered.layout.rectangles, gathered.masks, strict=True):
                is_causal, options = _options(scores, q_UHC.dtype, mask, rectangle.length)
                states = (rectangle.heads_first(x[rectangle.rows]) for x in rows)
                parts.append(_FORWARD(*states, 0.0, is_causal, **options))
            for total, of_rectangles in zip((out_UHC, lse_UH), zip(*parts, strict=True), strict=True):
                _from_rows(total, of_rectangles, gathered)
        for queries, keys, mask, is_blind in tree.blocks:
            _, options = _options(scores, q_UHC.dtype, mask)
            states = map(_heads_first, (q_UHC[queries], k_UGC[keys], v_UGC[keys]))
            out, lse = _FORWARD(*states, 0.0, False, **options)
            if is_blind is not None:
                # Torch returns 0 for a query that sees nothing, which would be a key of score 0.
                lse = lse.masked_fill(is_blind, -math.inf)
            # Join the outputs by their shares of the whole divisor.
            more_UH = lse[0].transpose(0, 1)
            share_UH1 = torch.sigmoid(more_UH - lse_UH[queries])[..., None]
            out_UHC[queries].lerp_(out[0].transpose(0, 1).to(wide), share_UH1)
            torch.logaddexp(lse_UH[queries], more_UH, out=lse_UH[queries])
        out_UHC = out_UHC.to(q_UHC.dtype)
        ctx.save_for_backward(q_UHC, k_UGC, v_UGC, out_UHC, lse_UH)
        ctx.tree, ctx.scores = tree, scores
        return out_UHC

    @staticmethod
    def backward(ctx: Any, grad_UHC: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradients of queries, keys and values."""
        tree, scores = ctx.tree, ctx.scores
        saved = grad, q, k, v, out, lse = (grad_UHC, *ctx.saved_tensors)
        grads = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v)]
        for node in tree.long_nodes:
            is_causal, options = _options(scores, q.dtype, None, _size(node))
            parts = _BACKWARD(*(_heads_first(x[node]) for x in saved), 0.0, is_causal, **options)
            for total, part in zip(grads, parts, strict=True):
                total[node] = part[0].transpose(0, 1)
        for gathered in tree.gathered:
            parts = []
            *rows, lse_PH = (_to_rows(x, gathered) for x in saved)
            for rectangle, mask in zip(gathered.layout.rectangles, gathered.masks, strict=True):
                is_causal, options = _options(scores, q.dtype, mask, rectangle.length)
                states = (rectangle.heads_first(x[rectangle.rows]) for x in rows)
                lse_nHL = lse_PH[rectangle.rows].view(rectangle.num_sequences, rectangle.length, -1).transpose(1, 2)
                parts.append(_BACKWARD(*states, lse_nHL, 0.0, is_causal, **options))
            for total, of_rectangles in zip(grads, zip(*parts, strict=True), strict=True):
                _from_rows(total, of_rectangles, gathered)
        for queries, keys, mask, _ in tree.blocks:
            _, options = _options(scores, q.dtype, mask)
            states = map(_heads_first, (grad[queries], q[queries], k[keys], v[keys], out[queries], lse[queries]))
            parts = _BACKWARD(*states, 0.0, False, **options)
            for total, place, part in zip(grads, (queries, keys, keys), parts, strict=True):
                total[place] += part[0].transpose(0, 1)
        return (*grads, None, None)


def _options(
    scores: Scores, dtype: torch.dtype, mask: torch.Tensor | None, length: int | None = None
) -> tuple[bool, dict[str, Any]]:
    """Return whether a fused call is causal, and its further arguments.

    Args:
        scores: what is done to scores.
        dtype: precision of the queries; masks have this one, or fp32.
        mask: what is added to scores; `None` for nothing.
        length: of tokens that attend to one another, their number: without a mask they see those before them.
    """
    if mask is None and length is not None:
        is_seen = visible_mask(length, length, scores.window, torch.device("cpu"))
        if is_seen is None:
            return True, {"attn_mask": None, "scale": scores.scaling}
        mask = torch.zeros(is_seen.shape).masked_fill_(~is_seen, -math.inf)
    if mask is not None and dtype == torch.float64:
        mask = mask.double()
    return False, {"attn_mask": mask, "scale": scores.scaling}


def _to_rows(x_U: torch.Tensor, gathered: Gathered) -> torch.Tensor:
    """`[U, ...] -> [P, ...]`, with zeros in the padding, which must be finite: 0 * NaN = NaN."""
    return x_U.index_select(0, gathered.place_of_row).index_fill_(0, gathered.layout.padding_rows, 0.0)


def _from_rows(total_U: torch.Tensor, parts: Sequence[torch.Tensor], gathered: Gathered) -> None:
    """Put what calls have given for the rectangles, `[n, H, L, ...]`, into its places of a stream."""
    rows = [part.transpose(1, 2).flatten(0, 1) for part in parts]
    x_P = torch.cat(rows) if len(rows) > 1 else rows[0]
    x_T = x_P.index_select(0, gathered.layout.row_of_token)
    total_U.index_copy_(0, gathered.places, x_T.to(total_U.dtype))


def _heads_first(x_LH: torch.Tensor) -> torch.Tensor:
    """`[L, H, ...] -> [1, H, L, ...]` as a view."""
    return x_LH.transpose(0, 1)[None]
