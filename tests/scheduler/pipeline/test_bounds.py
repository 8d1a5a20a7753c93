"""Simulated pipelines agree with the closed forms and bounds of the paper (M Eq. 4, Appendix A) where these hold."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.planner.closed_forms import closed_form_1f1b_s, closed_form_gpipe_s, lemma_1_s
from peft_mux.scheduler.pipeline.load import BucketLoad
from peft_mux.scheduler.pipeline.simulator import lower_bound_s, simulate
from peft_mux.scheduler.pipeline.template import Action, PipelineTemplate, Schedule, build_template
from tests.scheduler.pipeline.cases import VARIANTS, bubble_s, even, one_bucket, uneven_buckets

LATENCIES = st.lists(st.integers(1, 30), min_size=1, max_size=6)


def makespan_s(buckets: list[BucketLoad], schedule: Schedule, num_chunks: int = 1) -> float:
    return simulate(build_template(buckets, schedule, num_chunks=num_chunks), buckets).makespan_s


@settings(max_examples=60)
@given(st.integers(1, 8), st.integers(1, 16), st.integers(1, 50))
def test_1f1b_of_one_task_with_equal_stages_takes_the_time_of_eq_4(stages: int, micro_batches: int, each: int) -> None:
    got = makespan_s(one_bucket([each] * stages, micro_batches), "1f1b")
    assert got == closed_form_1f1b_s([each] * stages, micro_batches) == 2 * each * (stages - 1 + micro_batches)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 9), st.sampled_from(["1f1b", "mux"]))
def test_eq_4_is_exact_where_the_last_stage_is_the_slowest(
    latencies: list[int], micro_batches: int, how: Schedule
) -> None:
    latencies.append(max(latencies))
    got = makespan_s(one_bucket(latencies, micro_batches), how)
    assert got == closed_form_1f1b_s(latencies, micro_batches)


@settings(max_examples=60)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 9))
def test_eq_4_is_never_too_short(latencies: list[int], micro_batches: int) -> None:
    assert makespan_s(one_bucket(latencies, micro_batches), "1f1b") <= closed_form_1f1b_s(latencies, micro_batches)


def test_eq_4_is_too_long_where_an_earlier_stage_is_the_slowest() -> None:
    assert makespan_s(one_bucket([10, 1], 1), "1f1b") == 22
    assert closed_form_1f1b_s([10, 1], 1) == 40


@settings(max_examples=60)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6), st.integers(1, 9))
def test_gpipe_of_one_bucket_takes_the_time_of_two_flow_shops(stages: list[tuple[int, int]], count: int) -> None:
    forward, backward = (tuple(float(value) for value in column) for column in zip(*stages, strict=True))
    bucket = BucketLoad(
        name="only",
        forward_s=forward,
        backward_s=backward,
        activation_bytes=(1,) * len(stages),
        num_micro_batches=count,
    )
    assert makespan_s([bucket], "gpipe") == closed_form_gpipe_s(forward, backward, count)


@settings(max_examples=80)
@given(LATENCIES, st.integers(1, 7), st.integers(1, 6))
def test_the_last_stage_of_mux_never_idles_under_the_premises_of_theorem_2(
    latencies: list[int], stages: int, micro_batches: int
) -> None:
    buckets = even([float(latency) for latency in latencies], stages=stages, micro_batches=micro_batches)
    result = simulate(build_template(buckets, "mux"), buckets)
    assert bubble_s(result, -1) == 0
    assert result.busy_s[-1] == 2 * micro_batches * sum(latencies)


def test_1f1b_in_ascending_order_does_idle_at_the_last_stage() -> None:
    buckets = even([1, 9], stages=4, micro_batches=3)
    assert bubble_s(simulate(build_template(buckets, "1f1b"), buckets), -1) > 0


@settings(max_examples=60)
@given(LATENCIES, st.integers(1, 7), st.integers(1, 6))
def test_mux_is_never_faster_than_lemmas_1_and_2(latencies: list[int], stages: int, micro_batches: int) -> None:
    buckets = even([float(latency) for latency in latencies], stages=stages, micro_batches=micro_batches)
    assert makespan_s(buckets, "mux") >= lemma_1_s(buckets)


@settings(max_examples=20)
@given(st.integers(1, 9), st.integers(1, 5), st.integers(1, 6), st.integers(1, 5))
def test_lemma_1_is_exact_for_equal_buckets(each: int, num_buckets: int, stages: int, micro_batches: int) -> None:
    buckets = even([float(each)] * num_buckets, stages=stages, micro_batches=micro_batches)
    assert makespan_s(buckets, "mux") == lemma_1_s(buckets)


def test_lemma_1_is_too_short_where_long_backwards_hold_up_the_drain() -> None:
    buckets = even([10, 1], stages=2, micro_batches=1)
    assert lemma_1_s(buckets) == 33
    assert makespan_s(buckets, "mux") == 41
    assert fastest_of_all_orders_s(buckets) == 41


@settings(max_examples=60)
@given(uneven_buckets(), st.sampled_from(VARIANTS))
def test_no_schedule_beats_the_lower_bound(buckets: list[BucketLoad], variant: tuple[Schedule, int]) -> None:
    schedule, num_chunks = variant
    bound = lower_bound_s(buckets, num_chunks=num_chunks)
    assert makespan_s(buckets, schedule, num_chunks) >= bound * (1 - 1e-12)


def fastest_of_all_orders_s(buckets: list[BucketLoad]) -> float:
    """Return the least makespan of all templates on two stages, by trying each pair of orders."""
    items = [(index, number) for index, bucket in enumerate(buckets) for number in range(bucket.num_micro_batches)]
    words = [(kind, *item) for kind in "FB" for item in items]
    orders = [
        order
        for order in itertools.permutations(words)
        if all(order.index(("F", *item)) < order.index(("B", *item)) for item in items)
    ]
    fastest = float("inf")
    for pair in itertools.product(orders, repeat=2):
        rows = tuple(tuple(Action(*word, stage) for word in order) for stage, order in enumerate(pair))
        try:
            fastest = min(fastest, simulate(PipelineTemplate("mux", 2, 1, rows), buckets).makespan_s)
        except ValueError:  # the two orders wait for each other
            continue
    return fastest


@pytest.mark.parametrize("latencies", [[3, 2, 1], [5, 5, 1], [10, 6, 5]])
def test_mux_loses_no_more_than_warm_up_against_the_fastest_of_all_orders_on_small_instances(
    latencies: list[float],
) -> None:
    buckets = even(latencies, stages=2, micro_batches=1)
    best, mux = fastest_of_all_orders_s(buckets), makespan_s(buckets, "mux")
    assert lower_bound_s(buckets) <= best <= mux
    # Another order may begin with a shorter bucket and so save warm-up; steady time it cannot save.
    assert mux - best <= latencies[0] - latencies[-1]


def test_mux_is_faster_than_one_bucket_after_another_in_the_manner_of_figure_10() -> None:
    buckets = even([3, 2], stages=4, micro_batches=4)
    in_turn = sum(makespan_s([bucket], "1f1b") for bucket in buckets)
    assert in_turn == 70
    result = simulate(build_template(buckets, "mux"), buckets)
    assert result.makespan_s < makespan_s(list(reversed(buckets)), "1f1b") < in_turn
    assert bubble_s(result, -1) == 0
