"""Dispatch without a solver: by length, uniformly, as in the last step, and by moving work off the slowest group.

These are the baselines of L Figure 4(b) and 4(c), what a step falls back on, and the first bound for the ILP.
"""

from __future__ import annotations

import numpy as np

from peft_mux.scheduler.dispatching.problem import RELATIVE_ROUNDING, DispatchProblem, ceilings_of


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
        owners = np.repeat(groups, problem.num_replicas[groups])
        each, rest = divmod(num_sequences, len(owners))
        takers = owners[(turn + np.arange(rest)) % len(owners)]
        counts[:, bucket] = np.bincount(takers, minlength=len(counts))
        counts[groups, bucket] += each * problem.num_replicas[groups]
        turn += rest
    return counts


def carried_over(problem: DispatchProblem, last_lengths: np.ndarray, last_counts: np.ndarray) -> np.ndarray:
    """Return counts with each group's share of a bucket as in another step's dispatch.

    The bucket of that step is the nearest in padded length whose sequences lie on groups that support this one's; where
    there is none the bucket goes by length. Rounded down, with what is left given to the largest remainders.

    Args:
        problem: the linear form of this step.
        last_lengths: padded lengths of the other step's buckets in tokens, ascending, int64 of shape
            `(other buckets,)`.
        last_counts: sequences of each of those buckets on each group, int64 of shape `(groups, other buckets)`.
    """
    # Buckets for which the other step has no example stay by length.
    counts = length_based(problem)
    for bucket, length in enumerate(problem.lengths.tolist()):
        fits = problem.fits[:, bucket]
        usable = np.flatnonzero((last_counts[fits] > 0).any(axis=0))
        if not usable.size or not problem.num_sequences[bucket]:
            continue
        nearest = usable[np.abs(last_lengths[usable] - length).argmin()]
        weights = np.where(fits, last_counts[:, nearest], 0)
        counts[:, bucket] = _apportion(int(problem.num_sequences[bucket]), weights)
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


def _apportion(total: int, weights: np.ndarray) -> np.ndarray:
    """Return integers near `total * weights / sum(weights)` that add up to `total`."""
    # In integers: remainders that are equal stay so, and then the first group gets more.
    scaled = total * weights
    shares = scaled // weights.sum()
    remainders = scaled - shares * weights.sum()
    shares[np.argsort(-remainders, kind="stable")[: total - int(shares.sum())]] += 1
    return shares
