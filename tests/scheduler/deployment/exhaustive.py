"""The judge of planning: the best deployment by trying everything (L Eq. 2 as it stands, a MINLP), for tiny cases."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from peft_mux.scheduler.deployment.search import expected_bucketing, replica_groups
from peft_mux.scheduler.deployment.solve import restrict
from peft_mux.scheduler.deployment.space import configurations_that_fit
from peft_mux.scheduler.dispatching.bucketing import DEFAULT_INTERVAL_TOKENS, DEFAULT_NUM_BUCKETS
from peft_mux.scheduler.dispatching.problem import DispatchProblem, build_problem
from peft_mux.scheduler.replicas.configs import ReplicaGroup
from peft_mux.scheduler.replicas.time_model import ReplicaTimeModel

_MOST_GPUS = 16
"""The number of deployments grows without measure beyond; this file is for checks."""


@dataclass(frozen=True, slots=True)
class ExactDeployment:
    """The optimum of L Eq. 2.

    Attributes:
        groups: the replicas of a best deployment, by configuration.
        step_s: seconds of a step in the form of Eq. 2.
    """

    groups: tuple[ReplicaGroup, ...]
    step_s: float


def exact_deployment(
    lengths: Sequence[int],
    global_batch: int,
    num_gpus: int,
    time_model: ReplicaTimeModel,
    *,
    num_buckets: int = DEFAULT_NUM_BUCKETS,
    interval: int = DEFAULT_INTERVAL_TOKENS,
) -> ExactDeployment:
    """Return the best of all deployments of all configurations, idle GPUs allowed, each with its best dispatch.

    No heuristic, bound or solver takes part; a dispatch as slow as the best so far is not followed. Exponential.

    Args:
        lengths: lengths of a sample of all tasks' sequences, in tokens.
        global_batch: sequences of one step of all tasks together (B in L).
        num_gpus: GPUs that may be used (N in L), at most 16.
        time_model: predicts the seconds of one replica, and knows the configurations to choose from.
        num_buckets: most buckets of padded lengths (R in L).
        interval: distance of candidate boundaries of buckets, in tokens.

    Raises:
        ValueError: for more than 16 GPUs, and for what `plan_deployment` refuses.
    """
    if num_gpus > _MOST_GPUS:
        raise ValueError(f"num_gpus is {num_gpus}; allowed: at most {_MOST_GPUS} here. Use plan_deployment.")
    bucketing = expected_bucketing(
        lengths, global_batch, time_model, num_gpus, num_buckets=num_buckets, interval=interval
    )
    configs = configurations_that_fit(time_model, num_gpus, bucketing.boundaries[-1])
    candidates = [ReplicaGroup(config, 1, time_model.max_tokens[config]) for config in configs]
    full = build_problem(candidates, bucketing, time_model)
    best_s, best_counts = np.inf, (0,) * len(configs)
    for counts in _all_counts(num_gpus, full.num_gpus):
        problem = restrict(full, np.array(counts))
        if problem.max_tokens.max() < bucketing.boundaries[-1]:
            continue
        if (step_s := _best_dispatch_s(problem, best_s)) < best_s:
            best_s, best_counts = step_s, counts
    return ExactDeployment(replica_groups(configs, best_counts, time_model), best_s)


def _all_counts(num_gpus: int, sizes: np.ndarray) -> Iterator[tuple[int, ...]]:
    """Yield the replicas of each size in every combination that `num_gpus` have room for, but for none at all."""
    for counts in itertools.product(*(range(num_gpus // size + 1) for size in sizes.tolist())):
        if 0 < np.dot(counts, sizes) <= num_gpus:
            yield counts


def _best_dispatch_s(problem: DispatchProblem, limit_s: float) -> float:
    """Return the least makespan over all dispatches of one deployment, or `limit_s` where none is below."""
    choices = [list(_covering_ceilings(problem, bucket)) for bucket in range(len(problem.lengths))]
    sequence_s = np.where(problem.fits, problem.sequence_s, 0.0)
    best_s = limit_s

    def try_bucket(bucket: int, busy_s: np.ndarray) -> None:
        """Try every dispatch of this bucket and of the shorter ones, given the seconds of each group so far."""
        nonlocal best_s
        # Seconds only grow from bucket to bucket, so that nothing faster lies behind.
        if (busy_s + problem.constant_s * (busy_s > 0)).max() >= best_s:
            return
        if bucket < 0:
            best_s = float((busy_s + problem.constant_s * (busy_s > 0)).max())
            return
        for ceilings in choices[bucket]:
            try_bucket(bucket - 1, busy_s + sequence_s[:, bucket] * ceilings)

    # The longest first: it fits the fewest groups and weighs most, so that the cut comes early.
    try_bucket(len(choices) - 1, np.zeros(len(problem.num_replicas)))
    return best_s


def _covering_ceilings(problem: DispatchProblem, bucket: int) -> Iterator[np.ndarray]:
    """Yield the ceilings of a bucket: all ways to give sum_i p_i x_i >= B_j with no x_i larger than needed."""
    needed = int(problem.num_sequences[bucket])
    most = [
        -(-needed // replicas) if fits else 0
        for replicas, fits in zip(problem.num_replicas.tolist(), problem.fits[:, bucket].tolist(), strict=True)
    ]
    for ceilings in itertools.product(*(range(limit + 1) for limit in most)):
        vector = np.array(ceilings)
        surplus = int(problem.num_replicas @ vector) - needed
        # A ceiling that could be one lower and still hold all sequences never makes a step faster.
        if surplus >= 0 and not ((vector > 0) & (problem.num_replicas <= surplus)).any():
            yield vector
