"""Bucketing pads least: the dynamic programme of L Eq. 4 against every choice of boundaries."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peft_mux.scheduler.dispatching import bucketing as bucketing_module
from peft_mux.scheduler.dispatching.bucketing import (
    bucket_boundaries,
    fixed_bucketing,
    interval_tokens,
    uniform_boundaries,
)

LENGTHS = st.lists(st.integers(1, 120), min_size=1, max_size=25)


def padding_by_definition(lengths: list[int], boundaries: tuple[int, ...]) -> int:
    return sum(min(end for end in boundaries if end >= length) - length for length in lengths)


def least_padding(lengths: list[int], num_buckets: int, interval: int) -> int:
    """Try every choice of at most `num_buckets` multiples of the interval that holds the longest sequence."""
    last = -(-max(lengths) // interval) * interval
    ends = range(interval, last, interval)
    choices = (chosen for size in range(num_buckets) for chosen in combinations(ends, size))
    return min(padding_by_definition(lengths, (*chosen, last)) for chosen in choices)


@given(LENGTHS, st.integers(1, 4), st.sampled_from([10, 16, 30]))
@settings(max_examples=60, deadline=None)
def test_bucketing_pads_as_little_as_the_best_of_all_boundary_choices(
    lengths: list[int], num_buckets: int, interval: int
) -> None:
    found = bucket_boundaries(lengths, num_buckets, interval)
    assert found.padding_tokens == padding_by_definition(lengths, found.boundaries)
    assert found.padding_tokens == least_padding(lengths, num_buckets, interval)
    assert 1 <= found.num_buckets <= num_buckets


@given(LENGTHS, st.integers(1, 30), st.integers(1, 50))
@settings(max_examples=60, deadline=None)
def test_every_sequence_lies_in_the_first_bucket_that_holds_it(
    lengths: list[int], num_buckets: int, interval: int
) -> None:
    found = bucket_boundaries(lengths, num_buckets, interval)
    buckets = found.bucket_of(lengths)
    for length, bucket in zip(lengths, buckets, strict=True):
        assert found.boundaries[bucket] >= length
        assert bucket == 0 or found.boundaries[bucket - 1] < length
    assert found.counts == tuple(np.bincount(buckets, minlength=found.num_buckets).tolist())
    assert min(found.counts) >= 1, "no bucket is spent on lengths that nothing has"
    assert found.padded_tokens == sum(lengths) + found.padding_tokens


@given(LENGTHS, st.integers(1, 6))
@settings(max_examples=30, deadline=None)
def test_one_more_bucket_never_pads_more(lengths: list[int], num_buckets: int) -> None:
    fewer, more = (bucket_boundaries(lengths, number, 8) for number in (num_buckets, num_buckets + 1))
    assert more.padding_tokens <= fewer.padding_tokens


def test_many_intervals_are_merged_in_blocks_as_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.random.default_rng(0).integers(1, 400, size=300).tolist()
    whole = bucket_boundaries(lengths, 7, 2)
    monkeypatch.setattr(bucketing_module, "_COLUMNS_AT_ONCE", 11)
    assert bucket_boundaries(lengths, 7, 2) == whole
    assert whole.num_buckets == 7


def test_fewer_non_empty_intervals_than_buckets_give_fewer_buckets() -> None:
    found = bucket_boundaries([10, 200, 300, 5000], num_buckets=16, interval=256)
    assert found.boundaries == (256, 512, 5120)
    assert found.counts == (2, 1, 1)
    assert found.padding_tokens == 246 + 56 + 212 + 120


def test_the_last_boundary_is_that_of_the_longest_sequence_and_not_of_the_last_interval() -> None:
    assert bucket_boundaries([300, 300], num_buckets=1, interval=256).boundaries == (512,)


def test_an_interval_ends_at_the_least_limit_that_holds_its_sequences() -> None:
    found = bucket_boundaries([2350, 2400, 2401, 700], interval=512, limits=[8192, 2400])
    assert found.boundaries == (1024, 2400, 2560)
    assert found.counts == (1, 2, 1)
    assert found.padding_tokens == 324 + 50 + 159


def test_a_length_above_every_limit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"lengths\[1\] is 8193; allowed: at most 8192, the longest that any replica"):
        bucket_boundaries([5, 8193], limits=[2400, 8192])


def test_boundaries_follow_the_batch() -> None:
    short = bucket_boundaries([100] * 9 + [250] * 9 + [1000], num_buckets=2, interval=128)
    long = bucket_boundaries([100] + [800] * 9 + [1000] * 9, num_buckets=2, interval=128)
    assert short.boundaries == (256, 1024)
    assert long.boundaries == (896, 1024)


def test_the_order_of_the_sequences_changes_nothing() -> None:
    lengths = [700, 20, 333, 20, 512, 90]
    assert bucket_boundaries(lengths, 3, 64) == bucket_boundaries(sorted(lengths), 3, 64)


def test_a_greatest_length_that_is_no_multiple_of_the_interval_is_the_last_boundary() -> None:
    found = bucket_boundaries([100, 990], num_buckets=4, interval=256, limits=[1000])
    assert found.boundaries == (256, 1000)


def test_fixed_boundaries_may_leave_buckets_empty() -> None:
    found = fixed_bucketing([5, 30], (10, 20, 30))
    assert found.counts == (1, 0, 1)
    assert found.padding_tokens == 5
    assert found.padding_ratio == 5 / 40


def test_uniform_boundaries_are_equal_multiples_of_the_interval() -> None:
    assert uniform_boundaries(4096, num_buckets=4, interval=256) == (1024, 2048, 3072, 4096)
    assert uniform_boundaries(500, num_buckets=16, interval=256) == (256, 500)
    assert uniform_boundaries(2560, num_buckets=4, interval=256) == (768, 1280, 2048, 2560)


@given(LENGTHS, st.integers(1, 5))
@settings(max_examples=30, deadline=None)
def test_dynamic_boundaries_never_pad_more_than_uniform_ones(lengths: list[int], num_buckets: int) -> None:
    fixed = fixed_bucketing(lengths, uniform_boundaries(128, num_buckets, 8))
    assert bucket_boundaries(lengths, num_buckets, 8).padding_tokens <= fixed.padding_tokens


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([], 4, 8), r"lengths has shape \(0,\); allowed: one length for each of one or more"),
        (([3, 0], 4, 8), r"lengths\[1\] is 0; allowed: 1 token or more"),
        (([3], 0, 8), "num_buckets is 0; allowed: 1 or more"),
        (([3], 4, -1), "interval is -1; allowed: 1 or more"),
    ],
)
def test_bad_input_is_refused_with_its_name(arguments: tuple[list[int], int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bucket_boundaries(*arguments)


def test_a_sequence_longer_than_allowed_is_refused_with_its_place() -> None:
    with pytest.raises(ValueError, match=r"lengths\[1\] is 40; allowed: at most the last boundary, 30"):
        fixed_bucketing([5, 40], (10, 30))
    with pytest.raises(ValueError, match=r"lengths\[0\] is 40; allowed: at most 39"):
        bucket_boundaries([40], 2, 8, limits=[39])


def test_boundaries_that_do_not_ascend_are_refused() -> None:
    with pytest.raises(ValueError, match=r"boundaries are \[10, 10\]; allowed: one or more, ascending"):
        fixed_bucketing([5], (10, 10))


def test_intervals_are_those_of_the_paper_for_long_and_finer_for_short_sequences() -> None:
    assert [interval_tokens(longest) for longest in (10, 1024, 4096, 16384, 10**6)] == [16, 16, 64, 256, 256]
