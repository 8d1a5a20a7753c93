"""Layouts of a prefix tree: whose keys each node sees, in which order, and built how often."""

from __future__ import annotations

import itertools

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from peft_mux.data.packing.prefixes import PrefixTree, build_prefix_tree
from peft_mux.modeling.attention.prefix_tree import DepthFirst, TreeLayouts

CPU = torch.device("cpu")
WORDS = st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=9).map(np.array), min_size=2, max_size=8)
PROPERTY = settings(deadline=None, max_examples=60)


def trees(rows: list[np.ndarray]) -> list[PrefixTree]:
    tree = build_prefix_tree(rows, [0] * len(rows), min_tokens=1)
    return [] if tree is None else [tree]


def rows_before(tree: PrefixTree, number: int) -> list[int]:
    """Return the rows of a node's ancestors, from the root on."""
    path = [tree.nodes[one] for one in tree.path(number)[:-1]]
    return [row for node in path for row in range(node.start, node.start + node.length)]


@PROPERTY
@given(WORDS, st.sampled_from([None, 1, 2, 5]))
def test_blocks_lead_every_query_once_to_all_keys_above_its_node_that_its_window_leaves(
    rows: list[np.ndarray], window: int | None
) -> None:
    for tree in trees(rows):
        found = TreeLayouts(tree, CPU, window).depth_first
        order = np.arange(tree.num_rows) if found.order is None else found.order.numpy()
        assert sorted(order) == list(range(tree.num_rows))
        seen: dict[int, list[int]] = {row: [] for row in range(tree.num_rows)}
        for queries, keys, mask, is_blind in found.blocks:
            for place, row in enumerate(order[queries]):
                chosen = slice(None) if mask is None else (mask[place] == 0).numpy()
                seen[row] += order[keys][chosen].tolist()
                assert is_blind is None or bool(is_blind[place]) == (not chosen.any())
        at_once = by_masks(found, order)
        assert not any(seen[row] for row in at_once)
        for number, node in enumerate(tree.nodes):
            for place in range(node.length):
                row, before = node.start + place, rows_before(tree, number)
                hidden = 0 if window is None else max(len(before) + place - (window - 1), 0)
                if row in at_once:
                    assert sorted(at_once[row]) == sorted([*before, *range(node.start, row + 1)][hidden:])
                else:
                    assert seen[row] == before[hidden:]


def by_masks(found: DepthFirst, order: np.ndarray) -> dict[int, list[int]]:
    """Return the computed rows that those of trees which are computed at once see; padding sees itself alone."""
    seen = {}
    for gathered in found.gathered:
        row_of = dict(
            zip(gathered.layout.row_of_token_on_host.tolist(), order[gathered.places.numpy()].tolist(), strict=True)
        )
        for rectangle, masks in zip(gathered.layout.rectangles, gathered.masks, strict=True):
            for number, mask in enumerate([] if masks is None else masks):
                start = rectangle.start + number * rectangle.length
                for query, added in enumerate(mask[0]):
                    keys = (start + torch.nonzero(added == 0)[:, 0]).tolist()
                    if start + query in row_of:
                        seen[row_of[start + query]] = [row_of[key] for key in keys]
                    else:
                        assert keys == [start + query]
    return seen


def test_small_trees_are_computed_at_once_and_large_ones_by_blocks() -> None:
    draw = np.random.default_rng(0)

    def rows(prefix: int, own: int, count: int) -> list[np.ndarray]:
        start = draw.integers(0, 9, prefix)
        return [np.concatenate([start, draw.integers(10, 10**6, own)]) for _ in range(count)]

    given_rows = [*rows(45, 5, 4), *rows(400, 60, 8), *rows(0, 40, 1), *rows(20, 8, 2)]
    tree = build_prefix_tree(given_rows, [0] * len(given_rows))
    assert tree is not None
    found = TreeLayouts(tree, CPU).depth_first
    assert len(found.blocks) == 1
    sizes = [sum(one.num_sequences for one in own.layout.rectangles) for own in found.gathered]
    assert sizes == [2], "the questions with their answers; what is left is long"
    # Which trees these are depends on no other tree.
    alone = build_prefix_tree(given_rows[:4], [0] * 4)
    assert alone is not None
    (own,) = TreeLayouts(alone, CPU).depth_first.gathered
    (rectangle,) = own.layout.rectangles
    assert rectangle.length in [one.length for one in found.gathered[0].layout.rectangles]


@PROPERTY
@given(WORDS, st.sampled_from([None, 1, 2, 5]))
def test_gathered_keys_are_those_from_the_root_on_that_a_window_leaves(
    rows: list[np.ndarray], window: int | None
) -> None:
    for tree in trees(rows):
        found = TreeLayouts(tree, CPU, window).paths
        assert found.bounds.tolist() == [0, *itertools.accumulate(found.num_keys)]
        for number, (keys, node) in enumerate(zip(found.rows.split(list(found.num_keys)), tree.nodes, strict=True)):
            before = rows_before(tree, number)
            if window is not None:
                before = before[max(len(before) - (window - 1), 0) :]
            assert keys.tolist() == [*before, *range(node.start, node.start + node.length)]


@PROPERTY
@given(WORDS, st.sampled_from([None, 1, 2, 5]))
def test_each_row_of_a_rectangle_has_the_keys_before_its_node(rows: list[np.ndarray], window: int | None) -> None:
    for tree in trees(rows):
        layouts = TreeLayouts(tree, CPU, window)
        found, paths = layouts.before, layouts.paths
        number_at = {int(found.rectangles.row_of_token[node.start]): n for n, node in enumerate(tree.nodes)}
        by_node = paths.rows.split(list(paths.num_keys))
        for rectangle, keys in zip(found.rectangles.rectangles, found.rows.split(found.sizes), strict=True):
            starts = range(rectangle.start, rectangle.rows.stop, rectangle.length)
            for start, before in zip(starts, keys.view(rectangle.num_sequences, -1), strict=True):
                number = number_at.pop(start)
                assert before.tolist() == by_node[number][: -tree.nodes[number].length].tolist()
        assert not number_at, "every node has a place"


def test_layouts_are_built_once_for_all_layers() -> None:
    tree = build_prefix_tree([np.arange(30), np.arange(40)], [0, 0])
    assert tree is not None
    layouts = TreeLayouts(tree, CPU)
    assert layouts.bounds is layouts.bounds
    assert layouts.depth_first is layouts.within(None).depth_first
    for name in ("depth_first", "paths", "before"):
        assert getattr(layouts.within(4), name) is getattr(layouts.within(4), name)
        assert getattr(layouts.within(4), name) is not getattr(layouts, name)


def test_a_window_as_long_as_the_longest_sequence_is_none() -> None:
    tree = build_prefix_tree([np.arange(30), np.arange(40)], [0, 0])
    assert tree is not None
    layouts = TreeLayouts(tree, CPU)
    assert [layouts.within(window).window for window in (None, 40, 39)] == [None, None, 39]
