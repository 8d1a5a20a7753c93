"""A simulation keeps every dependency and counts every byte, and corrupt templates are refused."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peft_mux.scheduler.costs.hardware import Link
from peft_mux.scheduler.pipeline.load import BucketLoad
from peft_mux.scheduler.pipeline.simulator import simulate
from peft_mux.scheduler.pipeline.template import Action, PipelineTemplate, Schedule, build_template
from tests.scheduler.pipeline.cases import VARIANTS, bubble_s, even, one_bucket, tightest_limit, uneven_buckets


def template_of(rows: list[str]) -> PipelineTemplate:
    """Return a template from rows such as "F0.0 B0.0"."""
    actions = tuple(
        tuple(Action(word[0], int(word[1:].split(".")[0]), int(word.split(".")[1]), stage) for word in row.split())
        for stage, row in enumerate(rows)
    )
    return PipelineTemplate("mux", len(rows), 1, actions)


# --------------------------------------------------------------- what happens when


def test_each_action_starts_when_its_device_is_free_and_its_input_is_there() -> None:
    buckets = one_bucket([2, 3], micro_batches=2)
    result = simulate(template_of(["F0.0 F0.1 B0.0 B0.1", "F0.0 B0.0 F0.1 B0.1"]), buckets)
    assert [(span.device, str(span.action), span.start_s, span.end_s) for span in result.spans] == [
        (0, "F0.0", 0, 2),
        (0, "F0.1", 2, 4),
        (0, "B0.0", 8, 10),
        (0, "B0.1", 14, 16),
        (1, "F0.0", 2, 5),
        (1, "B0.0", 5, 8),
        (1, "F0.1", 8, 11),
        (1, "B0.1", 11, 14),
    ]
    assert (result.makespan_s, result.busy_s) == (16, (8, 12))
    assert (bubble_s(result, 0), bubble_s(result, 1)) == (8, 0)
    assert result.peak_bytes == (2, 1)
    assert result.utilization == 20 / 32


def test_messages_take_time_and_each_direction_carries_one_at_a_time() -> None:
    buckets = one_bucket([1, 1], micro_batches=3, output_bytes=20)
    link = Link(latency_s=1.0, bytes_per_s=10.0)  # 3 s a message
    result = simulate(build_template(buckets, "gpipe"), buckets, links=link)
    starts = [span.start_s for span in result.spans if span.device == 1 and span.action.kind == "F"]
    assert starts == [4, 7, 10]
    assert result.makespan_s == (1 + 3 + 3 + 3 + 1) + (1 + 3 + 3 + 3 + 1)


def test_the_two_directions_of_a_link_do_not_wait_for_each_other() -> None:
    buckets = one_bucket([1, 1], micro_batches=2, output_bytes=1)
    rows = ["F0.0 F0.1 B0.0 B0.1", "F0.0 B0.0 F0.1 B0.1"]
    result = simulate(template_of(rows), buckets, links=Link(0.0, 0.25))  # 4 s a message
    arrivals = {(span.device, str(span.action)): span.start_s for span in result.spans}
    # The second forward is on its way from 5 to 9, the first backward in the other direction from 7 to 11.
    assert (arrivals[1, "F0.1"], arrivals[0, "B0.0"]) == (9, 11)


def test_virtual_stages_send_around_the_ring() -> None:
    buckets = one_bucket([2, 2, 2], micro_batches=1)
    template = build_template(buckets, "interleaved_1f1b", num_chunks=2)
    # Five hops in each direction, one of them from the last stage to the first.
    assert simulate(template, buckets, links=Link(7.0, 1.0)).makespan_s == 12 + 2 * 5 * 7


@settings(max_examples=30)
@given(uneven_buckets(), st.sampled_from(VARIANTS), st.integers(0, 3))
def test_a_simulation_keeps_every_dependency(
    buckets: list[BucketLoad], variant: tuple[Schedule, int], latency: int
) -> None:
    schedule, num_chunks = variant
    template = build_template(buckets, schedule, num_chunks=num_chunks)
    result = simulate(template, buckets, links=Link(float(latency), 2.0))
    times = {(s.action.kind, s.action.bucket, s.action.micro_batch, s.action.chunk, s.device): s for s in result.spans}
    last = template.num_stages * num_chunks - 1
    for (kind, bucket, number, chunk, device), span in times.items():
        place = chunk * template.num_stages + device
        before = place - 1 if kind == "F" else place + 1
        if 0 <= before <= last:
            source = before % template.num_stages
            earlier = times[kind, bucket, number, before // template.num_stages, source]
            way_s = 0.0 if source == device else latency + buckets[bucket].output_bytes / 2
            assert span.start_s >= earlier.end_s + way_s - 1e-9
        if kind == "B":
            assert span.start_s >= times["F", bucket, number, chunk, device].end_s
    for stage in range(template.num_stages):
        mine = [span for span in result.spans if span.device == stage]
        assert all(a.end_s <= b.start_s for a, b in itertools.pairwise(mine))
        idle_s = mine[-1].end_s - mine[0].start_s - result.busy_s[stage]
        assert bubble_s(result, stage) == pytest.approx(idle_s, abs=1e-9)


@settings(max_examples=30)
@given(uneven_buckets(), st.sampled_from(VARIANTS), st.integers(0, 40))
def test_the_reported_peak_is_what_is_held_at_the_fullest_instant(
    buckets: list[BucketLoad], variant: tuple[Schedule, int], more: int
) -> None:
    limit = tuple(need + more for need in tightest_limit(buckets))
    template = build_template(buckets, variant[0], num_chunks=variant[1], memory_limit_bytes=limit)
    result = simulate(template, buckets)
    for stage in range(template.num_stages):
        alive: dict[tuple[int, int, int], list[float]] = {}
        for index, span in enumerate(span for span in result.spans if span.device == stage):
            alive.setdefault((span.action.bucket, span.action.micro_batch, span.action.chunk), []).append(index)
        sizes = {key: buckets[key[0]].chunk_bytes(stage, key[2], template.num_chunks) for key in alive}
        held = [
            sum(sizes[key] for key, (begin, end) in alive.items() if begin <= instant <= end)
            for instant in range(2 * len(alive))
        ]
        # While a backward runs its activations are still there, so the fullest instant may be during it.
        assert max(held) == result.peak_bytes[stage] <= limit[stage]


# ------------------------------------------------------------- corrupt templates


def corrupted(template: PipelineTemplate, stage: int, row: Sequence[Action]) -> PipelineTemplate:
    rows = list(template.actions)
    rows[stage] = tuple(row)
    return dataclasses.replace(template, actions=tuple(rows))


@settings(max_examples=60)
@given(uneven_buckets(), st.sampled_from(VARIANTS), st.data())
def test_a_template_with_a_dropped_doubled_or_changed_action_is_refused(
    buckets: list[BucketLoad], variant: tuple[Schedule, int], data: st.DataObject
) -> None:
    template = build_template(buckets, variant[0], num_chunks=variant[1])
    stage = data.draw(st.integers(0, template.num_stages - 1))
    row = list(template.actions[stage])
    at = data.draw(st.integers(0, len(row) - 1))
    fault = data.draw(st.sampled_from(["dropped", "doubled", "foreign", "turned", "misplaced"]))
    victim = str(row[at])
    if fault == "dropped":
        del row[at]
        message = f"{victim} is missing"
    elif fault == "doubled":
        row.insert(at, row[at])
        message = f"{victim} is there 2 times"
    elif fault == "foreign":
        row[at] = dataclasses.replace(row[at], bucket=len(buckets))
        message = f"{row[at]} is not of these buckets"
    elif fault == "turned":
        row[at] = dataclasses.replace(row[at], kind="B" if row[at].kind == "F" else "F")
        message = f"{victim} is missing"
    else:
        row[at] = dataclasses.replace(row[at], stage=stage + 1)
        message = f"{victim} belongs to stage {stage + 1}"
    broken = corrupted(template, stage, row)
    with pytest.raises(ValueError, match=rf"template cannot be run(.|\n)*stage {stage}: {message}"):
        simulate(broken, buckets)


@settings(max_examples=30)
@given(uneven_buckets(), st.sampled_from(VARIANTS), st.data())
def test_a_template_with_a_backward_before_its_forward_is_refused(
    buckets: list[BucketLoad], variant: tuple[Schedule, int], data: st.DataObject
) -> None:
    template = build_template(buckets, variant[0], num_chunks=variant[1])
    stage = data.draw(st.integers(0, template.num_stages - 1))
    row = list(template.actions[stage])
    forward = row[data.draw(st.integers(0, len(row) - 1))]
    places = [
        index
        for index, action in enumerate(row)
        if dataclasses.replace(action, kind="F") == dataclasses.replace(forward, kind="F")
    ]
    row[places[0]], row[places[1]] = row[places[1]], row[places[0]]
    with pytest.raises(ValueError, match=f"stage {stage}: {row[places[0]]} comes before its forward"):
        simulate(corrupted(template, stage, row), buckets)


def test_lists_that_wait_for_each_other_are_refused_with_what_they_wait_for() -> None:
    buckets = one_bucket([1, 1], micro_batches=2)
    template = template_of(["F0.0 B0.0 F0.1 B0.1", "F0.0 F0.1 B0.0 B0.1"])
    with pytest.raises(ValueError, match=r"2 things are wrong") as refusal:
        simulate(template, buckets)
    assert "stage 0 comes to a halt before B0.0" in str(refusal.value)
    assert "stage 1 comes to a halt before F0.1" in str(refusal.value)


def test_all_violations_are_listed_together() -> None:
    buckets = one_bucket([1, 1], micro_batches=2)
    template = template_of(["F0.0 F0.0 B0.0 B0.1", "F0.0 F0.1 B0.1"])
    with pytest.raises(ValueError, match="4 things are wrong") as refusal:
        simulate(template, buckets)
    for fault in (
        "stage 0: F0.0 is there 2 times",
        "stage 0: F0.1 is missing",
        "stage 0: B0.1 comes before its forward",
        "stage 1: B0.0 is missing",
    ):
        assert fault in str(refusal.value)


def test_buckets_of_another_number_of_stages_are_refused() -> None:
    template = build_template(even([1], stages=2, micro_batches=1), "mux")
    with pytest.raises(ValueError, match="the buckets must have 2 stages, as the template has"):
        simulate(template, even([1], stages=3, micro_batches=1))
