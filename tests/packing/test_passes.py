"""Rows of tasks that share passes: every row in one pass, as many passes as are meant, as even as whole rows are."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peft_mux.data.packing.passes import (
    Member,
    PassRules,
    TaskRows,
    best_fit_decreasing,
    chains_of_passes,
    cut_into_passes,
    even_shares,
    part_bounds,
    passes_meant,
    slot_of,
)
from peft_mux.data.packing.prefixes import row_trie
from peft_mux.errors import ConfigError

TASKS = st.lists(st.lists(st.integers(1, 200), max_size=12), min_size=1, max_size=5)


def rows_of(tasks: Sequence[Sequence[int]]) -> list[TaskRows]:
    return [TaskRows(own) for own in tasks]


def sizes(passes: Sequence[Sequence[Member]]) -> list[int]:
    return [sum(member.num_tokens for member in members) for members in passes]


# ------------------------------------------------------------- packs and chunks


@given(st.integers(20, 200), st.lists(st.integers(1, 20), max_size=60))
def test_every_item_is_in_one_pack_within_capacity_and_no_two_packs_could_be_one(
    capacity: int, lengths: list[int]
) -> None:
    packs = best_fit_decreasing(lengths, capacity)
    assert sorted(item for pack in packs for item in pack) == list(range(len(lengths)))
    assert all(pack == sorted(pack) for pack in packs)
    sums = sorted(sum(lengths[item] for item in pack) for pack in packs)
    assert all(0 < own <= capacity for own in sums)
    assert len(sums) < 2 or sums[0] + sums[1] > capacity


def test_the_example_of_the_module_comes_out_as_drawn_and_rooms_that_are_there_are_filled_first() -> None:
    assert best_fit_decreasing([5, 3, 9], 10, rooms=[4, 0, 6]) == [[1], [], [0], [2]]
    assert best_fit_decreasing([], 10, rooms=[4]) == [[]]
    assert best_fit_decreasing([7, 5, 4, 3, 1], 8) == [[0, 4], [1, 3], [2]]


def test_the_chunk_size_of_padded_tasks_is_that_of_the_paper_and_one_below_1_is_refused() -> None:
    assert PassRules().size([64, 128, 256]) == 64
    assert PassRules().size([128, 256]) == 128
    assert PassRules().size([96, 160]) == 64, "the greatest power of two is 32, below the least chunk size"
    assert PassRules(min_chunk_size=1).size([96, 160]) == 32
    assert PassRules().size([]) == 64

    for field in ("chunk_size", "min_chunk_size"):
        with pytest.raises(ConfigError, match=rf"^{field} must be an integer of at least 1, got 0"):
            PassRules(**{field: 0})


# ------------------------------------------------------------------- cutting


@given(TASKS, st.integers(1, 400), st.integers(1, 40), st.booleans())
def test_every_token_is_in_one_pass_and_no_pass_is_larger_than_allowed_unless_one_row_is(
    tasks: list[list[int]], bound: int, num_passes: int, is_split: bool
) -> None:
    rules = PassRules(split_long_sequences=is_split, min_chunk_size=8)
    passes = cut_into_passes(rows_of(tasks), rules, bound=bound, num_passes=num_passes)
    found = sorted(member for members in passes for member in members)
    for task, own in enumerate(tasks):
        for row, length in enumerate(own):
            bounds = [(one.start, one.end) for one in found if (one.task, one.index) == (task, row)]
            assert bounds[0][0] == 0
            assert bounds[-1][1] == length
            assert [start for start, _ in bounds[1:]] == [end for _, end in bounds[:-1]]
    for members, size in zip(passes, sizes(passes), strict=True):
        assert members == sorted(members)
        assert size <= bound or (len(members) == 1 and not is_split)
    meant = cut_into_passes(rows_of(tasks), PassRules(), bound=10_000, num_passes=num_passes)
    assert len(meant) == min(num_passes, sum(map(len, tasks)))
    if meant:
        mean, longest = sum(sizes(meant)) / len(meant), max(max(own, default=0) for own in tasks)
        assert max(sizes(meant)) <= max(1.05 * mean + 1, mean + longest), "passes are as even as whole rows are"


def test_no_row_is_cut_for_the_sake_of_evenness_and_rows_with_a_class_never() -> None:
    rules = PassRules(split_long_sequences=True, chunk_size=4)
    tasks = [TaskRows([30, 2, 2]), TaskRows([40], stay_whole=True)]
    even = cut_into_passes(tasks, rules, bound=64, num_passes=6)
    assert sorted(member.num_tokens for members in even for member in members) == [2, 2, 30, 40]
    bounded = cut_into_passes(tasks, rules, bound=16, num_passes=1)
    assert [40] in [[member.num_tokens for member in members] for members in bounded]
    assert max(sizes([members for members in bounded if members[0].task == 0])) <= 16


def test_a_replica_cuts_its_own_rows_with_the_chunks_of_the_whole_batch() -> None:
    rules = PassRules(split_long_sequences=True, min_chunk_size=1)
    whole = [TaskRows([48, 12], only=[0])]
    passes = cut_into_passes(whole, rules, bound=30)
    assert [members[0].end for members in passes] == [24, 48], "chunks of 4 divide 12 and 48"
    assert chains_of_passes(whole, passes) == [[0, 1]]


# ------------------------------------------------------------- from plan to step


@pytest.mark.parametrize(
    ("tokens", "planned", "passes", "meant"),
    [
        (100, 100.0, 8, 8),
        (70, 100.0, 8, 8),
        (140, 100.0, 8, 8),
        (50, 100.0, 8, 4),
        (200, 100.0, 8, 16),
        (1, 100.0, 8, 1),
        (100, 0.0, 1, 1),
    ],
)
def test_a_step_of_about_the_planned_tokens_has_as_many_passes(
    tokens: int, planned: float, passes: int, meant: int
) -> None:
    assert passes_meant(tokens, planned, passes) == meant
    if planned:  # rows that share a prefix have no more passes than planned: each would compute the prefix again
        assert passes_meant(tokens, planned, passes, has_shared=True) == min(meant, passes)


def test_a_step_of_twice_the_planned_tokens_shares_as_well_as_one_pass_does() -> None:
    beginning = np.arange(40)
    rows = [[np.concatenate([beginning, 100 + 10 * row + np.arange(10)])] for row in range(6)]
    trie = row_trie(rows)
    assert trie is not None
    tokens = trie.num_computed(range(6))
    meant = {has: passes_meant(tokens, tokens / 2, 1, has_shared=has) for has in (False, True)}
    task = TaskRows([50] * 6, trie=trie)
    cuts = {has: cut_into_passes([task], PassRules(), bound=1000, num_passes=count) for has, count in meant.items()}
    computed = {has: sum(one.num_computed for cut in cuts[has] for one in cut) for has in cuts}
    assert computed == {False: tokens + 40, True: tokens}


@given(st.integers(1, 30), st.integers(1, 30))
def test_passes_are_spread_in_order_and_evenly_over_the_micro_batches_of_a_bucket(passes: int, slots: int) -> None:
    places = [slot_of(number, passes, slots) for number in range(passes)]
    assert places == sorted(places)
    counts = [places.count(slot) for slot in range(slots)]
    assert sum(counts) == passes
    assert max(counts) - min(counts) <= 1


# ------------------------------------------------------------------- replicas


@given(TASKS, st.integers(1, 8))
def test_every_row_goes_to_one_replica_and_shares_differ_by_less_than_a_row(
    tasks: list[list[int]], num_replicas: int
) -> None:
    shares = even_shares(tasks, num_replicas)
    for task, own in enumerate(tasks):
        assert sorted(row for share in shares for row in share[task]) == list(range(len(own)))
    tokens = [sum(tasks[task][row] for task, rows in enumerate(share) for row in rows) for share in shares]
    assert max(tokens) - min(tokens) <= max(max(own, default=0) for own in tasks)


def test_the_longest_row_comes_first_and_each_goes_to_the_replica_that_would_finish_it_first() -> None:
    assert even_shares([[6, 4, 3, 1]], 2) == [[[0, 3]], [[1, 2]]]
    assert even_shares([[6, 4, 3, 1]], 2, slowness=[1.0, 3.0]) == [[[0, 1, 3]], [[2]]]


# ---------------------------------------------------------------------- parts


@given(st.integers(1, 5000), st.integers(1, 400), st.sampled_from([1, 2, 16, 64, 256]))
def test_parts_are_even_whole_chunks_within_the_bound(num_tokens: int, max_tokens: int, chunk: int) -> None:
    bounds = part_bounds(num_tokens, max_tokens, chunk)
    sizes = [end - start for start, end in bounds]
    assert bounds[0][0] == 0
    assert bounds[-1][1] == num_tokens
    assert [start for start, _ in bounds[1:]] == [end for _, end in bounds[:-1]]
    assert 0 < min(sizes) <= max(sizes) <= max_tokens
    assert len(set(sizes[:-1])) <= 1, "all but the last are equal"
    assert sizes[-1] <= sizes[0]
    if chunk <= max_tokens:
        assert all(size % chunk == 0 for size in sizes[:-1])
        assert len(sizes) <= -(-num_tokens // (max_tokens // chunk * chunk))
    else:
        assert len(sizes) == -(-num_tokens // max_tokens)
