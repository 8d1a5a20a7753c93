"""How fast a deployment can be at best, for many deployments at once (L Theorem 1), and bounds that need no premises.

All bounds are of the linear form of L Eq. 2, in which configuration i spends g_ij = n_i c_ij GPU seconds on a sequence
of bucket j. Rows of `counts` are deployments, columns are candidate configurations. Nothing is solved here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from peft_mux.scheduler.dispatching.problem import DispatchProblem

_DUAL_STEPS = 60
"""Subgradient steps of the dual bound; every number of them gives a valid one."""
_DUAL_BLOCK = 4096
"""Deployments whose dual is ascended together, so that the work fits into a cache."""
_LEAST_WEIGHT = 1e-30
"""Keeps 0 times inf away from configurations that are not deployed."""


@dataclass(frozen=True, slots=True, eq=False)
class PlanBounds:
    """Bounds over all candidate configurations of one planning problem.

    Attributes:
        problem: the linear form with every candidate as a group of one replica.
    """

    problem: DispatchProblem

    @property
    def gpu_s(self) -> np.ndarray:
        """GPU seconds of one sequence, g_ij: shape `(candidates, buckets)`, inf where a bucket does not fit."""
        return self.problem.sequence_s * self.problem.num_gpus[:, None]

    def feasible(self, counts: np.ndarray) -> np.ndarray:
        """Return whether some replica of each deployment supports the longest bucket: bool of shape `(plans,)`."""
        return np.any(counts[:, self.problem.max_tokens >= self.problem.lengths[-1]] > 0, axis=1)

    def length_based_s(self, counts: np.ndarray) -> np.ndarray:
        """Return sum_i N_i t_i / N under length-based dispatch (L Theorem 1, Eq. 5): seconds of shape `(plans,)`.

        Sequences are divisible here, as tokens are in the proof. Configurations with the same `max_tokens` are one
        replica in the theorem, balanced within; of these the cheapest is charged, which keeps it a lower bound. N is
        the GPUs that have a replica. The premise is that length-based dispatch gives each bucket to its cheapest
        configuration (Property 1, Assumption 1); it can fail, and so the paper takes the bound as relative only.
        inf where a bucket fits nowhere.
        """
        patterns, which = _patterns(counts)
        # Tiers ascend in `max_tokens`: the first one with an offer is the smallest that supports a bucket.
        tiers = np.unique(self.problem.max_tokens, return_inverse=True)[1]
        gpu_s = np.full((len(patterns), self.gpu_s.shape[1]), np.inf)
        for tier in range(int(tiers.max()) + 1):
            members = np.flatnonzero(tiers == tier)
            offer_s = _least_over(patterns[:, members], self.gpu_s[members])
            gpu_s = np.where(np.isinf(gpu_s), offer_s, gpu_s)
        total_gpu_s = _weighted(gpu_s, self.problem.num_sequences).sum(axis=1)
        return total_gpu_s[which] / (counts @ self.problem.num_gpus)

    def cheapest_s(self, counts: np.ndarray) -> np.ndarray:
        """Return a bound without premises: seconds of shape `(plans,)`.

        The buckets from any one on run on the replicas that support it and take the least GPU seconds on each; and any
        single sequence takes its time on the fastest replica. Equal to `length_based_s`, or above it, where the premise
        of that one holds.
        """
        patterns, which = _patterns(counts)
        problem = self.problem
        gpu_s = _weighted(_least_over(patterns, self.gpu_s), problem.num_sequences)
        single_s = np.where(problem.num_sequences > 0, _least_over(patterns, problem.sequence_s), 0.0)
        bound_s = single_s.max(axis=1)[which]
        from_bucket_s = np.cumsum(gpu_s[:, ::-1], axis=1)[:, ::-1]
        # What supports a longer bucket supports this one too, so that the buckets from here on have no other GPUs than
        # those of this one.
        for bucket in range(len(problem.lengths)):
            num_gpus = counts @ np.where(problem.fits[:, bucket], problem.num_gpus, 0)
            # No replica for a bucket gives inf, or NaN where it is empty too, which fmax passes over.
            with np.errstate(divide="ignore", invalid="ignore"):
                share_s = from_bucket_s[which, bucket] / num_gpus
            bound_s = np.fmax(bound_s, share_s)
        return bound_s

    def dual_s(self, counts: np.ndarray, *, rounding: bool = True, steps: int = _DUAL_STEPS) -> np.ndarray:
        """Return a bound near the linear relaxation of Eq. 2, without premises: seconds of shape `(plans,)`.

        By duality, weights w_i >= 0 of the groups with sum 1 bound the makespan by sum_j B_j min_i w_i c_ij / p_i.
        Weights in proportion to a group's GPUs give the bound of Theorem 1. From there subgradient steps raise the
        weight of groups that would have too much to do; every step's value is a bound, and the largest is returned.

        Args:
            counts: replicas of each candidate in each deployment, int64 of shape `(plans, candidates)`.
            rounding: whether a bucket that fits only one group is rounded up per replica as in Eq. 2, and such a group
                pays its constant, as neither can be avoided; without, sequences are divisible and constants are left
                out.
            steps: number of subgradient steps.
        """
        starts = range(0, len(counts), _DUAL_BLOCK)
        blocks = [self._dual_block(counts[start : start + _DUAL_BLOCK], steps, rounding) for start in starts]
        return np.concatenate(blocks) if blocks else np.zeros(0)

    def _dual_block(self, counts: np.ndarray, steps: int, rounding: bool) -> np.ndarray:
        """Return `dual_s` of a few deployments; arrays are `(plans, candidates[, buckets])`."""
        present = counts > 0
        shared_s, fixed_s = self._shared_and_fixed(counts, rounding)
        # In proportion to GPUs the dual value is the bound of Theorem 1, which later steps can only improve on, as the
        # best is kept.
        weights = counts * self.problem.num_gpus / (counts @ self.problem.num_gpus)[:, None]
        # What a group has to do in any case is a bound by itself.
        best_s = fixed_s.max(axis=1)
        rows = np.arange(len(counts))[:, None]
        columns = np.arange(shared_s.shape[2])[None, :]
        for step in range(steps):
            price_s = np.maximum(weights, _LEAST_WEIGHT)[:, :, None] * shared_s
            taker = price_s.argmin(axis=1)
            loads_s = fixed_s.copy()
            np.add.at(loads_s, (rows, taker), shared_s[rows, taker, columns])
            best_s = np.fmax(best_s, (weights * loads_s).sum(axis=1))
            # Multiplicative weights with a step that shrinks as 1 / sqrt(step): they stay positive and need no
            # projection onto the simplex but a division by their sum.
            excess = loads_s / np.maximum(loads_s.max(axis=1), np.finfo(float).tiny)[:, None]
            weights = np.where(present, weights * np.exp(excess / np.sqrt(step + 4)), 0.0)
            weights /= weights.sum(axis=1, keepdims=True)
        return best_s

    def _shared_and_fixed(self, counts: np.ndarray, rounding: bool) -> tuple[np.ndarray, np.ndarray]:
        """Return seconds of all of a bucket on each group, and what each group must do whatever is decided.

        The first is for buckets that fit two groups or more, 0 for the others and inf where a bucket does not fit:
        shape `(plans, candidates, buckets)`. The second has shape `(plans, candidates)`.
        """
        problem = self.problem
        able = (counts > 0)[:, :, None] & problem.fits[None] & (problem.num_sequences > 0)
        # Only keeps the division defined: groups without replicas are masked by `able`.
        replicas = np.maximum(counts, 1)[:, :, None]
        alone = able & (able.sum(axis=1, keepdims=True) == 1) & rounding
        finite_s = np.where(problem.fits, problem.sequence_s, 0.0)[None]
        fixed_s = np.where(alone, -(-problem.num_sequences // replicas) * finite_s, 0.0).sum(axis=2)
        fixed_s += np.where(alone.any(axis=2), problem.constant_s[None, :], 0.0)
        shared_s = np.where(able, problem.num_sequences / replicas * finite_s, np.inf)
        settled = alone.any(axis=1) | (problem.num_sequences == 0)[None, :]
        return np.where(settled[:, None, :], 0.0, shared_s), fixed_s


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


def _weighted(values: np.ndarray, num_sequences: np.ndarray) -> np.ndarray:
    """Return values times sequences, with 0 for empty buckets even where the value is inf."""
    return np.where(num_sequences > 0, values, 0.0) * num_sequences
