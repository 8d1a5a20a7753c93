"""One step's dispatch in numbers, and the rules that dispatch it without a solver.

The linear form of L Eq. 3 says what a sequence of each bucket costs on each group of replicas. Rows are groups of
replicas, columns are buckets. A *ceiling* x[i, j] is the most sequences of bucket j that any replica of group i gets;
with p_i replicas the group can hold p_i x[i, j] of them, and by Eq. 3 its time is that of a replica with all its
ceilings. Every rule and the ILP answer with such a matrix, or with the counts that make it.

The rules are the baselines of L Figure 4(b) and 4(c), the fallback of a step, and the first bound of the ILP.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from peft_mux.scheduler.dispatching.bucketing import Bucketing
from peft_mux.scheduler.replicas.time_model import ReplicaGroup, ReplicaTimeModel
from peft_mux.scheduler.units import RELATIVE_ROUNDING


@dataclass(frozen=True, slots=True, eq=False)
class DispatchProblem:
    """The linear form of Eq. 3.

    Attributes:
        sequence_s: seconds that a sequence of each bucket takes on a replica of each group, float64 of shape
            `(groups, buckets)`; inf where a bucket does not fit.
        constant_s: seconds of a replica that has any sequence, in addition to those, float64 of shape `(groups,)`.
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
        """Whether a bucket fits into a group: bool of shape `(groups, buckets)`."""
        return self.lengths <= self.max_tokens[:, None]

    def group_s(self, ceilings: np.ndarray) -> np.ndarray:
        """Return the seconds of each group with these ceilings: float64 of shape `(groups,)`."""
        # A ceiling of 0 times inf would be NaN.
        finite_s = np.where(self.fits, self.sequence_s, 0.0)
        return (finite_s * ceilings).sum(axis=1) + self.constant_s * (ceilings.sum(axis=1) > 0)


def build_problem(
    groups: Sequence[ReplicaGroup], bucketing: Bucketing, time_model: ReplicaTimeModel, *, pads: bool = True
) -> DispatchProblem:
    """Return the linear form for one batch.

    Args:
        groups: the replicas that the batch is dispatched to, by configuration.
        bucketing: padded lengths of the batch, and how many sequences each has.
        time_model: predicts the seconds of one replica.
        pads: whether sequences are padded to their bucket, as in the paper; otherwise they are priced by its mean
            length.

    Raises:
        ValueError: for a bucket with sequences that fits no group.
    """
    lengths = np.asarray(bucketing.boundaries, dtype=np.int64)
    num_sequences = np.asarray(bucketing.counts, dtype=np.int64)
    priced = lengths if pads else np.asarray(bucketing.mean_lengths or bucketing.boundaries, dtype=np.int64)
    max_tokens = np.array([group.max_tokens for group in groups], dtype=np.int64)
    too_long = lengths[(lengths > max_tokens.max()) & (num_sequences > 0)]
    if too_long.size:
        raise ValueError(
            f"a bucket must be padded to at most {int(max_tokens.max())} tokens, the longest that any replica "
            f"supports, got {int(too_long[-1])}. Truncate the sequences, or deploy a configuration with more GPUs "
            "per replica."
        )
    sequence_s = np.full((len(groups), len(lengths)), np.inf)
    constant_s = np.zeros(len(groups))
    for index, group in enumerate(groups):
        supported = priced[lengths <= group.max_tokens].tolist()
        if not supported:
            continue
        per_sequence_s, bubble_s = time_model.linear_terms(group.config, supported, group.max_tokens)
        # Lengths ascend, so that what fits comes first.
        sequence_s[index, : len(supported)] = group.slowness * per_sequence_s
        constant_s[index] = group.slowness * bubble_s
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

    If the ceilings leave room for more than B_j, the group that is slowest in the linear form gets fewer.
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


def length_based(problem: DispatchProblem) -> np.ndarray:
    """Return counts with each bucket on the smallest configuration that supports it (L section 3, Figure 4(c)).

    The smallest is the one of least `max_tokens`. Groups that share it are one group in L Appendix A, balanced within:
    of these the next sequences go where the bucket is then done first, longest buckets first. Ties go to fewer GPUs,
    then to the first group. Shape `(groups, buckets)`.
    """
    counts = np.zeros(problem.sequence_s.shape, dtype=np.int64)
    busy_s = np.zeros(len(problem.max_tokens))
    # The last key of lexsort counts most: fewer GPUs, then the first group.
    order = np.lexsort((np.arange(len(busy_s)), problem.num_gpus))
    for bucket in reversed(range(len(problem.lengths))):
        left = int(problem.num_sequences[bucket])
        if not left:
            continue
        smallest = problem.max_tokens[problem.fits[:, bucket]].min()
        tier = [int(index) for index in order if problem.max_tokens[index] == smallest]
        # A single group takes the whole bucket; of several, each takes one sequence a replica at a time.
        while left:
            index = min(tier, key=lambda member: busy_s[member] + problem.sequence_s[member, bucket])
            taken = left if len(tier) == 1 else min(left, int(problem.num_replicas[index]))
            counts[index, bucket] += taken
            busy_s[index] += taken / problem.num_replicas[index] * problem.sequence_s[index, bucket]
            left -= taken
    return counts


def uniform(problem: DispatchProblem) -> np.ndarray:
    """Return counts with each bucket spread evenly over all replicas that support it (L section 3, Figure 4(b)).

    What does not divide evenly goes round the replicas in turn, on from where the bucket before stopped. Shape
    `(groups, buckets)`.
    """
    counts = np.zeros(problem.sequence_s.shape, dtype=np.int64)
    turn = 0
    for bucket, num_sequences in enumerate(problem.num_sequences.tolist()):
        groups = np.flatnonzero(problem.fits[:, bucket])
        if not num_sequences:
            continue
        group_of_replica = np.repeat(groups, problem.num_replicas[groups])
        each, rest = divmod(num_sequences, len(group_of_replica))
        takers = group_of_replica[(turn + np.arange(rest)) % len(group_of_replica)]
        counts[:, bucket] = np.bincount(takers, minlength=len(counts))
        counts[groups, bucket] += each * problem.num_replicas[groups]
        turn += rest
    return counts


def carried_over(problem: DispatchProblem, last_lengths: np.ndarray, last_counts: np.ndarray) -> np.ndarray:
    """Return counts with each group's share of a bucket as in another step's dispatch.

    The bucket of that step is the nearest in padded length whose sequences are on groups that support this one's; if
    there is none, the bucket goes by length. Shares are rounded down, and what is left goes to the largest remainders.

    Args:
        problem: the linear form of this step.
        last_lengths: padded lengths of the other step's buckets in tokens, ascending, int64 of shape
            `(other buckets,)`.
        last_counts: sequences of each of those buckets on each group, int64 of shape `(groups, other buckets)`.
    """
    counts = length_based(problem)
    for bucket, length in enumerate(problem.lengths.tolist()):
        fits, total = problem.fits[:, bucket], int(problem.num_sequences[bucket])
        usable = np.flatnonzero((last_counts[fits] > 0).any(axis=0))
        if not usable.size or not total:
            continue
        nearest = usable[np.abs(last_lengths[usable] - length).argmin()]
        weights = np.where(fits, last_counts[:, nearest], 0)
        # In integers: remainders that are equal stay so, and then the first group gets more.
        shares, remainders = np.divmod(total * weights, weights.sum())
        shares[np.argsort(-remainders, kind="stable")[: total - int(shares.sum())]] += 1
        counts[:, bucket] = shares
    return counts


def relocate(problem: DispatchProblem, counts: np.ndarray) -> np.ndarray:
    """Return ceilings no slower than those of `counts`: work moves off the slowest group while that helps.

    One move takes one sequence of a bucket from each replica of the slowest group and gives them to another group; of
    all moves that one is made after which the slower of the two is fastest.

    Args:
        problem: the linear form of the step.
        counts: sequences of each bucket on each group, int64 of shape `(groups, buckets)`.

    Returns:
        Most sequences of each bucket on any replica of each group, int64 of shape `(groups, buckets)`.
    """
    ceilings = ceilings_of(problem, counts)
    replicas = problem.num_replicas[:, None]
    unsupported = ~problem.fits
    sequence_s = np.where(unsupported, 0.0, problem.sequence_s)
    group_s = problem.group_s(ceilings)
    while True:
        slowest = int(group_s.argmax())
        unplaced = problem.num_sequences - (replicas * ceilings).sum(axis=0) + replicas[slowest]
        added = -(-np.maximum(unplaced, 0) // replicas)
        # A group that gets its first sequence begins to pay its constant; one that gives its last no longer does.
        starts = (ceilings.sum(axis=1) == 0)[:, None] & (added > 0)
        receiver_s = group_s[:, None] + added * sequence_s + starts * problem.constant_s[:, None]
        stops = ceilings[slowest].sum() == 1
        giver_s = group_s[slowest] - sequence_s[slowest] - stops * problem.constant_s[slowest]
        after_s = np.maximum(receiver_s, giver_s)
        after_s[unsupported] = np.inf
        after_s[slowest] = np.inf
        after_s[:, ceilings[slowest] == 0] = np.inf
        receiver, bucket = divmod(int(after_s.argmin()), len(problem.lengths))
        if not after_s[receiver, bucket] < group_s[slowest] * (1 - RELATIVE_ROUNDING):
            return ceilings
        ceilings[slowest, bucket] -= 1
        ceilings[receiver, bucket] += added[receiver, bucket]
        group_s[slowest], group_s[receiver] = giver_s[bucket], receiver_s[receiver, bucket]
