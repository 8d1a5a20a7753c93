"""Deals what a group of replicas gets to each of them: an even split of counts, and which sequence goes where."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def split_within_group(
    counts: Sequence[int], num_replicas: int, sequence_s: Sequence[float] | None = None
) -> tuple[tuple[int, ...], ...]:
    """Return what each replica of a group gets of each bucket: `[replica][bucket]`, adding up to `counts`.

    Every replica gets `counts[j] // num_replicas` or one more, so none exceeds the ceiling of L Eq. 3. What is over
    goes, costliest bucket first, to the replicas that have least of it so far in seconds; so two replicas differ by at
    most the costliest sequence.

    Args:
        counts: sequences of the group in each bucket.
        num_replicas: number of equal replicas in the group.
        sequence_s: seconds of one sequence of each bucket; by default those of longer buckets are taken to be larger.

    Raises:
        ValueError: for fewer than one replica, a negative count, or not one time for each bucket.
    """
    if num_replicas < 1:
        raise ValueError(f"num_replicas is {num_replicas}; allowed: 1 or more.")
    if min(counts, default=0) < 0:
        raise ValueError(f"counts are {list(counts)}; allowed: 0 or more each.")
    costs = np.arange(1.0, len(counts) + 1) if sequence_s is None else np.asarray(sequence_s, dtype=np.float64)
    if costs.shape != (len(counts),):
        raise ValueError(f"sequence_s has shape {costs.shape}; allowed: ({len(counts)},), one for each of counts.")
    each, rest = np.divmod(np.asarray(counts, dtype=np.int64), num_replicas)
    shares = np.tile(each, (num_replicas, 1))
    extra_s = np.zeros(num_replicas)
    for bucket in np.argsort(-costs, kind="stable"):
        if rest[bucket]:
            takers = np.argsort(extra_s, kind="stable")[: rest[bucket]]
            shares[takers, bucket] += 1
            extra_s[takers] += costs[bucket]
    return tuple(tuple(row) for row in shares.tolist())


def deal_out(members: np.ndarray, quotas: Sequence[int]) -> list[np.ndarray]:
    """Return the members of each of several shares of given sizes, dealt evenly along their order.

    Members that are ordered by length thus reach every share in all lengths: packed without padding, sequences of one
    bucket still differ.

    Args:
        members: what is dealt, of shape `(sum(quotas),)`.
        quotas: how many members each share gets.
    """
    # The members of a share lie at equal distances between 0 and 1, half a distance from both ends.
    positions = [
        ((np.arange(quota) + 0.5) / quota, np.full(quota, share)) for share, quota in enumerate(quotas) if quota
    ]
    if not positions:
        return [members[:0] for _ in quotas]
    places, shares = (np.concatenate(parts) for parts in zip(*positions, strict=True))
    # Shares that meet at the same place take turns by their number, so that the answer is the same everywhere.
    owners = shares[np.lexsort((shares, places))]
    return [members[owners == share] for share in range(len(quotas))]
