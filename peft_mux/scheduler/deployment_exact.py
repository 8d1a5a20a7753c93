"""The judge of planning: the best deployment by trying everything (L Eq. 2 as it stands, a MINLP), for tiny cases."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from peft_mux.scheduler.bucketing import DEFAULT_INTERVAL_TOKENS, DEFAULT_NUM_BUCKETS
from peft_mux.scheduler.deployment import expected_bucketing, replica_groups
from peft_mux.scheduler.deployment_solve import restrict
from peft_mux.scheduler.deployment_space import configurations_that_fit
from peft_mux.scheduler.dispatch_problem import DispatchProblem, build_problem
from peft_mux.scheduler.replica_time import ReplicaTimeModel
from peft_mux.scheduler.replicas import ReplicaGroup

_MOST_GPUS = 16
"""The number of deployments grows without measure beyond; this file is for checks."""


@dataclass(frozen=True, slots=True)
class ExactDeployment:
    """The optimum of Eq. 2.

    Attributes:
        groups: the replicas of a best deployment.
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

    No heuristic, no bound and no solver takes part but that a dispatch as slow as one already found is not followed
    further. Exponential in everything.

    Raises:
        ValueError: for more than 16 GPUs, and as `plan_deployment`.
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
    for counts in itertools.product(*(range(num_gpus // config.num_gpus + 1) for config in configs)):
        if not 0 < np.dot(counts, full.num_gpus) <= num_gpus:
            continue
        problem = restrict(full, np.array(counts))
        if problem.max_tokens.max() < bucketing.boundaries[-1]:
            continue
        step_s = _best_dispatch_s(problem, best_s)
        if step_s < best_s:
            best_s, best_counts = step_s, counts
    return ExactDeployment(replica_groups(configs, best_counts, time_model), best_s)


def _best_dispatch_s(problem: DispatchProblem, limit_s: float) -> float:
    """Return the least makespan over all dispatches of one deployment, or `limit_s` where none is below."""
    choices = [list(_covers(problem, bucket)) for bucket in range(len(problem.lengths))]
    sequence_s = np.where(problem.fits, problem.sequence_s, 0.0)
    best_s = limit_s

    def follow(bucket: int, busy_s: np.ndarray) -> None:
        nonlocal best_s
        if (busy_s + problem.constant_s * (busy_s > 0)).max() >= best_s:
            return
        if bucket < 0:
            best_s = float((busy_s + problem.constant_s * (busy_s > 0)).max())
            return
        for ceilings in choices[bucket]:
            follow(bucket - 1, busy_s + sequence_s[:, bucket] * ceilings)

    follow(len(choices) - 1, np.zeros(len(problem.num_replicas)))
    return best_s


def _covers(problem: DispatchProblem, bucket: int) -> Iterator[np.ndarray]:
    """Yield the ceilings of a bucket: all ways to give sum_i p_i x_i >= B_j with no x_i larger than needed."""
    needed = int(problem.num_sequences[bucket])
    most = [
        -(-needed // replicas) if fits else 0
        for replicas, fits in zip(problem.num_replicas.tolist(), problem.fits[:, bucket].tolist(), strict=True)
    ]
    for ceilings in itertools.product(*(range(limit + 1) for limit in most)):
        vector = np.array(ceilings)
        surplus = int(problem.num_replicas @ vector) - needed
        if surplus >= 0 and not ((vector > 0) & (problem.num_replicas <= surplus)).any():
            yield vector
