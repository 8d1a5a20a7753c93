"""Shared prefixes of rows: runs against brute force, tries against the trees of streams, trees against sequences."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from peft_mux.data.packing.passes import PassRules, TaskRows, cut_into_passes, even_shares
from peft_mux.data.packing.prefixes import (
    PrefixTree,
    RowTrie,
    any_share_prefix,
    build_prefix_tree,
    row_trie,
    shared_runs,
    sort_rows,
)
from tests.packing.tries import Rows, hard_rows, tries

LEAST = 2


def num_computed(rows: Sequence[np.ndarray], min_tokens: int) -> int:
    """Return how many tokens of some rows are computed."""
    order, common = sort_rows(rows)
    return sum(run.end - run.start for run in shared_runs([len(rows[index]) for index in order], common, min_tokens))


# ------------------------------------------------------------------------ runs


def num_common(one: np.ndarray, other: np.ndarray) -> int:
    pairs = zip(one.tolist(), other.tolist(), strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


@given(tries(), st.data())
def test_rows_are_sorted_and_what_they_have_in_common_with_the_one_before_is_counted(
    rows: Rows, data: st.DataObject
) -> None:
    chosen = data.draw(st.sets(st.sampled_from(range(len(rows))), min_size=1))
    order, common = sort_rows(rows).of(chosen)
    assert sorted(order) == sorted(chosen)
    assert [rows[index].tolist() for index in order] == sorted(rows[index].tolist() for index in chosen)
    pairs = zip(order[:-1], order[1:], strict=True)
    assert list(common) == [0, *(num_common(rows[one], rows[other]) for one, other in pairs)]


@given(tries(), st.integers(1, 4))
def test_each_token_is_in_one_run_of_the_rows_that_have_all_before_it_in_common(rows: Rows, least: int) -> None:
    order, common = sort_rows(rows)
    runs = shared_runs([len(rows[index]) for index in order], common, least)
    for place, index in enumerate(order):
        own = sorted((run.start, run.end) for run in runs if run.first <= place < run.last)
        assert [start for start, _ in own] == [0, *(end for _, end in own[:-1])]
        assert own[-1][1] == len(rows[index])
    for run in runs:
        beginnings = {rows[index][: run.end].tobytes() for index in order[run.first : run.last]}
        assert len(beginnings) == 1
        assert run.end > run.start
        assert run.last - run.first == 1 or run.end - run.start >= least
        assert run.start == (runs[run.parent].end if run.parent >= 0 else 0)
    assert any_share_prefix(rows, least) == (num_computed(rows, least) < sum(map(len, rows)))
    every_beginning = {row[: end + 1].tobytes() for row in rows for end in range(len(row))}
    assert num_computed(rows, 1) == len(every_beginning), "without a minimum each is computed once"


# ------------------------------------------------------------------ tries of rows


@st.composite
def rows_of_sequences(draw: st.DrawFn) -> list[Rows]:
    """Draw rows of one or two sequences, as pairs of a chosen and a rejected answer are."""
    sequences = draw(tries(max_rows=8, words=3))
    rows: list[Rows] = []
    while sequences:
        count = draw(st.integers(1, 2))
        rows.append(sequences[:count])
        sequences = sequences[count:]
    return rows


def computed_by_tree(rows: list[Rows]) -> int:
    """Return how many rows the activations of a stream have."""
    sequences = [sequence for row in rows for sequence in row]
    tree = build_prefix_tree(sequences, [0] * len(sequences), min_tokens=LEAST)
    return sum(map(len, sequences)) if tree is None else tree.num_rows


def length_of(row: Rows) -> int:
    return sum(map(len, row))


def trie_of(rows: list[Rows]) -> RowTrie | None:
    return row_trie(rows, min_tokens=LEAST)


@given(rows_of_sequences(), st.data())
def test_rows_compute_in_a_pass_what_its_tree_has(rows: list[Rows], data: st.DataObject) -> None:
    trie = trie_of(rows)
    chosen = sorted(data.draw(st.sets(st.sampled_from(range(len(rows))), min_size=1)))
    wanted = computed_by_tree([rows[index] for index in chosen])
    if trie is None:
        assert wanted == sum(length_of(rows[index]) for index in chosen)
        return
    assert trie.num_computed(chosen) == wanted
    assert list(trie.computed(chosen)) == chosen
    part = trie.of_rows(chosen)
    assert part.computed(range(len(chosen))) == dict(enumerate(trie.computed(chosen).values()))


@given(rows_of_sequences(), st.integers(1, 30))
def test_bundles_share_nothing_with_one_another_and_items_fit(rows: list[Rows], room: int) -> None:
    if (trie := trie_of(rows)) is None:
        return
    everything = range(len(rows))
    bundles = trie.bundles(everything)
    assert sorted(row for bundle in bundles for row in bundle) == list(everything)
    assert sum(map(trie.num_computed, bundles)) == trie.num_computed(everything)
    capacity = room + max(trie.num_computed([row]) for row in everything)
    items = trie.items(everything, capacity)
    assert sorted(row for item in items for row in item) == list(everything)
    assert all(trie.num_computed(item) <= capacity for item in items)
    assert all(sorted(bundle) in items for bundle in bundles if trie.num_computed(bundle) <= capacity)


@given(st.lists(rows_of_sequences(), min_size=1, max_size=3), st.integers(1, 60), st.integers(1, 6))
def test_passes_hold_every_row_once_and_say_what_their_trees_compute(
    tasks: list[list[Rows]], bound: int, num_passes: int
) -> None:
    given_rows = [TaskRows([length_of(row) for row in own], stay_whole=True, trie=trie_of(own)) for own in tasks]
    for meant in (None, num_passes):
        passes = cut_into_passes(given_rows, PassRules(), bound=bound, num_passes=meant)
        found = sorted((one.task, one.index) for members in passes for one in members)
        assert found == [(task, row) for task, own in enumerate(tasks) for row in range(len(own))]
        for members in passes:
            assert members == sorted(members)
            computed = sum(one.num_computed for one in members)
            by_tree = [
                computed_by_tree([own[one.index] for one in members if one.task == task])
                for task, own in enumerate(tasks)
            ]
            assert computed == sum(by_tree)
            assert computed <= bound or len(members) == 1


def few_shot(count: int, prefix: int, own: int, seed: int = 0) -> list[Rows]:
    rng = np.random.default_rng(seed)
    shots = rng.integers(1, 1000, size=prefix)
    return [[np.concatenate([shots, rng.integers(1, 1000, size=own)])] for _ in range(count)]


def test_a_bundle_stays_in_one_pass_where_it_fits_and_else_each_piece_has_its_beginning() -> None:
    rows = few_shot(5, prefix=40, own=10)
    task = TaskRows([50] * 5, trie=row_trie(rows))
    (whole,) = cut_into_passes([task], PassRules(), bound=100)
    assert [one.num_computed for one in whole] == [50, 10, 10, 10, 10]
    cut = cut_into_passes([task], PassRules(), bound=75)
    assert sorted(sum(one.num_computed for one in members) for members in cut) == [60, 70]
    # Replicas get bundles whole; one bundle for two is cut, and each half has its beginning for itself.
    mixed = [row for pair in zip(few_shot(4, 40, 10), few_shot(4, 40, 10, seed=1), strict=True) for row in pair]
    shares = even_shares([[50] * 8], 2, tries=[row_trie(mixed)])
    assert sorted(share[0] for share in shares) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    halves = even_shares([[50] * 8], 2, tries=[row_trie(few_shot(8, 40, 10))])
    assert sorted(len(share[0]) for share in halves) == [4, 4]


def test_long_rows_that_are_cut_into_parts_share_nothing() -> None:
    rows = few_shot(3, prefix=40, own=10)
    rows[1] = [np.concatenate([rows[1][0], np.arange(60)])]
    task = TaskRows([50, 110, 50], trie=row_trie(rows))
    rules = PassRules(split_long_sequences=True, chunk_size=8)
    passes = cut_into_passes([task], rules, bound=64)
    parts = [one for members in passes for one in members if one.index == 1]
    assert len(parts) > 1
    assert all(one.shared == 0 for one in parts)
    assert sum(one.num_computed for members in passes for one in members) == 110 + 60


# ---------------------------------------------------------------- trees of streams


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
    assert len(tree.row_of_token) == len(stream)
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
        # All that a sequence's last token attends to is the sequence itself, whichever row its tokens are computed for.
        assert before[own[-1]].tolist() == own.tolist()
        assert stream[tree.computed[own]].tolist() == stream[start:end].tolist()
        owners = np.searchsorted(offsets, tree.computed[own], side="right") - 1
        allowed = {groups[owner] for owner in owners}
        assert allowed == {group}
        assert group is not None or (tree.computed[own] == np.arange(start, end)).all()


@given(streams(), st.integers(1, 4))
def test_computed_rows_stand_for_all_tokens_behind_the_same_tokens(
    stream: tuple[Rows, list[int | None]], least: int
) -> None:
    rows, groups = stream
    tree = build_prefix_tree(rows, groups, min_tokens=least)
    expected = sum(len(row) for row, group in zip(rows, groups, strict=True) if group is None)
    for group in {group for group in groups if group is not None}:
        own = [row for row, other in zip(rows, groups, strict=True) if other == group]
        expected += num_computed(own, least)
    if tree is None:
        assert expected == sum(map(len, rows))
        return
    check_tree(tree, rows, groups)
    assert tree.num_rows == expected < len(tree.row_of_token)


def test_the_cases_that_are_easy_to_get_wrong_hold() -> None:
    rows = hard_rows()
    groups: list[int | None] = [0] * len(rows)
    tree = build_prefix_tree(rows, groups, min_tokens=2)
    assert tree is not None
    check_tree(tree, rows, groups)
    assert build_prefix_tree([np.arange(20)] * 3, [0, 1, None]) is None, "different groups share nothing"
    deep = [np.arange(length) for length in range(1, 2001)]
    assert num_computed(deep, 1) == 2000, "rows that are each a beginning of the next nest to any depth"
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
