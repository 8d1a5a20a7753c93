"""The simulator runs a template: order, times, memory, bounds, and windows of steps without a flush."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peft_mux.scheduler.names import Schedule
from peft_mux.scheduler.pipeline.simulator import (
    build_window,
    lower_bound_s,
    simulate,
    simulate_one_stage,
    steady_lower_bound_s,
    window_step_s,
)
from peft_mux.scheduler.pipeline.template import build_template
from peft_mux.scheduler.plan import Action, Link, PipelineTemplate
from tests.scheduler.pipeline.cases import (
    Buckets,
    Variant,
    a_bucket,
    bubble_s,
    even,
    every_variant,
    one_bucket,
    runs_within,
    template_of,
    tightest_limit,
    uneven_buckets,
)
from tests.scheduler.pipeline.closed_forms import closed_form_1f1b_s, closed_form_gpipe_s, lemma_1_s


def written(*rows: str) -> PipelineTemplate:
    """Return a template from rows such as "F0.0 B0.0"."""
    actions = tuple(
        tuple(Action(word[0], int(word[1:].split(".")[0]), int(word.split(".")[1]), stage) for word in row.split())
        for stage, row in enumerate(rows)
    )
    return PipelineTemplate("mux", len(rows), 1, actions)


# --------------------------------------------------------------- what happens when


@given(uneven_buckets(), st.lists(st.floats(0.1, 3.0), min_size=7, max_size=7))
def test_one_stage_runs_its_template_without_a_simulation(buckets: Buckets, weights: list[float]) -> None:
    first = [
        dataclasses.replace(
            bucket,
            forward_s=bucket.forward_s[:1],
            backward_s=bucket.backward_s[:1],
            activation_bytes=bucket.activation_bytes[:1],
            weights=tuple(weights[: bucket.num_micro_batches]),
        )
        for bucket in buckets
    ]
    template = build_template(first, "1f1b")
    line = simulate_one_stage(first)
    assert line == simulate(template, first)
    assert (tuple(span.action for span in line.spans),) == template.actions


def test_each_action_starts_when_its_device_is_free_and_its_input_is_there() -> None:
    buckets = one_bucket([2, 3], micro_batches=2)
    result = simulate(written("F0.0 F0.1 B0.0 B0.1", "F0.0 B0.0 F0.1 B0.1"), buckets)
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
    # The second forward is on its way from 5 to 9, the first backward in the other direction from 7 to 11.
    both = one_bucket([1, 1], micro_batches=2, output_bytes=1)
    result = simulate(written("F0.0 F0.1 B0.0 B0.1", "F0.0 B0.0 F0.1 B0.1"), both, links=Link(0.0, 0.25))
    starts_s = {(span.device, str(span.action)): span.start_s for span in result.spans}
    assert (starts_s[1, "F0.1"], starts_s[0, "B0.0"]) == (9, 11)


@given(uneven_buckets(), every_variant, st.integers(0, 3))
def test_a_simulation_keeps_every_dependency(buckets: Buckets, variant: Variant, latency: int) -> None:
    template = template_of(buckets, variant)
    result = simulate(template, buckets, links=Link(float(latency), 2.0))
    times = {(s.action.kind, s.action.bucket, s.action.micro_batch, s.action.chunk, s.device): s for s in result.spans}
    last = template.num_stages * template.num_chunks - 1
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


@given(uneven_buckets(), every_variant, st.integers(0, 40))
def test_the_reported_peak_is_what_is_held_at_the_fullest_instant(
    buckets: Buckets, variant: Variant, more: int
) -> None:
    limit = tuple(need + more for need in tightest_limit(buckets))
    template = template_of(buckets, variant, memory_limit_bytes=limit)
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
@given(uneven_buckets(), every_variant, st.data())
def test_a_template_with_a_dropped_doubled_or_changed_action_is_refused(
    buckets: Buckets, variant: Variant, data: st.DataObject
) -> None:
    template = template_of(buckets, variant)
    stage = data.draw(st.integers(0, template.num_stages - 1))
    row = list(template.actions[stage])
    at = data.draw(st.integers(0, len(row) - 1))
    fault = data.draw(st.sampled_from(["dropped", "doubled", "foreign", "turned", "misplaced", "before its forward"]))
    victim = str(row[at])
    if fault == "dropped":
        del row[at]
        message = f"{victim} is missing"
    elif fault == "doubled":
        row.insert(at, row[at])
        message = f"{victim} is there 2 times"
    elif fault == "foreign":
        row[at] = row[at]._replace(bucket=len(buckets))
        message = f"{row[at]} is not of these buckets"
    elif fault == "turned":
        row[at] = row[at]._replace(kind="B" if row[at].kind == "F" else "F")
        message = f"{victim} is missing"
    elif fault == "misplaced":
        row[at] = row[at]._replace(stage=stage + 1)
        message = f"{victim} belongs to stage {stage + 1}"
    else:
        first, second = (row.index(row[at]._replace(kind=kind)) for kind in "FB")
        row[first], row[second] = row[second], row[first]
        message = f"{row[first]} comes before its forward"
    broken = corrupted(template, stage, row)
    with pytest.raises(ValueError, match=rf"template cannot be run(.|\n)*stage {stage}: {message}"):
        simulate(broken, buckets)


@pytest.mark.parametrize(
    ("rows", "faults"),
    [
        (
            ("F0.0 F0.0 B0.0 B0.1", "F0.0 F0.1 B0.1"),
            [
                "stage 0: F0.0 is there 2 times",
                "stage 0: F0.1 is missing",
                "stage 0: B0.1 comes before its forward",
                "stage 1: B0.0 is missing",
            ],
        ),
        (
            ("F0.0 B0.0 F0.1 B0.1", "F0.0 F0.1 B0.0 B0.1"),
            ["stage 0 comes to a halt before B0.0", "stage 1 comes to a halt before F0.1"],
        ),
    ],
)
def test_all_violations_are_listed_together(rows: tuple[str, str], faults: list[str]) -> None:
    with pytest.raises(ValueError, match=f"{len(faults)} things are wrong") as refusal:
        simulate(written(*rows), one_bucket([1, 1], micro_batches=2))
    assert all(fault in str(refusal.value) for fault in faults)
    with pytest.raises(ValueError, match="the buckets must have 2 stages, as the template has"):
        simulate(written(*rows), one_bucket([1, 1, 1], micro_batches=2))


def makespan_s(buckets: Buckets, schedule: Schedule, num_chunks: int = 1) -> float:
    return simulate(template_of(buckets, (schedule, num_chunks)), buckets).makespan_s


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 9), st.sampled_from(["1f1b", "mux"]))
def test_eq_4_is_never_too_short_and_exact_where_the_last_stage_is_the_slowest(
    latencies: list[int], micro_batches: int, how: Schedule
) -> None:
    assert makespan_s(one_bucket(latencies, micro_batches), "1f1b") <= closed_form_1f1b_s(latencies, micro_batches)
    latencies.append(max(latencies))
    assert makespan_s(one_bucket(latencies, micro_batches), how) == closed_form_1f1b_s(latencies, micro_batches)
    equal = [latencies[0]] * len(latencies)
    assert closed_form_1f1b_s(equal, micro_batches) == 2 * equal[0] * (len(equal) - 1 + micro_batches)


def test_eq_4_is_too_long_where_an_earlier_stage_is_the_slowest() -> None:
    assert makespan_s(one_bucket([10, 1], 1), "1f1b") == 22
    assert closed_form_1f1b_s([10, 1], 1) == 40


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=6), st.integers(1, 9))
def test_gpipe_of_one_bucket_takes_the_time_of_two_flow_shops(stages: list[tuple[int, int]], count: int) -> None:
    forward, backward = (tuple(float(value) for value in column) for column in zip(*stages, strict=True))
    only = a_bucket("only", forward, count, backward_s=backward)
    assert makespan_s([only], "gpipe") == closed_form_gpipe_s(forward, backward, count)


@given(st.lists(st.integers(1, 30), min_size=1, max_size=6), st.integers(1, 7), st.integers(1, 6))
def test_the_last_stage_of_mux_never_idles_under_the_premises_of_theorem_2_and_lemmas_1_and_2_bound_it(
    latencies: list[float], stages: int, micro_batches: int
) -> None:
    buckets = even(latencies, stages=stages, micro_batches=micro_batches)
    result = simulate(build_template(buckets, "mux"), buckets)
    assert bubble_s(result, -1) == 0
    assert result.busy_s[-1] == 2 * micro_batches * sum(latencies)
    assert result.makespan_s >= lemma_1_s(buckets)
    equal = even([latencies[0]] * len(latencies), stages=stages, micro_batches=micro_batches)
    assert makespan_s(equal, "mux") == lemma_1_s(equal)


@given(uneven_buckets(), every_variant)
def test_no_schedule_beats_the_lower_bound_of_a_step_and_that_of_many_is_no_higher(
    buckets: Buckets, variant: Variant
) -> None:
    bound_s = lower_bound_s(buckets, num_chunks=variant[1])
    assert makespan_s(buckets, *variant) >= bound_s * (1 - 1e-12)
    assert steady_lower_bound_s(buckets) <= lower_bound_s(buckets) + 1e-9


def fastest_of_all_orders_s(buckets: Buckets) -> float:
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


@pytest.mark.parametrize("latencies", [[3, 2, 1], [10, 6, 5]])
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


def test_in_the_long_run_no_stage_waits_where_buckets_are_as_many_as_stages_need_and_one_bucket_gains_nothing() -> None:
    alone = even([1], stages=3, micro_batches=4)
    template = build_template(alone, "mux")
    assert window_step_s(template, alone) == simulate(template, alone).makespan_s
    buckets = even([1] * 8, stages=4, micro_batches=1)
    steps = [simulate(build_template(buckets, "mux", num_steps=n), buckets).makespan_s for n in (20, 40)]
    assert (steps[1] - steps[0]) / 20 == pytest.approx(steady_lower_bound_s(buckets))


@given(uneven_buckets(), every_variant, st.integers(2, 4))
def test_every_window_comes_to_its_end_holds_no_more_than_one_step_and_keeps_its_order_on_each_stage(
    buckets: Buckets, variant: Variant, num_steps: int
) -> None:
    template = template_of(buckets, variant)
    window = build_window(template, buckets, num_steps)
    assert runs_within(window, buckets, simulate(template, buckets).peak_bytes)
    assert simulate(window, buckets).step_s >= steady_lower_bound_s(buckets, num_chunks=variant[1]) - 1e-9
    # So gradients add up as they do where every step is flushed.
    for once, row in zip(template.actions, window.actions, strict=True):
        assert micro_batches_of(row) == {key: own * num_steps for key, own in micro_batches_of(once).items()}
    limit = tightest_limit(buckets)
    assert runs_within(template_of(buckets, variant, memory_limit_bytes=limit, num_steps=3), buckets, limit)


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
    early, late = (list(map(str, row)).index(action) for action in ("F0.0+1", "B0.0"))
    row[early], row[late] = row[late], row[early]
    with pytest.raises(ValueError, match=r"stage 1: F0.0\+1 comes before the end of step 0 of its bucket"):
        simulate(corrupted(window, 1, row), buckets)
