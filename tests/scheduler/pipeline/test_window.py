"""Steps that are not drained between: in order for each bucket, in the memory of one step, in the time of the audit."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peft_mux.scheduler.costs.hardware import Link
from peft_mux.scheduler.pipeline.load import BucketLoad
from peft_mux.scheduler.pipeline.simulator import (
    build_window,
    lower_bound_s,
    simulate,
    steady_lower_bound_s,
    window_step_s,
)
from peft_mux.scheduler.pipeline.template import Action, PipelineTemplate, Schedule, build_template
from tests.scheduler.pipeline.cases import VARIANTS, even, runs_within, tightest_limit, uneven_buckets


@pytest.mark.parametrize(
    ("stages", "micro_batches", "times"), [(2, 1, 1.20), (4, 1, 1.56), (4, 4, 1.15)], ids=["S2C1", "S4C1", "S4C4"]
)
def test_six_steps_without_a_flush_are_faster_than_six_that_drain(
    stages: int, micro_batches: int, times: float
) -> None:
    buckets = even([1] * 4, stages=stages, micro_batches=micro_batches)
    flushed = build_template(buckets, "mux")
    window = build_window(flushed, buckets, 6)
    ratio = simulate(flushed, buckets).makespan_s / simulate(window, buckets).step_s
    assert ratio == pytest.approx(times, abs=0.005)


def test_in_the_long_run_no_stage_waits_where_buckets_are_as_many_as_stages_need() -> None:
    buckets = even([1] * 8, stages=4, micro_batches=1)
    steps = [simulate(build_template(buckets, "mux", num_steps=n), buckets).makespan_s for n in (20, 40)]
    assert (steps[1] - steps[0]) / 20 == pytest.approx(steady_lower_bound_s(buckets))


def test_a_bucket_by_itself_gains_nothing() -> None:
    buckets = even([1], stages=3, micro_batches=4)
    template = build_template(buckets, "mux")
    assert simulate(build_window(template, buckets, 5), buckets).step_s == simulate(template, buckets).makespan_s
    assert window_step_s(template, buckets) == simulate(template, buckets).makespan_s


@settings(max_examples=60)
@given(uneven_buckets(), st.sampled_from(VARIANTS), st.integers(2, 4))
def test_every_window_comes_to_its_end_and_holds_no_more_than_one_step(
    buckets: list[BucketLoad], variant: tuple[Schedule, int], num_steps: int
) -> None:
    schedule, num_chunks = variant
    template = build_template(buckets, schedule, num_chunks=num_chunks)
    window = build_window(template, buckets, num_steps)
    assert runs_within(window, buckets, simulate(template, buckets).peak_bytes)
    assert simulate(window, buckets).step_s >= steady_lower_bound_s(buckets, num_chunks=num_chunks) - 1e-9


@settings(max_examples=40)
@given(uneven_buckets(), st.sampled_from(VARIANTS))
def test_a_window_comes_to_its_end_in_the_tightest_memory(
    buckets: list[BucketLoad], variant: tuple[Schedule, int]
) -> None:
    limit = tightest_limit(buckets)
    template = build_template(buckets, variant[0], num_chunks=variant[1], memory_limit_bytes=limit, num_steps=3)
    assert runs_within(template, buckets, limit)


@settings(max_examples=40)
@given(uneven_buckets(), st.sampled_from(VARIANTS), st.integers(2, 4))
def test_each_stage_takes_the_micro_batches_of_a_bucket_in_the_order_of_one_step(
    buckets: list[BucketLoad], variant: tuple[Schedule, int], num_steps: int
) -> None:
    # So gradients add up as they do where every step is flushed.
    template = build_template(buckets, variant[0], num_chunks=variant[1])
    window = build_window(template, buckets, num_steps)
    for once, row in zip(template.actions, window.actions, strict=True):
        assert micro_batches_of(row) == {key: own * num_steps for key, own in micro_batches_of(once).items()}


def micro_batches_of(row: Sequence[Action]) -> dict[tuple[str, int, int], list[int]]:
    """Return the micro-batches that a stage runs, in order, by kind, bucket and chunk."""
    found: dict[tuple[str, int, int], list[int]] = {}
    for action in row:
        found.setdefault((action.kind, action.bucket, action.chunk), []).append(action.micro_batch)
    return found


def test_a_forward_before_the_end_of_the_step_before_is_refused() -> None:
    buckets = even([1, 1], stages=2, micro_batches=1)
    window = build_template(buckets, "mux", num_steps=2)
    row = list(window.actions[1])
    early = next(index for index, action in enumerate(row) if str(action) == "F0.0+1")
    late = next(index for index, action in enumerate(row) if str(action) == "B0.0")
    row[early], row[late] = row[late], row[early]
    broken = dataclasses.replace(window, actions=(window.actions[0], tuple(row)))
    with pytest.raises(ValueError, match=r"stage 1: F0.0\+1 comes before the end of step 0 of its bucket"):
        simulate(broken, buckets)


def test_links_delay_a_window_as_they_delay_a_step() -> None:
    buckets = [dataclasses.replace(load, output_bytes=10) for load in even([1] * 3, stages=3, micro_batches=2)]
    link = Link(latency_s=0.1, bytes_per_s=20.0)
    template = build_template(buckets, "mux", links=link)
    window = build_window(template, buckets, 4, links=link)
    slow, fast = simulate(window, buckets, links=link).step_s, simulate(window, buckets).step_s
    assert slow > fast
    assert window_step_s(template, buckets, links=link) < simulate(template, buckets, links=link).makespan_s


def test_a_window_comes_back_from_json_as_it_was() -> None:
    window = build_template(even([1, 2], stages=2, micro_batches=2), "mux", num_steps=3)
    assert PipelineTemplate.from_dict(window.to_dict()) == window
    assert str(window.actions[0][-1]).endswith("+2")


@given(uneven_buckets())
def test_a_step_by_itself_is_bounded_from_below_by_what_bounds_many(buckets: list[BucketLoad]) -> None:
    assert steady_lower_bound_s(buckets) <= lower_bound_s(buckets) + 1e-9
