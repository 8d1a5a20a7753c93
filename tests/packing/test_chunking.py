"""Chunk sizes: properties against the rule of M §3.5."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peft_mux.data.packing.passes import chunk_size, round_up
from peft_mux.errors import ConfigError

PROPERTY = settings(deadline=None, max_examples=150)


@PROPERTY
@given(st.lists(st.integers(1, 5000), min_size=1, max_size=20), st.sampled_from([1, 2, 16, 64]))
def test_the_chunk_size_is_the_greatest_power_of_two_that_divides_all_lengths(lengths: list[int], minimum: int) -> None:
    divisor = math.gcd(*lengths)
    power = 1
    while divisor % (2 * power) == 0:
        power *= 2
    assert chunk_size(lengths, minimum=minimum) == max(minimum, power)


def test_the_chunk_size_of_padded_tasks_is_that_of_the_paper() -> None:
    assert chunk_size([64, 128, 256]) == 64
    assert chunk_size([128, 256]) == 128
    assert chunk_size([96, 160]) == 64, "the greatest power of two is 32, below the least chunk size"
    assert chunk_size([96, 160], minimum=1) == 32
    assert chunk_size([]) == 64


def test_an_override_is_taken_as_it_is() -> None:
    assert chunk_size([128, 256], override=7) == 7


@pytest.mark.parametrize(
    ("settings_", "field"),
    [({"override": 0}, "chunk_size"), ({"override": -4}, "chunk_size"), ({"minimum": 0}, "min_chunk_size")],
)
def test_a_chunk_size_below_one_is_refused_with_the_field_named(settings_: dict[str, int], field: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{field}: got .*at least 1"):
        chunk_size([64], **settings_)


@PROPERTY
@given(st.integers(0, 300), st.integers(1, 70))
def test_a_pack_is_filled_up_to_the_fewest_whole_chunks_that_hold_it(tokens: int, size: int) -> None:
    filled = round_up(tokens, size)
    assert filled % size == 0
    assert 0 <= filled - tokens < size, "only the last chunk of a pack is filled up"


def test_the_pack_of_the_module_example_is_filled_up_as_drawn() -> None:
    assert round_up(11, 4) == 3 * 4
