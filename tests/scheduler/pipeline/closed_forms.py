"""Latencies of pipelines in closed form (M Eq. 4, Appendix A), which tests compare with simulated templates."""

from __future__ import annotations

from collections.abc import Sequence

from peft_mux.scheduler.plan import BucketLoad


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
    """
    return 2 * sum(stage_latencies_s[:-1]) + 2 * num_micro_batches * max(stage_latencies_s)


def closed_form_gpipe_s(forward_s: Sequence[float], backward_s: Sequence[float], num_micro_batches: int) -> float:
    """Return the end-to-end latency of one bucket under GPipe with room for all its micro-batches and free messages.

    Two flow shops of equal jobs, one after the other: sum F + (C - 1) max F + sum B + (C - 1) max B.

    Args:
        forward_s: seconds of a forward of one micro-batch on each stage.
        backward_s: seconds of a backward of one micro-batch on each stage.
        num_micro_batches: C, micro-batches of the bucket.
    """
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
        buckets: the loads of all buckets, in any order; at least one.
    """
    num_stages = buckets[0].num_stages
    # The template runs the longest bucket first, so that t_1 is the greatest and t_P the least.
    latencies = [bucket.forward_s[0] for bucket in buckets]
    steady = 2 * sum(bucket.num_micro_batches * bucket.forward_s[0] for bucket in buckets)
    return (num_stages - 1) * (max(latencies) + min(latencies)) + steady
