"""Which tasks share a pass (M Eq. 6) and which hTasks a bucket (M Eq. 7)."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from peft_mux.scheduler.planner.fusion import EXACT_HTASKS, Interval, cheapest_partition, fuse, group


def contiguous_partitions(num_tasks: int) -> Iterator[tuple[Interval, ...]]:
    for number in range(num_tasks):
        for inner in itertools.combinations(range(1, num_tasks), number):
            yield tuple(itertools.pairwise((0, *inner, num_tasks)))


def charged_by_hand(latency, intervals, stages: int, micro_batches: int) -> float:
    """Restate the objective hTask by hTask, without the closed form that `fuse` minimises."""
    share = 2 * micro_batches / (2 * (stages - 1) + 2 * micro_batches)
    latencies = [latency[start][stop - 1] for start, stop in intervals]
    whole = latencies.index(max(latencies))
    return sum(each if index == whole else each * share for index, each in enumerate(latencies))


@st.composite
def latency_matrices(draw: st.DrawFn) -> NDArray[np.float64]:
    """Any latencies, not only such that grow with the range; some ranges of two or more tasks do not fit."""
    num_tasks = draw(st.integers(1, 8))
    entry = st.floats(0, 100) | st.integers(0, 4).map(float)
    latency = np.full((num_tasks, num_tasks), -1.0)  # below the diagonal nothing may be read
    for start in range(num_tasks):
        for last in range(start, num_tasks):
            fits = start == last or draw(st.integers(0, 4)) > 0
            latency[start, last] = draw(entry) if fits else np.inf
    return latency


@settings(max_examples=60)
@given(latency_matrices(), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 8]))
def test_fusion_equals_brute_force_over_all_contiguous_partitions(latency, num_stages, number):
    found = fuse(latency, num_stages, num_micro_batches=number)
    seconds = {own: charged_by_hand(latency, own, num_stages, number) for own in contiguous_partitions(len(latency))}
    assert seconds[found] == pytest.approx(min(seconds.values()), rel=1e-9, abs=1e-12)


@given(latency_matrices())
def test_the_cheapest_partition_into_every_number_of_htasks_equals_brute_force(latency):
    cost = np.where(np.tri(len(latency), k=-1, dtype=bool), np.inf, latency)
    sums = {own: sum(cost[start, stop - 1] for start, stop in own) for own in contiguous_partitions(len(cost))}
    for num_htasks in (None, *range(1, len(cost) + 1)):
        expected = min(seconds for own, seconds in sums.items() if num_htasks in (None, len(own)))
        found = cheapest_partition(cost, num_htasks)
        if found is None:
            assert np.isinf(expected)
            continue
        assert num_htasks in (None, len(found))
        assert sums[found] == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_charging_the_longest_whole_keeps_a_long_htask_from_hiding_behind_a_short_one():
    # Fused, the two take 11.5 s; one after the other they take more than the longer's 11 s plus the shorter's share.
    assert fuse(np.array([[1.0, 11.5], [0.0, 11.0]]), 8, num_micro_batches=8) == ((0, 2),)


def test_equal_objectives_leave_the_fewest_cuts_at_the_end():
    latency = np.array([[1.0, 2.0, 3.0], [np.inf, 1.0, 2.0], [np.inf, np.inf, 1.0]])
    assert fuse(latency, 1, num_micro_batches=1) == ((0, 3),)
    assert cheapest_partition(latency, 2) == ((0, 1), (1, 3))


def test_a_thousand_tasks_are_fused_and_no_neighbours_would_be_better_joined_or_cut():
    tokens = np.sort(np.exp(np.random.default_rng(7).uniform(np.log(32), np.log(4096), 1000)))
    ends = np.concatenate(([0.0], np.cumsum(tokens)))
    latency = 1.0 + np.maximum(ends[None, 1:] - ends[:-1, None], 512) / 512
    found = fuse(latency, 4, num_micro_batches=4)
    assert found[-1][1] == 1000
    best = charged_by_hand(latency, found, 4, 4)
    cuts = [start for start, _ in found] + [1000]
    for cut in range(1, 1000):
        other = sorted(set(cuts) ^ {cut})
        objective = charged_by_hand(latency, tuple(itertools.pairwise(other)), 4, 4)
        assert objective >= best * (1 - 1e-12)


def test_the_first_task_that_does_not_fit_alone_is_named():
    latency = np.ones((4, 4))
    latency[2, 2:] = latency[:3, 2:] = np.inf
    latency[3, 3] = np.inf
    with pytest.raises(ValueError, match=r"latency_s\[2, 2\] is inf: task 2 .* does not fit in memory even alone"):
        fuse(latency, 2, num_micro_batches=1)


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


def loads_of(latencies: Sequence[float], buckets: Sequence[Sequence[int]]) -> list[float]:
    return [sum(latencies[index] for index in bucket) for bucket in buckets]


def deviation_of(latencies: Sequence[float], buckets: Sequence[Sequence[int]]) -> float:
    """Return the value of Eq. 7: squared deviations of the buckets' loads from their mean, summed."""
    loads = loads_of(latencies, buckets)
    return sum(abs(load - sum(loads) / len(loads)) ** 2 for load in loads)


LATENCY = st.floats(0, 10, allow_subnormal=False) | st.integers(0, 5).map(float)


@settings(max_examples=15)
@given(st.lists(LATENCY, min_size=1, max_size=8))
@example([3.0, 7.0, 2.0, 2.0, 2.0, 4.0])  # for two buckets moves and swaps end before the best grouping
def test_grouping_equals_brute_force_for_every_number_of_buckets(latencies):
    rounding = 1e-9 * (1 + sum(latencies) ** 2)
    for num_buckets in range(1, len(latencies) + 1):
        best = min(deviation_of(latencies, buckets) for buckets in all_groupings(len(latencies), num_buckets))
        buckets = group(latencies, num_buckets)
        assert deviation_of(latencies, buckets) == pytest.approx(best, rel=1e-9, abs=rounding)


@given(st.lists(LATENCY, min_size=EXACT_HTASKS + 1, max_size=24), st.data())
def test_many_htasks_are_each_in_one_bucket_and_no_move_and_no_swap_improves_them(latencies, data):
    num_buckets = data.draw(st.integers(1, len(latencies)))
    buckets, rounding = group(latencies, num_buckets), 1e-9 * (1 + sum(latencies) ** 2)
    assert (len(buckets), all(buckets)) == (num_buckets, True)
    assert sorted(index for bucket in buckets for index in bucket) == list(range(len(latencies)))
    loads = loads_of(latencies, buckets)
    assert all(first >= second - 1e-9 for first, second in itertools.pairwise(loads)), "the fullest bucket is first"
    assert all(list(bucket) == sorted(bucket) for bucket in buckets)
    for giver, taker in itertools.permutations(range(num_buckets), 2):
        for index in buckets[giver]:
            for back in (0.0, *(latencies[other] for other in buckets[taker])):
                handed = latencies[index] - back
                before = loads[giver] ** 2 + loads[taker] ** 2
                after = (loads[giver] - handed) ** 2 + (loads[taker] + handed) ** 2
                assert after >= before - rounding
