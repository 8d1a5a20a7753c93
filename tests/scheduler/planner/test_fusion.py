"""Which tasks share a pass (M Eq. 6) and which hTasks a bucket (M Eq. 7)."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given, settings
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
def latency_matrices(draw: st.DrawFn, *, max_tasks: int = 9, refusing: bool = True) -> NDArray[np.float64]:
    """Any latencies, not only such that grow with the range; some ranges of two or more tasks do not fit."""
    num_tasks = draw(st.integers(1, max_tasks))
    entry = st.floats(0, 100) | st.integers(0, 4).map(float)
    latency = np.full((num_tasks, num_tasks), -1.0)  # below the diagonal nothing may be read
    for start in range(num_tasks):
        for last in range(start, num_tasks):
            fits = not refusing or start == last or draw(st.integers(0, 4)) > 0
            latency[start, last] = draw(entry) if fits else np.inf
    return latency


stages = st.sampled_from([1, 2, 4, 8])
micro_batches = st.sampled_from([1, 2, 8])


@settings(max_examples=120, deadline=None)
@given(latency_matrices(), stages, micro_batches)
def test_fusion_equals_brute_force_over_all_contiguous_partitions(latency, num_stages, number):
    found = fuse(latency, num_stages, num_micro_batches=number)
    best = min(charged_by_hand(latency, own, num_stages, number) for own in contiguous_partitions(len(latency)))
    assert charged_by_hand(latency, found, num_stages, number) == pytest.approx(best, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("seed", range(10))
def test_fusion_of_tasks_that_saturate_a_stage_equals_brute_force(seed):
    draw = np.random.default_rng(seed)
    ends = np.concatenate(([0.0], np.cumsum(np.sort(np.exp(draw.uniform(np.log(32), np.log(4096), 9))))))
    latency = 20.0 + np.maximum(ends[None, 1:] - ends[:-1, None], 512) * draw.uniform(0.9, 1.1, (9, 9))
    for num_stages, number in ((2, 8), (4, 2), (8, 4)):
        best = min(charged_by_hand(latency, own, num_stages, number) for own in contiguous_partitions(9))
        found = fuse(latency, num_stages, num_micro_batches=number)
        assert charged_by_hand(latency, found, num_stages, number) == pytest.approx(best, rel=1e-12)


@settings(max_examples=40, deadline=None)
@given(latency_matrices(max_tasks=8))
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


@settings(max_examples=60, deadline=None)
@given(latency_matrices(max_tasks=30), stages, micro_batches)
def test_intervals_cover_every_task_once_and_fit(latency, num_stages, number):
    found = fuse(latency, num_stages, num_micro_batches=number)
    covered = [task for start, stop in found for task in range(start, stop)]
    assert covered == list(range(len(latency)))
    assert all(np.isfinite(latency[start, stop - 1]) for start, stop in found)


@settings(max_examples=40, deadline=None)
@given(latency_matrices(max_tasks=20, refusing=False), stages, micro_batches, st.integers(0, 2**32 - 1))
def test_htasks_that_no_longer_fit_never_lower_the_objective(latency, num_stages, number, seed):
    roomy = fuse(latency, num_stages, num_micro_batches=number)
    refused = np.triu(np.random.default_rng(seed).random(latency.shape) < 0.3, k=1)
    tight = fuse(np.where(refused, np.inf, latency), num_stages, num_micro_batches=number)
    tight_s, roomy_s = (charged_by_hand(latency, own, num_stages, number) for own in (tight, roomy))
    assert tight_s >= roomy_s * (1 - 1e-9)


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
