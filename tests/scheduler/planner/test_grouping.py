"""Grouping of hTasks into buckets: Eq. 7 of MuxTune against brute force over all partitions."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peft_mux.scheduler.planner.fusion import EXACT_HTASKS, group

latency = st.floats(0, 10, allow_subnormal=False) | st.integers(0, 5).map(float)


def all_groupings(count: int, num_buckets: int) -> Iterator[list[list[int]]]:
    """Yield every partition of `count` items into exactly `num_buckets` parts."""
    if count == 0:
        if num_buckets == 0:
            yield []
        return
    for smaller in all_groupings(count - 1, num_buckets):
        for chosen in range(num_buckets):
            yield [[*bucket, count - 1] if place == chosen else bucket for place, bucket in enumerate(smaller)]
    for smaller in all_groupings(count - 1, num_buckets - 1):
        yield [*smaller, [count - 1]]


def deviation_of(latencies: Sequence[float], buckets: Sequence[Sequence[int]]) -> float:
    """Return the value of Eq. 7: squared deviations of the buckets' loads from their mean, summed."""
    loads = [sum(latencies[index] for index in bucket) for bucket in buckets]
    return sum(abs(load - sum(loads) / len(loads)) ** 2 for load in loads)


def longest_first(latencies: Sequence[float], num_buckets: int) -> list[list[int]]:
    """Return a grouping by longest processing time first alone; none of its buckets stays empty."""
    buckets: list[list[int]] = [[] for _ in range(num_buckets)]
    for index in sorted(range(len(latencies)), key=lambda index: -latencies[index]):
        min(buckets, key=lambda own: (sum(latencies[one] for one in own), len(own))).append(index)
    return buckets


@settings(max_examples=25, deadline=None)
@given(st.lists(latency, min_size=1, max_size=8))
def test_grouping_equals_brute_force_for_every_number_of_buckets(latencies):
    rounding = 1e-9 * (1 + sum(latencies) ** 2)
    for num_buckets in range(1, len(latencies) + 1):
        best = min(deviation_of(latencies, buckets) for buckets in all_groupings(len(latencies), num_buckets))
        buckets = group(latencies, num_buckets)
        assert deviation_of(latencies, buckets) == pytest.approx(best, rel=1e-9, abs=rounding)


@settings(max_examples=60, deadline=None)
@given(st.lists(latency, min_size=1, max_size=40), st.data())
def test_every_htask_is_in_one_bucket_and_buckets_come_in_descending_load_with_ascending_members(latencies, data):
    num_buckets = data.draw(st.integers(1, len(latencies)))
    buckets = group(latencies, num_buckets)
    assert len(buckets) == num_buckets
    assert all(buckets)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(latencies)))
    loads = [sum(latencies[index] for index in bucket) for bucket in buckets]
    assert all(first >= second - 1e-9 for first, second in zip(loads, loads[1:], strict=False))
    assert all(list(bucket) == sorted(bucket) for bucket in buckets)


@settings(max_examples=20, deadline=None)
@given(st.lists(latency, min_size=EXACT_HTASKS + 1, max_size=24), st.data())
def test_no_move_and_no_swap_improves_a_grouping_of_many_htasks(latencies, data):
    buckets = group(latencies, data.draw(st.integers(2, len(latencies))))
    loads = [sum(latencies[index] for index in bucket) for bucket in buckets]
    rounding = 1e-9 * (1 + sum(latencies) ** 2)
    for giver, taker in ((g, t) for g in range(len(buckets)) for t in range(len(buckets)) if g != t):
        for index in buckets[giver]:
            for back in (0.0, *(latencies[other] for other in buckets[taker])):
                handed = latencies[index] - back
                before = loads[giver] ** 2 + loads[taker] ** 2
                after = (loads[giver] - handed) ** 2 + (loads[taker] + handed) ** 2
                assert after >= before - rounding


def test_grouping_repairs_what_longest_first_leaves_uneven():
    latencies = [3.0, 3.0, 2.0, 2.0, 2.0]
    assert longest_first(latencies, 2) == [[0, 2, 4], [1, 3]]
    assert group(latencies, 2) == ((0, 1), (2, 3, 4))


def test_sixty_four_htasks_are_balanced_better_than_by_longest_first_for_few_buckets():
    draw = random.Random(11)
    latencies = [draw.lognormvariate(0, 0.5) for _ in range(64)]
    for num_buckets in (2, 4, 8, 16):
        plain = deviation_of(latencies, longest_first(latencies, num_buckets))
        assert deviation_of(latencies, group(latencies, num_buckets)) < 0.5 * plain


def test_one_bucket_holds_all_and_as_many_buckets_as_htasks_hold_one_each():
    assert group([2.0, 3.0, 1.0], 1) == ((0, 1, 2),)
    assert group([2.0, 3.0, 1.0], 3) == ((1,), (0,), (2,))


def test_equal_htasks_are_dealt_out_evenly_and_listed_by_their_first():
    assert group([1.0] * 4, 2) == ((0, 2), (1, 3))
    assert [len(bucket) for bucket in group([1.0] * 20, 5)] == [4] * 5


def test_htasks_without_latency_still_fill_every_bucket():
    assert group([0.0, 5.0, 0.0], 3) == ((1,), (0,), (2,))
    assert all(group([0.0] * 13, 7))
