"""A template holds each action once, in an order that comes to an end, within the memory of every stage."""

from __future__ import annotations

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peft_mux.scheduler.pipeline.simulator import simulate
from peft_mux.scheduler.pipeline.template import build_template
from peft_mux.scheduler.plan import BucketLoad, Link, PipelineTemplate
from tests.scheduler.pipeline.cases import (
    VARIANTS,
    Buckets,
    Variant,
    even,
    every_variant,
    template_of,
    tightest_limit,
    uneven_buckets,
)


def written(template: PipelineTemplate) -> list[str]:
    return [" ".join(str(action) for action in row) for row in template.actions]


def megatron_rows(stages: int, chunks: int, micro_batches: int) -> list[list[tuple[str, int, int]]]:
    """Return Megatron-LM's interleaved order, written from its definition: warm-up, one forward one backward, drain."""
    forwards = [
        (number, chunk)
        for start in range(0, micro_batches, stages)
        for chunk in range(chunks)
        for number in range(start, start + stages)
    ]
    backwards = [(number, chunks - 1 - chunk) for number, chunk in forwards]
    rows = []
    for stage in range(stages):
        warm_up = min((stages - stage - 1) * 2 + (chunks - 1) * stages, len(forwards))
        row = [("F", *item) for item in forwards[:warm_up]]
        for forward, backward in zip(forwards[warm_up:], backwards, strict=False):
            row += [("F", *forward), ("B", *backward)]
        rows.append(row + [("B", *item) for item in backwards[len(forwards) - warm_up :]])
    return rows


# ------------------------------------------------------------------- the orders


def test_gpipe_runs_all_forwards_first_and_1f1b_keeps_s_less_stage_micro_batches_in_flight_and_alternates() -> None:
    both = even([1, 9], stages=2, micro_batches=2)
    assert written(build_template(both, "gpipe")) == ["F0.0 F0.1 F1.0 F1.1 B0.0 B0.1 B1.0 B1.1"] * 2
    only = even([1], stages=2, micro_batches=5)
    waves = build_template(only, "gpipe", memory_limit_bytes=(9, 2))
    assert written(waves) == ["F0.0 F0.1 B0.0 B0.1 F0.2 F0.3 B0.2 B0.3 F0.4 B0.4"] * 2
    assert written(build_template(both, "1f1b"))[0] == "F0.0 F0.1 B0.0 F1.0 B0.1 F1.1 B1.0 B1.1"
    assert written(build_template(even([1], stages=3, micro_batches=4), "1f1b")) == [
        "F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3",
        "F0.0 F0.1 B0.0 F0.2 B0.1 F0.3 B0.2 B0.3",
        "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2 F0.3 B0.3",
    ]


@given(st.integers(2, 5), st.integers(2, 4), st.integers(1, 4))
def test_interleaved_1f1b_is_the_order_of_megatron_where_that_is_defined(stages: int, chunks: int, rounds: int) -> None:
    buckets = even([1], stages=stages, micro_batches=rounds * stages)
    template = build_template(buckets, "interleaved_1f1b", num_chunks=chunks)
    got = [[(action.kind, action.micro_batch, action.chunk) for action in row] for row in template.actions]
    assert got == megatron_rows(stages, chunks, rounds * stages)


@pytest.mark.parametrize("micro_batches", [4, 5, 6, 7, 8, 9, 11])
def test_interleaving_two_chunks_halves_the_bubble_of_1f1b_for_any_number_of_micro_batches(micro_batches: int) -> None:
    buckets = even([1], stages=4, micro_batches=micro_batches)
    template = build_template(buckets, "interleaved_1f1b", num_chunks=2)
    assert simulate(template, buckets).makespan_s == 2 * micro_batches + (4 - 1) * 2 / 2


def test_mux_sorts_buckets_by_first_stage_latency_and_keeps_their_micro_batches_together() -> None:
    template = build_template(even([1, 3, 2, 3], stages=2, micro_batches=2), "mux")
    forwards = [(action.bucket, action.micro_batch) for action in template.actions[0] if action.kind == "F"]
    assert forwards == [(1, 0), (1, 1), (3, 0), (3, 1), (2, 0), (2, 1), (0, 0), (0, 1)]


def test_mux_launches_all_forwards_that_fit_before_the_first_backward_comes_back() -> None:
    buckets = even([2, 1, 1, 1], stages=4, micro_batches=2)
    eager = written(build_template(buckets, "mux"))[0].split()
    assert eager.index("B0.0") == 8
    limited = written(build_template(buckets, "mux", memory_limit_bytes=(5, 9, 9, 9)))[0].split()
    assert limited.index("B0.0") == 5
    last = written(build_template(even([1], stages=2, micro_batches=3), "mux"))[1]
    assert last == "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2", "of two that are ready the backward is first"


def test_slow_links_that_carry_one_message_at_a_time_delay_backwards_so_that_mux_launches_more() -> None:
    # The fourth forward reaches the middle stage only after the first backward, as each message waits for the last.
    waiting = [dataclasses.replace(load, output_bytes=1) for load in even([1], stages=3, micro_batches=4)]
    template = build_template(waiting, "mux", links=Link(latency_s=0.0, bytes_per_s=1 / 3))
    assert written(template)[1] == "F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3"
    buckets = even([1], stages=2, micro_batches=8)
    free = written(build_template(buckets, "mux"))[0].split()
    slow = written(build_template(buckets, "mux", links=Link(latency_s=1.0, bytes_per_s=1e9)))[0].split()
    assert (free.index("B0.0"), slow.index("B0.0")) == (3, 5)


# ------------------------------------------------------------ every template


@settings(max_examples=40)
@given(uneven_buckets(), every_variant, st.data(), st.integers(0, 50))
def test_memory_limits_of_stages_delay_launches_and_are_never_exceeded(
    buckets: Buckets, variant: Variant, data: st.DataObject, static: int
) -> None:
    limit = tuple(static + need + data.draw(st.integers(0, 120)) for need in tightest_limit(buckets))
    template = template_of(buckets, variant, memory_limit_bytes=limit, static_bytes=(static,) * len(limit))
    peaks = simulate(template, buckets).peak_bytes
    assert all(static + peak <= most for peak, most in zip(peaks, limit, strict=True))


def test_a_bucket_that_fits_nowhere_is_named_with_stage_and_bytes() -> None:
    large = BucketLoad(name="qa", forward_s=(1.0, 1.0), activation_bytes=(10, 3000), num_micro_batches=2)
    with pytest.raises(
        ValueError, match=r"bucket 'qa' on stage 1: one micro-batch must take at most 2,900 bytes \(memory limit 3,000"
    ):
        build_template([large], "mux", memory_limit_bytes=(3000, 3000), static_bytes=(100, 100))


# -------------------------------------------------------------------- a value


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
def test_a_template_comes_back_from_json_as_it_was(variant: Variant) -> None:
    template = template_of(even([2, 1], stages=3, micro_batches=3), variant, num_steps=3)
    assert PipelineTemplate.from_dict(json.loads(json.dumps(template.to_dict()))) == template
    assert str(template.actions[0][-1]).endswith("+2")


@pytest.mark.parametrize(
    "fields",
    [{"forward_s": ()}, {"backward_s": (1.0,)}, {"activation_bytes": (1, 2, 3)}, {"num_micro_batches": 0}],
)
def test_a_load_that_cannot_be_is_refused(fields: dict) -> None:
    good = {"name": "qa", "forward_s": (1.0, 1.0), "activation_bytes": (1, 1), "num_micro_batches": 1}
    with pytest.raises(ValueError, match="bucket 'qa': forward_s, backward_s and activation_bytes must have a number"):
        BucketLoad(**{**good, **fields})


def test_unknown_schedules_and_buckets_of_unlike_stages_are_refused() -> None:
    two, three = (even([1], stages=stages, micro_batches=1, size=11) for stages in (2, 3))
    assert three[0].backward_s == (1.0, 1.0, 1.0), "as long as forwards unless said otherwise"
    assert [three[0].chunk_bytes(0, chunk, 3) for chunk in range(3)] == [4, 4, 3]
    with pytest.raises(ValueError, match="schedule must be gpipe, 1f1b, interleaved_1f1b, mux, got 'zigzag'"):
        build_template(two, "zigzag")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"buckets must be one or more .*, got none"):
        build_template([], "mux")
    with pytest.raises(ValueError, match="same number of stages, got 'bucket 0' with 2, 'bucket 0' with 3"):
        build_template(two + three, "mux")
