"""What the benchmarks of LobRA compare with: buckets at equal distances, and the GPU seconds of a drawn step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from peft_mux.scheduler.dispatching.bucketing import (
    DEFAULT_INTERVAL_TOKENS,
    DEFAULT_NUM_BUCKETS,
    bucket_boundaries,
    fixed_bucketing,
)
from peft_mux.scheduler.dispatching.dispatch import dispatch
from peft_mux.scheduler.replicas.time_model import ReplicaGroup, ReplicaTimeModel


def uniform_boundaries(
    max_length: int, num_buckets: int = DEFAULT_NUM_BUCKETS, interval: int = DEFAULT_INTERVAL_TOKENS
) -> tuple[int, ...]:
    """Return boundaries at equal distances up to `max_length`, each a multiple of `interval` except the last.

    Fewer than `num_buckets` if there are fewer intervals.
    """
    num_intervals = -(-max_length // interval)
    ends = [-(-num_intervals * bucket // num_buckets) * interval for bucket in range(1, num_buckets + 1)]
    return tuple(sorted({min(end, max_length) for end in ends}))


def step_gpu_seconds(
    groups: Sequence[ReplicaGroup],
    lengths: Sequence[int],
    num_gpus: int,
    time_model: ReplicaTimeModel,
    *,
    boundaries: Sequence[int] | None = None,
    num_buckets: int = DEFAULT_NUM_BUCKETS,
    **options: Any,
) -> float:
    """Return the predicted GPU seconds of one drawn step on a deployment, idle GPUs included.

    Args:
        groups: the replicas that are deployed, by configuration.
        lengths: lengths of the sequences of this step, in tokens.
        num_gpus: GPUs that are paid for, idle ones included.
        time_model: predicts the seconds of one replica.
        boundaries: fixed padded lengths in tokens; by default they are chosen for the step (L Eq. 4).
        num_buckets: most buckets if boundaries are chosen (R in L).
        options: further options of `dispatch`.
    """
    if boundaries is None:
        bucketing = bucket_boundaries(lengths, num_buckets, limits=[group.max_tokens for group in groups])
    else:
        bucketing = fixed_bucketing(lengths, boundaries)
    return dispatch(groups, bucketing, time_model, **options).makespan_s * num_gpus
