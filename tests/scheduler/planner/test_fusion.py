"""Task fusion: Eq. 6 of MuxTune against brute force over all partitions into consecutive ranges."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from peft_mux.scheduler.planner.fusion import Interval, fuse, fuse_into, fusion_order, share_of_others

RULES = ("longest", "lowest")


def contiguous_partitions(num_tasks: int) -> Iterator[tuple[Interval, ...]]:
    for number in range(num_tasks):
        for inner in itertools.combinations(range(1, num_tasks), number):
            cuts = (0, *inner, num_tasks)
            yield tuple(itertools.pairwise(cuts))


def charged_by_hand(latency, intervals, stages: int, micro_batches: int | None, rule: str) -> float:
    """Restate the objective hTask by hTask, without the closed form that `fuse` minimises."""
    share = 1 / stages if micro_batches is None else 2 * micro_batches / (2 * (stages - 1) + 2 * micro_batches)
    latencies = [latency[start][stop - 1] for start, stop in intervals]
    whole = latencies.index(max(latencies)) if rule == "longest" else 0
    return sum(each if index == whole else each * share for index, each in enumerate(latencies))


def brute_force(latency, stages, micro_batches, rule, num_htasks: int | None = None) -> float:
    return min(
        charged_by_hand(latency, intervals, stages, micro_batches, rule)
        for intervals in contiguous_partitions(len(latency))
        if num_htasks is None or len(intervals) == num_htasks
    )


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
micro_batches = st.sampled_from([None, 1, 2, 8])
rules = st.sampled_from(RULES)


@settings(max_examples=120, deadline=None)
@given(latency_matrices(), stages, micro_batches, rules)
def test_fusion_equals_brute_force_over_all_contiguous_partitions(latency, num_stages, number, rule):
    fusion = fuse(latency, num_stages, num_micro_batches=number, charged_whole=rule)
    assert fusion.objective_s == pytest.approx(brute_force(latency, num_stages, number, rule), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("seed", range(20))
def test_fusion_of_tasks_that_saturate_a_stage_equals_brute_force(seed, rule):
    draw = np.random.default_rng(seed)
    ends = np.concatenate(([0.0], np.cumsum(np.sort(np.exp(draw.uniform(np.log(32), np.log(4096), 9))))))
    latency = 20.0 + np.maximum(ends[None, 1:] - ends[:-1, None], 512) * draw.uniform(0.9, 1.1, (9, 9))
    for num_stages, number in ((2, 8), (4, None), (4, 2), (8, 4)):
        fusion = fuse(latency, num_stages, num_micro_batches=number, charged_whole=rule)
        assert fusion.objective_s == pytest.approx(brute_force(latency, num_stages, number, rule), rel=1e-12)


@settings(max_examples=40, deadline=None)
@given(latency_matrices(max_tasks=8), stages, micro_batches, rules)
def test_fusion_into_every_number_of_htasks_equals_brute_force(latency, num_stages, number, rule):
    for num_htasks in range(1, len(latency) + 1):
        expected = brute_force(latency, num_stages, number, rule, num_htasks)
        if np.isinf(expected):
            with pytest.raises(ValueError, match=f"num_htasks is {num_htasks}, but no such fusion fits"):
                fuse_into(latency, num_stages, num_htasks, num_micro_batches=number, charged_whole=rule)
            continue
        fusion = fuse_into(latency, num_stages, num_htasks, num_micro_batches=number, charged_whole=rule)
        assert len(fusion.intervals) == num_htasks
        assert fusion.objective_s == pytest.approx(expected, rel=1e-9, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(latency_matrices(max_tasks=30), stages, micro_batches, rules)
def test_intervals_cover_every_task_once_fit_and_cost_what_is_claimed(latency, num_stages, number, rule):
    fusion = fuse(latency, num_stages, num_micro_batches=number, charged_whole=rule)
    covered = [task for start, stop in fusion.intervals for task in range(start, stop)]
    assert covered == list(range(len(latency)))
    assert all(np.isfinite(latency[start, stop - 1]) for start, stop in fusion.intervals)
    by_hand = charged_by_hand(latency, fusion.intervals, num_stages, number, rule)
    assert fusion.objective_s == pytest.approx(by_hand, rel=1e-9, abs=1e-12)


@settings(max_examples=60, deadline=None)
@given(latency_matrices(max_tasks=20, refusing=False), stages, micro_batches, rules, st.integers(0, 2**32 - 1))
def test_htasks_that_no_longer_fit_never_lower_the_objective(latency, num_stages, number, rule, seed):
    roomy = fuse(latency, num_stages, num_micro_batches=number, charged_whole=rule)
    refused = np.triu(np.random.default_rng(seed).random(latency.shape) < 0.3, k=1)
    tight = fuse(np.where(refused, np.inf, latency), num_stages, num_micro_batches=number, charged_whole=rule)
    assert tight.objective_s >= roomy.objective_s * (1 - 1e-12)


@settings(max_examples=40, deadline=None)
@given(latency_matrices(max_tasks=12), stages, micro_batches, rules)
def test_fusion_is_the_best_of_all_numbers_of_htasks(latency, num_stages, number, rule):
    objectives = []
    for num_htasks in range(1, len(latency) + 1):
        try:
            fusion = fuse_into(latency, num_stages, num_htasks, num_micro_batches=number, charged_whole=rule)
        except ValueError:
            continue
        objectives.append(fusion.objective_s)
    best = fuse(latency, num_stages, num_micro_batches=number, charged_whole=rule)
    assert best.objective_s == pytest.approx(min(objectives), rel=1e-9, abs=1e-12)


@settings(max_examples=20, deadline=None)
@given(latency_matrices(max_tasks=12), micro_batches)
def test_one_stage_charges_every_htask_whole(latency, number):
    fusion = fuse(latency, 1, num_micro_batches=number)
    assert fusion == fuse(latency, 1, num_micro_batches=number, charged_whole="lowest")
    assert fusion.objective_s == pytest.approx(sum(latency[start, stop - 1] for start, stop in fusion.intervals))


@pytest.mark.parametrize("rule", RULES)
def test_fusion_of_one_task_is_that_task(rule):
    fusion = fuse(np.array([[3.5]]), 4, charged_whole=rule)
    assert fusion.intervals == ((0, 1),)
    assert fusion.objective_s == 3.5


def test_equation_6_as_printed_charges_the_shortest_whole_and_the_others_by_stage():
    latency = np.array([[1.0, 9.0, 30.0], [0.0, 4.0, 30.0], [0.0, 0.0, 8.0]])
    fusion = fuse(latency, 4, charged_whole="lowest")
    assert fusion.intervals == ((0, 1), (1, 2), (2, 3))
    assert fusion.objective_s == pytest.approx(1 + 4 / 4 + 8 / 4)


def test_charging_the_longest_whole_keeps_a_long_htask_from_hiding_behind_a_short_one():
    # Fused, the two take 11.5 s; one after the other they take more than the longer's 11 s plus the shorter's share.
    latency = np.array([[1.0, 11.5], [0.0, 11.0]])
    assert fuse(latency, 8, charged_whole="lowest").intervals == ((0, 1), (1, 2))
    assert fuse(latency, 8, num_micro_batches=8).intervals == ((0, 2),)


def test_more_micro_batches_raise_the_share_of_every_further_htask():
    assert share_of_others(4) == share_of_others(4, 1) == 0.25
    assert share_of_others(4, 3) == 0.5
    assert [share_of_others(1, number) for number in (None, 1, 8)] == [1.0, 1.0, 1.0]


def test_equal_objectives_leave_the_fewest_cuts_at_the_end():
    latency = np.array([[1.0, 2.0, 3.0], [0.0, 1.0, 2.0], [0.0, 0.0, 1.0]])
    assert fuse(latency, 1).intervals == ((0, 3),)
    assert fuse_into(latency, 1, 2).intervals == ((0, 1), (1, 3))


def test_fusion_order_is_ascending_and_keeps_equal_ones_by_index():
    assert fusion_order([30, 10, 30, 5]) == (3, 1, 0, 2)
    assert fusion_order([]) == ()


def test_a_thousand_tasks_are_fused_and_no_neighbours_would_be_better_joined_or_cut():
    tokens = np.sort(np.exp(np.random.default_rng(7).uniform(np.log(32), np.log(4096), 1000)))
    ends = np.concatenate(([0.0], np.cumsum(tokens)))
    latency = 1.0 + np.maximum(ends[None, 1:] - ends[:-1, None], 512) / 512
    fusion = fuse(latency, 4, num_micro_batches=4)
    assert fusion.intervals[-1][1] == 1000
    cuts = [start for start, _ in fusion.intervals] + [1000]
    for cut in range(1, 1000):
        other = sorted(set(cuts) ^ {cut})
        objective = charged_by_hand(latency, tuple(itertools.pairwise(other)), 4, 4, "longest")
        assert objective >= fusion.objective_s * (1 - 1e-12)


def test_the_first_task_that_does_not_fit_alone_is_named():
    latency = np.ones((4, 4))
    latency[2, 2:] = latency[:3, 2:] = np.inf
    latency[3, 3] = np.inf
    with pytest.raises(ValueError, match=r"latency_s\[2, 2\] is inf: task 2 .* does not fit in memory even alone"):
        fuse(latency, 2)


def test_too_few_htasks_for_the_memory_name_the_fewest_that_fit():
    latency = np.where(np.eye(3, dtype=bool), 1.0, np.inf)
    with pytest.raises(ValueError, match=r"num_htasks is 2, .* the fewest hTasks that fit are 3"):
        fuse_into(latency, 2, 2)


@pytest.mark.parametrize(
    ("latency", "message"),
    [
        (np.ones((2, 3)), r"shape \(2, 3\)"),
        (np.ones(4), r"shape \(4,\)"),
        (np.ones((0, 0)), r"shape \(0, 0\)"),
        (np.array([[1.0, -2.0], [0.0, 1.0]]), r"latency_s\[0, 1\] is -2.0"),
        (np.array([[1.0, 2.0], [0.0, np.nan]]), r"latency_s\[1, 1\] is nan"),
        (np.array([[1.0, -np.inf], [0.0, 1.0]]), r"latency_s\[0, 1\] is -inf"),
    ],
)
def test_matrices_that_mean_nothing_are_refused(latency, message):
    with pytest.raises(ValueError, match=message):
        fuse(latency, 2)


def test_numbers_out_of_range_are_refused_with_what_is_allowed():
    latency = np.ones((2, 2))
    with pytest.raises(ValueError, match="num_stages is 0; allowed: 1 or more"):
        fuse(latency, 0)
    with pytest.raises(ValueError, match="num_micro_batches is 0; allowed: 1 or more"):
        fuse(latency, 2, num_micro_batches=0)
    with pytest.raises(ValueError, match="num_htasks is 3; allowed: 1 to 2"):
        fuse_into(latency, 2, 3)
    with pytest.raises(ValueError, match="charged_whole is 'first'; allowed: 'longest', or 'lowest'"):
        fuse(latency, 2, charged_whole="first")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match=r"tokens\[1\] is -1; allowed: 0 or more"):
        fusion_order([3, -1])
