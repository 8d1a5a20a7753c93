"""Layouts of a prefix tree: which are made, and how often.

Whose keys each node sees shows in the outputs of every way to attend, in `test_attention.py`.
"""

from __future__ import annotations

import numpy as np
import torch

from peft_mux.data.packing.prefixes import build_prefix_tree
from peft_mux.modeling.attention.prefix_tree import TreeLayouts

CPU = torch.device("cpu")


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
