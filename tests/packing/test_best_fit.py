"""Packing: properties against brute force."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peft_mux.data.packing.passes import best_fit_decreasing

PROPERTY = settings(deadline=None, max_examples=150)


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


def test_the_brute_force_beats_the_rule_somewhere_so_that_the_bound_is_no_tautology() -> None:
    lengths, capacity = [4, 4, 3, 3, 3, 3], 10
    assert fewest_packs(lengths, capacity) == 2
    assert len(best_fit_decreasing(lengths, capacity)) == 3


def test_the_example_of_the_module_comes_out_as_drawn() -> None:
    assert best_fit_decreasing([7, 5, 4, 3, 1], 8) == [[0, 4], [1, 3], [2]]


@pytest.mark.parametrize("lengths", [[0, 1], [-1], [9], [8, 9]])
def test_an_item_that_no_pack_holds_is_refused(lengths: list[int]) -> None:
    with pytest.raises(ValueError, match=r"lengths: got .*allowed: 1 to 8"):
        best_fit_decreasing(lengths, 8)
