"""The judge of planning: the best deployment by trying everything (L Eq. 2 as it stands, a MINLP), for tiny cases."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from peft_mux.scheduler.deployment.search import expected_bucketing
from peft_mux.scheduler.deployment.solve import restrict
from peft_mux.scheduler.deployment.space import configurations_that_fit
from peft_mux.scheduler.dispatching.problem import DispatchProblem, build_problem
from peft_mux.scheduler.replicas.time_model import ReplicaGroup, ReplicaTimeModel


def exact_step_s(
    lengths: Sequence[int], global_batch: int, num_gpus: int, time_model: ReplicaTimeModel, *, interval: int
) -> float:
    """Return the seconds of a step of the best of all deployments, in the form of Eq. 2, each with its best dispatch.

    GPUs may idle. No heuristic, bound or solver takes part; a dispatch as slow as the best so far is not followed.
    Exponential.
    """
    bucketing = expected_bucketing(lengths, global_batch, time_model, num_gpus, interval=interval)
    configs = configurations_that_fit(time_model, num_gpus, bucketing.boundaries[-1])
    candidates = [ReplicaGroup(config, 1, time_model.max_tokens[config]) for config in configs]
    full = build_problem(candidates, bucketing, time_model)
    best_s = np.inf
    for counts in itertools.product(*(range(num_gpus // size + 1) for size in full.num_gpus.tolist())):
        if not 0 < np.dot(counts, full.num_gpus) <= num_gpus:
            continue
        problem = restrict(full, np.array(counts))
        if problem.max_tokens.max() >= bucketing.boundaries[-1]:
            best_s = min(best_s, _best_dispatch_s(problem, best_s))
    return best_s


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
