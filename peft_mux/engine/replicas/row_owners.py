"""Which replica each sequence of a step goes to, once it is known how many of each bucket each replica gets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from peft_mux.scheduler.dispatching.ahead import StepDispatch
from peft_mux.scheduler.dispatching.deal import deal_out

StepKey = tuple[tuple[str, int, tuple[int, ...]], ...]
"""For each batch of a step: name of the task, step of the task, and lengths of its rows in tokens."""


def dealt_out(found: StepDispatch, key: StepKey, groups: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the replica of each sequence: a bucket is dealt out evenly over tasks, and then over lengths.

    Args:
        found: how many sequences of each bucket each replica gets.
        key: the sequences.
        groups: the replicas of each group, by their places in the layout.

    Returns:
        int64 of shape `(sequences,)`, batch after batch.
    """
    tasks = np.repeat(np.arange(len(key)), [len(own) for _, _, own in key])
    lengths = np.array([length for _, _, own in key for length in own], dtype=np.int64)
    buckets = found.bucketing.bucket_of(lengths.tolist())
    places = [place for members in groups for place in members]
    counts = [replica for group in found.dispatch.replica_counts for replica in group]
    # The last key of `lexsort` counts most; positions make the order total, the same on every machine.
    order = np.lexsort((np.arange(len(lengths)), -lengths, tasks))
    owners = np.full(len(lengths), -1, dtype=np.int64)
    for bucket in range(found.bucketing.num_buckets):
        members = order[buckets[order] == bucket]
        for place, share in zip(places, deal_out(members, [own[bucket] for own in counts]), strict=True):
            owners[share] = place
    assert (owners >= 0).all(), "a sequence was lost"
    return owners
