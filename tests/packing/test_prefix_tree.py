"""The prefix tree of a stream: properties against the sequences that it is of."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from peft_mux.data.packing.prefixes import PrefixTree, build_prefix_tree, num_computed, sort_rows
from tests.packing.tries import Rows, hard_rows, tries

PROPERTY = settings(deadline=None, max_examples=150)


@st.composite
def streams(draw: st.DrawFn) -> tuple[Rows, list[int | None]]:
    tasks = draw(st.lists(tries(max_rows=5), min_size=1, max_size=3))
    groups = [draw(st.sampled_from([number, number, None])) for number in range(len(tasks))]
    return [row for own in tasks for row in own], [groups[number] for number, own in enumerate(tasks) for _ in own]


def check_tree(tree: PrefixTree, rows: Rows, groups: list[int | None]) -> None:
    """Check that computed rows stand for the tokens of all sequences, and nodes for what comes before each row."""
    stream = np.concatenate(rows)
    offsets = np.cumsum([0, *map(len, rows)])
    assert (np.diff(tree.computed) > 0).all()
    assert tree.num_tokens == len(stream)
    assert [node.start for node in tree.nodes] == [0, *np.cumsum([node.length for node in tree.nodes])][:-1]
    before = {}
    for number, node in enumerate(tree.nodes):
        path = [tree.nodes[one] for one in tree.path(number)]
        own = np.concatenate([np.arange(one.start, one.start + one.length) for one in path])
        assert node.length > 0
        assert node.parent < number
        assert len(own) == node.depth + node.length
        before |= {row: own[: place + 1] for place, row in list(enumerate(own))[node.depth :]}
    for start, end, group in zip(offsets[:-1], offsets[1:], groups, strict=True):
        own = tree.row_of_token[start:end]
        # All that a sequence's last token attends to is the sequence itself, whoever's rows stand for it.
        assert before[own[-1]].tolist() == own.tolist()
        assert stream[tree.computed[own]].tolist() == stream[start:end].tolist()
        owners = np.searchsorted(offsets, tree.computed[own], side="right") - 1
        allowed = {groups[owner] for owner in owners}
        assert allowed == {group}
        assert group is not None or (tree.computed[own] == np.arange(start, end)).all()


@PROPERTY
@given(streams(), st.integers(1, 4))
def test_computed_rows_stand_for_all_tokens_behind_the_same_tokens(
    stream: tuple[Rows, list[int | None]], least: int
) -> None:
    rows, groups = stream
    tree = build_prefix_tree(rows, groups, min_tokens=least)
    expected = sum(len(row) for row, group in zip(rows, groups, strict=True) if group is None)
    for group in {group for group in groups if group is not None}:
        own = [row for row, other in zip(rows, groups, strict=True) if other == group]
        order, common = sort_rows(own)
        expected += num_computed([len(own[index]) for index in order], common, least)
    if tree is None:
        assert expected == sum(map(len, rows))
        return
    check_tree(tree, rows, groups)
    assert tree.num_rows == expected < tree.num_tokens


def test_the_cases_that_are_easy_to_get_wrong_hold() -> None:
    rows = hard_rows()
    groups: list[int | None] = [0] * len(rows)
    tree = build_prefix_tree(rows, groups, min_tokens=2)
    assert tree is not None
    check_tree(tree, rows, groups)
    # The identical row and the one that another begins with have no row of their own.
    assert [tuple(node) for node in tree.nodes] == [
        (0, 3, -1, 0),
        (3, 2, 0, 3),
        (5, 2, -1, 0),
        (7, 2, 0, 3),
        (9, 3, -1, 0),
        (12, 3, 1, 5),
        (15, 1, -1, 0),
        (16, 1, 2, 2),
    ]


def test_tasks_begin_among_the_computed_rows_where_their_own_rows_do() -> None:
    rows = [np.arange(20), np.arange(22), np.arange(20), np.arange(25)]
    tree = build_prefix_tree(rows, [0, 0, 1, 1])
    assert tree is not None
    assert tree.row_offsets((0, 42, 87)) == (0, 22, 47)


def test_sequences_of_different_groups_share_nothing_however_alike() -> None:
    rows = [np.arange(20)] * 3
    assert build_prefix_tree(rows, [0, 1, None]) is None
