"""Prints how long it takes to order and to time a pipeline, for growing numbers of buckets.

python -m benchmarks.planner.template            about 2 s, one thread
"""

from __future__ import annotations

import random
import statistics
import time
from typing import Any

from peft_mux.scheduler.pipeline.launch import BucketLoad
from peft_mux.scheduler.pipeline.simulator import lower_bound_s, simulate
from peft_mux.scheduler.pipeline.template import build_template

NUM_STAGES = 8
NUM_MICRO_BATCHES = 4
REPEATS = 5
SCHEDULES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("gpipe", {}),
    ("1f1b", {}),
    ("interleaved_1f1b", {"num_chunks": 2}),
    ("mux", {}),
    ("mux, room for S of the largest", {"memory_limit_bytes": (NUM_STAGES * 200,) * NUM_STAGES}),
)


def random_buckets(num_buckets: int, seed: int = 0) -> list[BucketLoad]:
    """Draw buckets of 1 to 3 ms a stage, stages equal within a bucket, 100 to 200 bytes a micro-batch."""
    rng = random.Random(seed)
    return [
        BucketLoad(
            name=f"bucket {index}",
            forward_s=(rng.uniform(1e-3, 3e-3),) * NUM_STAGES,
            activation_bytes=(rng.randint(100, 200),) * NUM_STAGES,
            num_micro_batches=NUM_MICRO_BATCHES,
        )
        for index in range(num_buckets)
    ]


def time_of(label: str, options: dict[str, Any], buckets: list[BucketLoad]) -> tuple[float, float, float]:
    """Return median seconds of building and simulating, and makespan over the lower bound."""
    schedule = label.split(",")[0]
    seconds: list[tuple[float, float]] = []
    template = build_template(buckets, schedule, **options)  # type: ignore[arg-type]
    for _ in range(REPEATS):
        start = time.perf_counter()
        template = build_template(buckets, schedule, **options)  # type: ignore[arg-type]
        built = time.perf_counter()
        simulate(template, buckets)
        seconds.append((built - start, time.perf_counter() - built))
    build_s, simulate_s = (statistics.median(column) for column in zip(*seconds, strict=True))
    bound_s = lower_bound_s(buckets, num_chunks=template.num_chunks)
    return build_s, simulate_s, simulate(template, buckets).makespan_s / bound_s


def main() -> None:
    """Print one line for each schedule and number of buckets."""
    print(f"{NUM_STAGES} stages, {NUM_MICRO_BATCHES} micro-batches a bucket, median of {REPEATS}, milliseconds")
    print(f"{'schedule':<32} {'buckets':>7} {'build':>8} {'simulate':>9}  makespan / lower bound")
    for label, options in SCHEDULES:
        for num_buckets in (1, 4, 16, 64):
            build_s, simulate_s, ratio = time_of(label, options, random_buckets(num_buckets))
            print(f"{label:<32} {num_buckets:>7} {build_s * 1e3:>8.1f} {simulate_s * 1e3:>9.1f}  {ratio:.3f}")


if __name__ == "__main__":
    main()
