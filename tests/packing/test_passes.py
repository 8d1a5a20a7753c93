"""Rows of tasks that share passes: every row in one pass, as many passes as are meant, as even as whole rows are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
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

PROPERTY = settings(deadline=None, max_examples=50)
TASKS = st.lists(st.lists(st.integers(1, 200), max_size=12), min_size=1, max_size=5)


def rows_of(tasks: Sequence[Sequence[int]]) -> list[TaskRows]:
    return [TaskRows(own) for own in tasks]


def sizes(passes: Sequence[Sequence[Member]]) -> list[int]:
    return [sum(member.num_tokens for member in members) for members in passes]


# ------------------------------------------------------------- packs and chunks


@st.composite
def items(draw: st.DrawFn, max_size: int = 60) -> tuple[list[int], int]:
    capacity = draw(st.integers(1, 200))
    return draw(st.lists(st.integers(1, capacity), max_size=max_size)), capacity


def fewest_packs(lengths: Sequence[int], capacity: int) -> int:
    """Return the optimum by trying every pack for every item, longest first."""
    ordered = sorted(lengths, reverse=True)
    best = len(ordered)

    def place(index: int, rooms: list[int]) -> None:
        nonlocal best
        if len(rooms) >= best:
            return
        if index == len(ordered):
            best = len(rooms)
            return
        for pack, room in enumerate(rooms):
            if room >= ordered[index] and room not in rooms[:pack]:
                place(index + 1, [*rooms[:pack], room - ordered[index], *rooms[pack + 1 :]])
        place(index + 1, [*rooms, capacity - ordered[index]])

    place(0, [])
    return best


@PROPERTY
@given(items())
def test_every_item_is_in_exactly_one_pack_and_no_pack_is_over_capacity(drawn: tuple[list[int], int]) -> None:
    lengths, capacity = drawn
    packs = best_fit_decreasing(lengths, capacity)
    assert sorted(item for pack in packs for item in pack) == list(range(len(lengths)))
    assert all(0 < sum(lengths[item] for item in pack) <= capacity for pack in packs)
    assert all(pack == sorted(pack) for pack in packs)


@PROPERTY
@given(items())
def test_packing_is_deterministic_and_no_two_packs_could_be_one(drawn: tuple[list[int], int]) -> None:
    lengths, capacity = drawn
    packs = best_fit_decreasing(lengths, capacity)
    assert packs == best_fit_decreasing(tuple(lengths), capacity)
    sums = sorted(sum(lengths[item] for item in pack) for pack in packs)
    assert len(sums) < 2 or sums[0] + sums[1] > capacity


@PROPERTY
@given(items(max_size=8))
def test_packs_are_at_most_eleven_ninths_of_the_fewest_plus_six_ninths(drawn: tuple[list[int], int]) -> None:
    lengths, capacity = drawn
    assert len(best_fit_decreasing(lengths, capacity)) <= 11 / 9 * fewest_packs(lengths, capacity) + 6 / 9


def test_the_example_of_the_module_comes_out_as_drawn() -> None:
    assert best_fit_decreasing([7, 5, 4, 3, 1], 8) == [[0, 4], [1, 3], [2]]
    lengths = [4, 4, 3, 3, 3, 3]  # where the rule is not the best, so that the bound above is no tautology
    assert (fewest_packs(lengths, 10), len(best_fit_decreasing(lengths, 10))) == (2, 3)


def test_items_go_into_rooms_that_are_there_before_packs_are_opened() -> None:
    assert best_fit_decreasing([5, 3, 9], 10, rooms=[4, 0, 6]) == [[1], [], [0], [2]]
    assert best_fit_decreasing([], 10, rooms=[4]) == [[]]


@PROPERTY
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=20), st.sampled_from([1, 2, 16, 64]))
def test_the_chunk_size_is_the_greatest_power_of_two_that_divides_all_lengths(lengths: list[int], minimum: int) -> None:
    divisor = math.gcd(*lengths)
    power = 1
    while divisor % (2 * power) == 0:
        power *= 2
    assert PassRules(min_chunk_size=minimum).size(lengths) == max(minimum, power)


def test_the_chunk_size_of_padded_tasks_is_that_of_the_paper() -> None:
    assert PassRules().size([64, 128, 256]) == 64
    assert PassRules().size([128, 256]) == 128
    assert PassRules().size([96, 160]) == 64, "the greatest power of two is 32, below the least chunk size"
    assert PassRules(min_chunk_size=1).size([96, 160]) == 32
    assert PassRules().size([]) == 64


@pytest.mark.parametrize("field", ["chunk_size", "min_chunk_size"])
@pytest.mark.parametrize("value", [0, -4])
def test_a_chunk_size_below_one_is_refused_with_the_field_named(field: str, value: int) -> None:
    with pytest.raises(ConfigError, match=rf"^{field} must be an integer of at least 1, got {value}"):
        PassRules(**{field: value})


# ------------------------------------------------------------------- cutting


@PROPERTY
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


@PROPERTY
@given(TASKS, st.integers(1, 40))
def test_there_are_as_many_passes_as_are_meant_where_there_are_as_many_rows(
    tasks: list[list[int]], num_passes: int
) -> None:
    passes = cut_into_passes(rows_of(tasks), PassRules(), bound=10_000, num_passes=num_passes)
    num_rows = sum(map(len, tasks))
    assert len(passes) == min(num_passes, num_rows)
    if passes:
        mean, longest = sum(sizes(passes)) / len(passes), max(max(own, default=0) for own in tasks)
        assert max(sizes(passes)) <= max(1.05 * mean + 1, mean + longest)


def test_the_examples_of_the_module_come_out_as_drawn() -> None:
    tasks = [[5, 5], [4, 4], [3, 3]]

    def drawn(num_passes: int) -> list[list[int]]:
        passes = cut_into_passes(rows_of(tasks), PassRules(), bound=16, num_passes=num_passes)
        return [[member.num_tokens for member in members] for members in passes]

    assert drawn(1) == [[5, 4, 3], [5, 4, 3]]
    assert drawn(4) == [[5], [5], [4, 3], [4, 3]]
    assert drawn(9) == [[5], [5], [4], [4], [3], [3]]


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


@pytest.mark.parametrize(("tokens", "meant"), [(50, 4), (100, 8), (140, 8), (200, 8), (900, 8)])
def test_passes_of_rows_that_share_a_prefix_grow_with_the_step(tokens: int, meant: int) -> None:
    assert passes_meant(tokens, 100.0, 8, has_shared=True) == meant


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


@PROPERTY
@given(st.integers(1, 30), st.integers(1, 30))
def test_passes_are_spread_in_order_and_evenly_over_the_micro_batches_of_a_bucket(passes: int, slots: int) -> None:
    places = [slot_of(number, passes, slots) for number in range(passes)]
    assert places == sorted(places)
    counts = [places.count(slot) for slot in range(slots)]
    assert sum(counts) == passes
    assert max(counts) - min(counts) <= 1


# ------------------------------------------------------------------- replicas


@PROPERTY
@given(TASKS, st.integers(1, 8))
def test_every_row_goes_to_one_replica_and_shares_differ_by_less_than_a_row(
    tasks: list[list[int]], num_replicas: int
) -> None:
    shares = even_shares(tasks, num_replicas)
    for task, own in enumerate(tasks):
        assert sorted(row for share in shares for row in share[task]) == list(range(len(own)))
    tokens = [sum(tasks[task][row] for task, rows in enumerate(share) for row in rows) for share in shares]
    assert max(tokens) - min(tokens) <= max(max(own, default=0) for own in tasks)


# ---------------------------------------------------------------------- parts


@PROPERTY
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
