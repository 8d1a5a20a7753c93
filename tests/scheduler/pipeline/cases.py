"""Buckets for the tests of pipelines: plain ones and random ones."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from peft_mux.scheduler.names import Schedule
from peft_mux.scheduler.pipeline.simulator import Simulation, simulate
from peft_mux.scheduler.pipeline.template import build_template
from peft_mux.scheduler.plan import BucketLoad, PipelineTemplate

Buckets = list[BucketLoad]
Variant = tuple[Schedule, int]
"""A schedule and its number of chunks."""
VARIANTS: list[Variant] = [
    ("gpipe", 1),
    ("1f1b", 1),
    ("interleaved_1f1b", 2),
    ("interleaved_1f1b", 3),
    ("mux", 1),
    ("mux", 2),
]
every_variant = st.sampled_from(VARIANTS)


def template_of(buckets: Buckets, variant: Variant, **options: Any) -> PipelineTemplate:
    """Return the template of a variant."""
    return build_template(buckets, variant[0], num_chunks=variant[1], **options)


def bubble_s(result: Simulation, stage: int) -> float:
    """Return the seconds of internal bubbles of a stage: idle between its first and its last action."""
    own = [span for span in result.spans if span.device == range(result.num_stages)[stage]]
    return sum((later.start_s - earlier.end_s for earlier, later in itertools.pairwise(own)), 0.0)


def runs_within(template: PipelineTemplate, buckets: Sequence[BucketLoad], limits: Sequence[int]) -> bool:
    """Whether a template comes to its end, and its activations stay within a limit on each stage."""
    peaks = simulate(template, buckets).peak_bytes
    return all(peak <= limit for peak, limit in zip(peaks, limits, strict=True))


def a_bucket(name: str, latencies_s: Sequence[float], micro_batches: int, size: int = 1, **fields: Any) -> BucketLoad:
    """Return a bucket with these latencies of its stages, and activations of one size on all of them."""
    sizes = {"activation_bytes": (size,) * len(latencies_s), "num_micro_batches": micro_batches}
    return BucketLoad(name=name, forward_s=tuple(map(float, latencies_s)), **sizes, **fields)  # type: ignore[arg-type]


def even(latencies_s: Sequence[float], *, stages: int, micro_batches: int, size: int = 1) -> Buckets:
    """Return buckets that are equally long on all stages."""
    return [a_bucket(f"bucket {i}", (each,) * stages, micro_batches, size) for i, each in enumerate(latencies_s)]


def one_bucket(latencies_s: Sequence[float], micro_batches: int, output_bytes: int = 0) -> Buckets:
    """Return one bucket with these latencies of its stages."""
    return [a_bucket("only", latencies_s, micro_batches, output_bytes=output_bytes)]


@st.composite
def uneven_buckets(draw: st.DrawFn) -> list[BucketLoad]:
    """Draw 1 to 4 buckets on 1 to 5 stages, with nothing equal that need not be."""
    num_stages = draw(st.integers(1, 5))

    def per_stage(low: int, high: int) -> tuple[int, ...]:
        return tuple(draw(st.lists(st.integers(low, high), min_size=num_stages, max_size=num_stages)))

    return [
        BucketLoad(
            name=f"bucket {index}",
            forward_s=tuple(float(value) for value in per_stage(0, 9)),
            backward_s=tuple(float(value) for value in per_stage(1, 9)),
            activation_bytes=per_stage(1, 40),
            num_micro_batches=draw(st.integers(1, 7)),
            output_bytes=draw(st.integers(0, 5)),
        )
        for index in range(draw(st.integers(1, 4)))
    ]


def tightest_limit(buckets: list[BucketLoad]) -> tuple[int, ...]:
    """Return what one micro-batch of any bucket needs on each stage."""
    return tuple(max(bucket.activation_bytes[stage] for bucket in buckets) for stage in range(buckets[0].num_stages))
