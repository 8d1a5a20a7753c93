"""Latencies of pipelines on paper: closed forms and lower bounds (M Eq. 4, Appendix A)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from peft_mux.scheduler.pipeline.load import BucketLoad, checked_num_stages


def closed_form_1f1b_s(stage_latencies_s: Sequence[float], num_micro_batches: int) -> float:
    """Return the end-to-end latency of one hTask under 1F1B as M Eq. 4 has it.

    L = 2 * sum over s < S of L^(s) + 2 * C * max over s of L^(s), forwards and backwards being equally long and
    messages free. The sum leaves out the last stage, whose work is in the second term. It is exact where the last
    stage is (one of) the slowest, so with equal stages: 2 (S - 1 + C) L^(1). Where an earlier stage is the slowest,
    the first term counts that stage's work again, and stages before and after it as if they ran in turn: the result
    is then too long, never too short.

    Args:
        stage_latencies_s: L^(s), seconds of one forward of one micro-batch on each stage.
        num_micro_batches: C, micro-batches of the hTask.

    Raises:
        ValueError: if there is no stage, a latency is negative or not finite, or C is less than 1.
    """
    _check(stage_latencies_s, num_micro_batches)
    # M Eq. 4.
    return 2 * sum(stage_latencies_s[:-1]) + 2 * num_micro_batches * max(stage_latencies_s)


def closed_form_gpipe_s(forward_s: Sequence[float], backward_s: Sequence[float], num_micro_batches: int) -> float:
    """Return the end-to-end latency of one bucket under GPipe with room for all its micro-batches and free messages.

    Two flow shops of equal jobs, one after the other: sum F + (C - 1) max F + sum B + (C - 1) max B.

    Args:
        forward_s: seconds of a forward of one micro-batch on each stage.
        backward_s: seconds of a backward of one micro-batch on each stage.
        num_micro_batches: C, micro-batches of the bucket.

    Raises:
        ValueError: as `closed_form_1f1b_s`.
    """
    _check(forward_s, num_micro_batches)
    _check(backward_s, num_micro_batches)
    # In a flow shop of equal jobs every job after the first one adds the time of the slowest stage.
    more = num_micro_batches - 1
    return sum(forward_s) + more * max(forward_s) + sum(backward_s) + more * max(backward_s)


def lemma_1_s(buckets: Sequence[BucketLoad]) -> float:
    """Return T_warm + T_steady + T_drain of M's Lemmas 1 and 2, buckets being sorted by first-stage latency.

    (S - 1) t_1 + 2 * sum over buckets of C_i t_i + (S - 1) t_P, with t_i the latency of bucket i on the first stage.
    M states it as the latency. It is one where all buckets are equal. Where they differ it is a lower bound of the
    template's latency: stages before the last may still be at backwards of longer buckets when the last backward
    comes down, so the drain can take longer than (S - 1) t_P.

    Args:
        buckets: the loads of all buckets, in any order.

    Raises:
        ValueError: if there is no bucket, or buckets differ in the number of stages.
    """
    num_stages = checked_num_stages(buckets)
    # The template runs the longest bucket first, so that t_1 is the greatest and t_P the least.
    latencies = [bucket.forward_s[0] for bucket in buckets]
    steady = 2 * sum(bucket.num_micro_batches * bucket.forward_s[0] for bucket in buckets)
    return (num_stages - 1) * (max(latencies) + min(latencies)) + steady


def lower_bound_s(buckets: Sequence[BucketLoad], *, num_chunks: int = 1) -> float:
    """Return a time that no order of any schedule on these stages can beat.

    A stage cannot begin before some micro-batch has passed the stages before it, has all its work to do (M Lemma 2,
    for each stage), and after its last action a backward has still to pass the stages before it. The same holds for
    each bucket by itself, and a micro-batch has to pass all stages twice.

    Args:
        buckets: the loads of all buckets; stages may differ, and so may forwards and backwards.
        num_chunks: virtual stages of a device; what passes before a device begins is one chunk of each.

    Raises:
        ValueError: if there is no bucket, buckets differ in the number of stages, or `num_chunks` is less than 1.
    """
    num_stages = checked_num_stages(buckets)
    if num_chunks < 1:
        raise ValueError(f"num_chunks is {num_chunks}; allowed: 1 or more.")
    bounds = [bucket.greatest_weight * (sum(bucket.forward_s) + sum(bucket.backward_s)) for bucket in buckets]
    for stage in range(num_stages):
        # Any micro-batch may come first and any may end last, hence the shortest of each bucket.
        heads = [bucket.least_weight * sum(bucket.forward_s[:stage]) / num_chunks for bucket in buckets]
        tails = [bucket.least_weight * sum(bucket.backward_s[:stage]) / num_chunks for bucket in buckets]
        works = [b.num_micro_batches * (b.forward_s[stage] + b.backward_s[stage]) for b in buckets]
        # Any bucket may come first and any may end last, hence the least head and the least tail.
        bounds.append(min(heads) + sum(works) + min(tails))
        # A bucket by itself pays its own head and tail, which may be longer than the least ones.
        bounds += [head + work + tail for head, work, tail in zip(heads, works, tails, strict=True)]
    return max(bounds)


def steady_lower_bound_s(buckets: Sequence[BucketLoad], *, num_chunks: int = 1) -> float:
    """Return seconds of a step that no order can beat in the mean of several steps, even without draining between them.

    Each stage has the work of every step to do, and a bucket's step begins when its step before is over.

    Args:
        buckets: the loads of all buckets; stages may differ, and so may forwards and backwards.
        num_chunks: virtual stages of a device, as in `lower_bound_s`.

    Raises:
        ValueError: as `lower_bound_s`.
    """
    num_stages = checked_num_stages(buckets)
    works = [
        sum(one.num_micro_batches * (one.forward_s[stage] + one.backward_s[stage]) for one in buckets)
        for stage in range(num_stages)
    ]
    return max(*works, *(lower_bound_s([bucket], num_chunks=num_chunks) for bucket in buckets))


def _check(latencies_s: Sequence[float], num_micro_batches: int) -> None:
    if not latencies_s:
        raise ValueError("stage latencies are empty; allowed: seconds of each stage, one or more.")
    bad = [value for value in latencies_s if not math.isfinite(value) or value < 0]
    if bad:
        raise ValueError(f"stage latencies contain {bad[0]}; allowed: finite numbers of 0 or more.")
    if num_micro_batches < 1:
        raise ValueError(f"num_micro_batches is {num_micro_batches}; allowed: 1 or more.")
