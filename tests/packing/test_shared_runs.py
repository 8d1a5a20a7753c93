"""Shared runs: the trie of sorted rows, held against brute force."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from peft_mux.data.packing.prefixes import begin_alike, num_computed, shared_runs, sort_rows
from tests.packing.tries import Rows, hard_rows, tries

PROPERTY = settings(deadline=None, max_examples=150)


def num_common(one: np.ndarray, other: np.ndarray) -> int:
    pairs = zip(one.tolist(), other.tolist(), strict=False)
    return next((place for place, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))


def sorted_lengths(rows: Rows) -> list[int]:
    return [len(rows[index]) for index in sort_rows(rows).order]


@PROPERTY
@given(tries(), st.data())
def test_rows_are_sorted_and_what_any_of_them_have_in_common_with_the_one_before_is_counted(
    rows: Rows, data: st.DataObject
) -> None:
    chosen = data.draw(st.sets(st.sampled_from(range(len(rows))), min_size=1))
    order, common = sort_rows(rows).of(chosen)
    assert sorted(order) == sorted(chosen)
    assert [rows[index].tolist() for index in order] == sorted(rows[index].tolist() for index in chosen)
    pairs = zip(order[:-1], order[1:], strict=True)
    assert list(common) == [0, *(num_common(rows[one], rows[other]) for one, other in pairs)]


@PROPERTY
@given(tries(), st.integers(1, 4))
def test_each_token_lies_in_one_run_of_the_rows_that_have_all_before_it_in_common(rows: Rows, least: int) -> None:
    order, common = sort_rows(rows)
    runs = shared_runs(sorted_lengths(rows), common, least)
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


@PROPERTY
@given(tries())
def test_without_a_minimum_every_different_beginning_is_computed_once(rows: Rows) -> None:
    beginnings = {row[: end + 1].tobytes() for row in rows for end in range(len(row))}
    assert num_computed(sorted_lengths(rows), sort_rows(rows).common, 1) == len(beginnings)


def test_a_minimum_leaves_short_branches_to_each_row() -> None:
    order, common = sort_rows(hard_rows())
    lengths = [len(hard_rows()[index]) for index in order]
    # [1 2 3 4 5] + [6 7 8] + the branch [4 6], which is a row's own; [1 7 8], [2], [9 9] + [1].
    assert num_computed(lengths, common, 2) == 3 + 2 + 3 + 2 + 3 + 1 + 2 + 1
    assert num_computed(lengths, common, 100) == sum(lengths)


@PROPERTY
@given(tries(), st.integers(1, 4))
def test_the_first_look_says_whether_anything_is_shared(rows: Rows, least: int) -> None:
    computed = num_computed(sorted_lengths(rows), sort_rows(rows).common, least)
    assert begin_alike(rows, least) == (computed < sum(map(len, rows)))


def test_rows_that_are_each_a_beginning_of_the_next_nest_to_any_depth() -> None:
    rows = [np.arange(length) for length in range(1, 2001)]
    assert num_computed(sorted_lengths(rows), sort_rows(rows).common, 1) == 2000
