"""Bucketing pads least: the dynamic programme of L Eq. 4 against every choice of boundaries."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peft_mux.scheduler.dispatching import bucketing as bucketing_module
from peft_mux.scheduler.dispatching.bucketing import bucket_boundaries, fixed_bucketing, interval_tokens


def padding_by_definition(lengths: list[int], boundaries: tuple[int, ...]) -> int:
    return sum(min(end for end in boundaries if end >= length) - length for length in lengths)


def least_padding(lengths: list[int], num_buckets: int, interval: int) -> int:
    """Try every choice of at most `num_buckets` multiples of the interval that holds the longest sequence."""
    last = -(-max(lengths) // interval) * interval
    ends = range(interval, last, interval)
    choices = (chosen for size in range(num_buckets) for chosen in combinations(ends, size))
    return min(padding_by_definition(lengths, (*chosen, last)) for chosen in choices)


@given(st.lists(st.integers(1, 120), min_size=1, max_size=25), st.integers(1, 4), st.sampled_from([10, 16, 30]))
def test_bucketing_pads_as_little_as_the_best_of_all_boundary_choices(
    lengths: list[int], num_buckets: int, interval: int
) -> None:
    found = bucket_boundaries(lengths, num_buckets, interval)
    assert found.padding_tokens == padding_by_definition(lengths, found.boundaries)
    assert found.padding_tokens == least_padding(lengths, num_buckets, interval)
    assert found.padded_tokens == sum(lengths) + found.padding_tokens
    assert 1 <= found.num_buckets <= num_buckets
    buckets = found.bucket_of(lengths)
    for length, bucket in zip(lengths, buckets, strict=True):
        assert found.boundaries[bucket] >= length
        assert bucket == 0 or found.boundaries[bucket - 1] < length
    assert found.counts == tuple(np.bincount(buckets, minlength=found.num_buckets).tolist())
    assert min(found.counts) >= 1, "no bucket is spent on lengths that nothing has"
    assert bucket_boundaries(sorted(lengths), num_buckets, interval) == found


def test_many_intervals_are_merged_in_blocks_as_in_one_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = np.random.default_rng(0).integers(1, 400, size=300).tolist()
    whole = bucket_boundaries(lengths, 7, 2)
    monkeypatch.setattr(bucketing_module, "_COLUMNS_AT_ONCE", 11)
    assert bucket_boundaries(lengths, 7, 2) == whole
    assert whole.num_buckets == 7


def test_an_interval_ends_at_the_least_limit_that_holds_its_sequences() -> None:
    found = bucket_boundaries([2350, 2400, 2401, 700], interval=512, limits=[8192, 2400])
    assert (found.boundaries, found.counts) == ((1024, 2400, 2560), (1, 2, 1))
    assert found.padding_tokens == 324 + 50 + 159


def test_fixed_boundaries_may_leave_buckets_empty() -> None:
    found = fixed_bucketing([5, 30], (10, 20, 30))
    assert (found.counts, found.padding_tokens, found.padded_tokens) == ((1, 0, 1), 5, 40)
    with pytest.raises(ValueError, match=r"lengths\[1\] must be at most the last boundary, 30, got 40"):
        fixed_bucketing([5, 40], (10, 30))


@pytest.mark.parametrize(
    ("lengths", "limits", "message"),
    [
        ([], (), r"lengths must be one length for each of at least one sequence, got shape \(0,\)"),
        ([3, 0], (), r"lengths\[1\] must be 1 token or more, got 0"),
        ([5, 40], (39,), r"lengths\[1\] must be at most 39, the longest that any replica supports, got 40"),
    ],
)
def test_bad_lengths_are_refused_by_name(lengths: list[int], limits: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bucket_boundaries(lengths, 4, 8, limits=limits)


def test_intervals_are_those_of_the_paper_for_long_and_finer_for_short_sequences() -> None:
    assert [interval_tokens(longest) for longest in (10, 1024, 4096, 16384, 10**6)] == [16, 16, 64, 256, 256]
