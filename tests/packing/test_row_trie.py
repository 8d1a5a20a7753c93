"""What rows share, held against the trees of the streams that they would make."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from peft_mux.data.packing.passes import PassRules, TaskRows, cut_into_passes, even_shares
from peft_mux.data.packing.prefixes import RowTrie, build_prefix_tree, row_trie
from tests.packing.tries import Rows, tries

PROPERTY = settings(deadline=None, max_examples=80)
LEAST = 2


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


@PROPERTY
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


@PROPERTY
@given(rows_of_sequences(), st.integers(1, 30))
def test_bundles_share_nothing_with_one_another_and_pieces_fit(rows: list[Rows], room: int) -> None:
    if (trie := trie_of(rows)) is None:
        return
    everything = range(len(rows))
    bundles = trie.bundles(everything)
    assert sorted(row for bundle in bundles for row in bundle) == list(everything)
    assert sum(map(trie.num_computed, bundles)) == trie.num_computed(everything)
    capacity = room + max(trie.num_computed([row]) for row in everything)
    for bundle in bundles:
        pieces = trie.pieces(bundle, capacity)
        assert [row for piece in pieces for row in piece] == list(bundle)
        assert all(trie.num_computed(piece) <= capacity for piece in pieces)
        if trie.num_computed(bundle) <= capacity:
            assert len(pieces) == 1


@PROPERTY
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


def test_rows_of_bundles_stay_together_where_two_tasks_fill_passes() -> None:
    alone = TaskRows([30, 30, 30])
    task = TaskRows([50] * 4, trie=row_trie(few_shot(4, prefix=40, own=10)))
    passes = cut_into_passes([alone, task], PassRules(), bound=100)
    assert sum(any(one.task == 1 for one in members) for members in passes) == 1
    assert len(passes) == 2


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


def test_replicas_get_bundles_whole_and_as_even_as_these_are() -> None:
    first, second = few_shot(4, prefix=40, own=10), few_shot(4, prefix=40, own=10, seed=1)
    mixed = [row for pair in zip(first, second, strict=True) for row in pair]
    shares = even_shares([[50] * 8], 2, tries=[row_trie(mixed)])
    assert sorted(share[0] for share in shares) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    # One bundle for two: it is cut, and each half has its beginning for itself.
    halves = even_shares([[50] * 8], 2, tries=[row_trie(few_shot(8, prefix=40, own=10))])
    assert sorted(len(share[0]) for share in halves) == [4, 4]
