"""How fast deployments can be at best, for many of them at once (L Theorem 1), and bounds that need no premises.

All bounds are of the linear form of L Eq. 2, in which configuration i spends g_ij = n_i c_ij GPU seconds on a sequence
of bucket j. `problem` has every candidate configuration as a group of one replica. `counts` are the replicas of each
candidate in each deployment, int64 of shape `(plans, candidates)`; bounds are seconds of shape `(plans,)`.
"""

from __future__ import annotations

import numpy as np

from peft_mux.scheduler.dispatching.problem import DispatchProblem

_DUAL_STEPS = 60
"""Subgradient steps of the dual bound; every number of them gives a valid one."""
_DUAL_BLOCK = 4096
"""Deployments whose dual is ascended together, so that the work fits into a cache."""
_LEAST_WEIGHT = 1e-30
"""Keeps 0 times inf away from configurations that are not deployed."""


def length_based_bound_s(problem: DispatchProblem, counts: np.ndarray) -> np.ndarray:
    """Return sum_i N_i t_i / N under length-based dispatch (L Theorem 1, Eq. 5).

    Sequences are divisible here, as tokens are in the proof. Configurations with the same `max_tokens` are one replica
    in the theorem, balanced within; of these the cheapest is charged, which keeps it a lower bound. N is the GPUs that
    have a replica. The premise is that length-based dispatch gives each bucket to its cheapest configuration (Property
    1, Assumption 1); it can fail, and so the paper takes the bound as relative only. inf if a bucket fits nowhere.
    """
    patterns, which = _patterns(counts)
    all_gpu_s = problem.sequence_s * problem.num_gpus[:, None]
    # Tiers ascend in `max_tokens`: the first one with an offer is the smallest that supports a bucket.
    tiers = np.unique(problem.max_tokens, return_inverse=True)[1]
    gpu_s = np.full((len(patterns), all_gpu_s.shape[1]), np.inf)
    for tier in range(int(tiers.max()) + 1):
        members = np.flatnonzero(tiers == tier)
        offer_s = _least_over(patterns[:, members], all_gpu_s[members])
        gpu_s = np.where(np.isinf(gpu_s), offer_s, gpu_s)
    # An empty bucket takes 0 s even if it fits nowhere.
    total_gpu_s = (np.where(problem.num_sequences > 0, gpu_s, 0.0) * problem.num_sequences).sum(axis=1)
    return total_gpu_s[which] / (counts @ problem.num_gpus)


def cheapest_bound_s(problem: DispatchProblem, counts: np.ndarray) -> np.ndarray:
    """Return a bound without premises.

    The buckets from any one on run on the replicas that support it and take the least GPU seconds on each; and any
    single sequence takes its time on the fastest replica. Equal to `length_based_bound_s`, or above it, if the premise
    of that one holds.
    """
    patterns, which = _patterns(counts)
    has_any = problem.num_sequences > 0
    least_gpu_s = _least_over(patterns, problem.sequence_s * problem.num_gpus[:, None])
    gpu_s = np.where(has_any, least_gpu_s, 0.0) * problem.num_sequences
    single_s = np.where(has_any, _least_over(patterns, problem.sequence_s), 0.0)
    bound_s = single_s.max(axis=1)[which]
    from_bucket_s = np.cumsum(gpu_s[:, ::-1], axis=1)[:, ::-1]
    # What supports a longer bucket supports this one too, so that the buckets from here on have no other GPUs than
    # those of this one.
    for bucket in range(len(problem.lengths)):
        num_gpus = counts @ np.where(problem.fits[:, bucket], problem.num_gpus, 0)
        # No replica for a bucket gives inf, or NaN if it is empty too, which fmax passes over.
        with np.errstate(divide="ignore", invalid="ignore"):
            share_s = from_bucket_s[which, bucket] / num_gpus
        bound_s = np.fmax(bound_s, share_s)
    return bound_s


def dual_bound_s(problem: DispatchProblem, counts: np.ndarray, *, rounding: bool = True) -> np.ndarray:
    """Return a bound near the linear relaxation of Eq. 2, without premises.

    By duality, weights w_i >= 0 of the groups with sum 1 bound the makespan by sum_j B_j min_i w_i c_ij / p_i. Weights
    in proportion to a group's GPUs give the bound of Theorem 1. From there subgradient steps raise the weight of groups
    that would have too much to do; every step's value is a bound, and the largest is returned.

    Args:
        problem: the linear form with every candidate as a group of one replica.
        counts: replicas of each candidate in each deployment.
        rounding: whether a bucket that fits only one group is rounded up per replica as in Eq. 2, and such a group pays
            its constant, as neither can be avoided; otherwise sequences are divisible and constants are left out.
    """
    starts = range(0, len(counts), _DUAL_BLOCK)
    blocks = [_dual_block(problem, counts[start : start + _DUAL_BLOCK], rounding) for start in starts]
    return np.concatenate(blocks) if blocks else np.zeros(0)


def _dual_block(problem: DispatchProblem, counts: np.ndarray, rounding: bool) -> np.ndarray:
    """Return `dual_bound_s` of a few deployments; arrays are `(plans, candidates[, buckets])`."""
    present = counts > 0
    able = present[:, :, None] & problem.fits[None] & (problem.num_sequences > 0)
    # Only keeps the division defined: groups without replicas are masked by `able`.
    replicas = np.maximum(counts, 1)[:, :, None]
    finite_s = np.where(problem.fits, problem.sequence_s, 0.0)[None]
    # What each group has to do in any case: the buckets that fit no other group.
    only_fit = able & (able.sum(axis=1, keepdims=True) == 1) & rounding
    fixed_s = np.where(only_fit, -(-problem.num_sequences // replicas) * finite_s, 0.0).sum(axis=2)
    fixed_s += np.where(only_fit.any(axis=2), problem.constant_s[None, :], 0.0)
    # Seconds of all of a bucket on each group, for buckets that fit two or more; inf if a bucket does not fit.
    shared_s = np.where(able, problem.num_sequences / replicas * finite_s, np.inf)
    settled = only_fit.any(axis=1) | (problem.num_sequences == 0)[None, :]
    shared_s = np.where(settled[:, None, :], 0.0, shared_s)
    weights = counts * problem.num_gpus / (counts @ problem.num_gpus)[:, None]
    best_s = fixed_s.max(axis=1)
    rows = np.arange(len(counts))[:, None]
    columns = np.arange(shared_s.shape[2])[None, :]
    for step in range(_DUAL_STEPS):
        price_s = np.maximum(weights, _LEAST_WEIGHT)[:, :, None] * shared_s
        taker = price_s.argmin(axis=1)
        loads_s = fixed_s.copy()
        np.add.at(loads_s, (rows, taker), shared_s[rows, taker, columns])
        best_s = np.fmax(best_s, (weights * loads_s).sum(axis=1))
        # Multiplicative weights with a step that shrinks as 1 / sqrt(step): they stay positive and need no projection
        # onto the simplex but a division by their sum.
        excess = loads_s / np.maximum(loads_s.max(axis=1), np.finfo(float).tiny)[:, None]
        weights = np.where(present, weights * np.exp(excess / np.sqrt(step + 4)), 0.0)
        weights /= weights.sum(axis=1, keepdims=True)
    return best_s


def _patterns(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the distinct sets of configurations that are deployed at all, and which one each plan has."""
    patterns, which = np.unique(counts > 0, axis=0, return_inverse=True)
    # NumPy 2.0 alone gives the inverse a second dimension.
    return patterns, which.reshape(-1)


def _least_over(patterns: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the least of the `values` rows that each pattern has: shape `(patterns, buckets)`."""
    least = np.full((len(patterns), values.shape[1]), np.inf)
    for index in range(len(values)):
        least = np.where(patterns[:, index, None], np.minimum(least, values[index]), least)
    return least
