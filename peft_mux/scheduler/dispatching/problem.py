"""One step's dispatch in numbers: what a sequence of each bucket costs on each group of replicas (L Eq. 3).

Rows are groups of replicas, columns are buckets. A *ceiling* x[i, j] is the most sequences of bucket j that any replica
of group i gets; with p_i replicas the group can hold p_i x[i, j] of them, and by Eq. 3 its time is that of a replica
with all its ceilings. Every rule and the ILP answer with such a matrix, and `counts_from_ceilings` makes of it how many
sequences each group gets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from peft_mux.scheduler.dispatching.bucketing import Bucketing
from peft_mux.scheduler.replicas.configs import ReplicaGroup, TimeModel

RELATIVE_ROUNDING = 1e-9
"""Relative difference of two times that is rounding; a search that followed smaller gains could go on for ever."""


@dataclass(frozen=True, slots=True, eq=False)
class DispatchProblem:
    """The linear form of Eq. 3.

    Attributes:
        sequence_s: seconds that a sequence of each bucket takes on a replica of each group, float64 of shape
            `(groups, buckets)`; inf where a bucket does not fit.
        constant_s: seconds of a replica that has any sequence, besides those, float64 of shape `(groups,)`.
        num_replicas: replicas in each group (p_i in L), int64 of shape `(groups,)`.
        num_sequences: sequences of the step in each bucket (B_j in L), int64 of shape `(buckets,)`.
        lengths: padded length of each bucket in tokens, int64 of shape `(buckets,)`.
        priced_lengths: length of each bucket that its sequences are priced by, ascending, int64 of shape `(buckets,)`.
        max_tokens: most tokens of a micro-batch on each group, int64 of shape `(groups,)`.
        num_gpus: GPUs of one replica of each group, int64 of shape `(groups,)`.
    """

    sequence_s: np.ndarray
    constant_s: np.ndarray
    num_replicas: np.ndarray
    num_sequences: np.ndarray
    lengths: np.ndarray
    priced_lengths: np.ndarray
    max_tokens: np.ndarray
    num_gpus: np.ndarray

    @property
    def fits(self) -> np.ndarray:
        """Return whether a bucket fits into a group: bool of shape `(groups, buckets)`."""
        return self.lengths <= self.max_tokens[:, None]

    def group_s(self, ceilings: np.ndarray) -> np.ndarray:
        """Return the seconds of each group in the linear form: float64 of shape `(groups,)`.

        Args:
            ceilings: most sequences of each bucket on any replica of each group, of shape `(groups, buckets)`.
        """
        # A ceiling of 0 times inf would be NaN.
        finite_s = np.where(self.fits, self.sequence_s, 0.0)
        return (finite_s * ceilings).sum(axis=1) + self.constant_s * (ceilings.sum(axis=1) > 0)


def build_problem(
    groups: Sequence[ReplicaGroup], bucketing: Bucketing, time_model: TimeModel, *, pads: bool = True
) -> DispatchProblem:
    """Return the linear form for one batch.

    Args:
        groups: the replicas that the batch is dispatched to, by configuration.
        bucketing: padded lengths of the batch, and how many sequences each has.
        time_model: predicts the seconds of one replica.
        pads: whether sequences are padded to their bucket, as in the paper; else they are priced by its mean length.

    Raises:
        ValueError: for no groups, a bucket with sequences that fits no group, or a time model that answers in another
            shape or with negative or infinite seconds.
    """
    if not groups:
        raise ValueError("groups is empty; allowed: one group of replicas or more. Plan a deployment first.")
    lengths = np.asarray(bucketing.boundaries, dtype=np.int64)
    num_sequences = np.asarray(bucketing.counts, dtype=np.int64)
    priced = lengths if pads else np.asarray(bucketing.mean_lengths or bucketing.boundaries, dtype=np.int64)
    max_tokens = np.array([group.max_tokens for group in groups], dtype=np.int64)
    _check_that_all_fit(lengths, num_sequences, int(max_tokens.max()))
    sequence_s = np.full((len(groups), len(lengths)), np.inf)
    constant_s = np.zeros(len(groups))
    for index, group in enumerate(groups):
        supported = priced[lengths <= group.max_tokens].tolist()
        if not supported:
            continue
        per_sequence_s, constant = time_model.linear_terms(group.config, supported, group.max_tokens)
        _check_terms(per_sequence_s, constant, len(supported), group)
        # Lengths ascend, so that what fits comes first.
        sequence_s[index, : len(supported)] = group.slowness * np.asarray(per_sequence_s)
        constant_s[index] = group.slowness * constant
    return DispatchProblem(
        sequence_s=sequence_s,
        constant_s=constant_s,
        num_replicas=np.array([group.count for group in groups], dtype=np.int64),
        num_sequences=num_sequences,
        lengths=lengths,
        priced_lengths=priced,
        max_tokens=max_tokens,
        num_gpus=np.array([group.config.num_gpus for group in groups], dtype=np.int64),
    )


def ceilings_of(problem: DispatchProblem, counts: np.ndarray) -> np.ndarray:
    """Return the ceilings of d_ij / p_i in Eq. 3: int64 of shape `(groups, buckets)`."""
    return -(-counts // problem.num_replicas[:, None])


def counts_from_ceilings(problem: DispatchProblem, ceilings: np.ndarray) -> np.ndarray:
    """Return how many sequences each group gets: d_ij <= p_i x_ij, with column sums B_j.

    Where the ceilings leave room for more than B_j, the group that is slowest in the linear form gets fewer.
    """
    counts = ceilings * problem.num_replicas[:, None]
    slowest_first = np.argsort(-problem.group_s(ceilings), kind="stable")
    excess = counts.sum(axis=0) - problem.num_sequences
    assert (excess >= 0).all(), "ceilings leave a sequence without a place"
    for index in slowest_first:
        removed = np.minimum(counts[index], excess)
        counts[index] -= removed
        excess -= removed
    return counts


def _check_that_all_fit(lengths: np.ndarray, num_sequences: np.ndarray, longest_supported: int) -> None:
    too_long = lengths[(lengths > longest_supported) & (num_sequences > 0)]
    if too_long.size:
        raise ValueError(
            f"a bucket is padded to {int(too_long[-1])} tokens; allowed: at most {longest_supported}, the longest that "
            "any replica supports. Truncate the sequences, or deploy a configuration with more GPUs per replica."
        )


def _check_terms(per_sequence_s: np.ndarray, constant_s: float, num_buckets: int, group: ReplicaGroup) -> None:
    terms = np.append(np.asarray(per_sequence_s, dtype=np.float64), constant_s)
    if terms.shape != (num_buckets + 1,) or not np.isfinite(terms).all() or (terms < 0).any():
        raise ValueError(
            f"linear_terms of {group.config} gave {per_sequence_s} and {constant_s}; allowed: {num_buckets} finite "
            "seconds of 0 or more, and one constant likewise. Correct the time model."
        )
