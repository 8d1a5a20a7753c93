"""Task fusion: Eq. 6 of MuxTune against brute force over all partitions into consecutive ranges."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from peft_mux.scheduler.planner.fusion import Interval, cheapest_partition, fuse


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
