"""Which replica each row of a step goes to, once it is known how many items of each bucket each replica gets."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from peft_mux.engine.replicas.row_items import BatchRows, RowItems
from peft_mux.scheduler.dispatching.ahead import StepDispatch
from peft_mux.scheduler.dispatching.deal import deal_out

StepKey = tuple[BatchRows, ...]
"""The rows of each batch of a step."""


def dealt_out(found: StepDispatch, items: RowItems, groups: Sequence[Sequence[int]]) -> np.ndarray:
    """Return the replica of each row: a bucket is dealt out evenly over tasks, and then over tokens of items.

    Args:
        found: how many items of each bucket each replica gets.
        items: the items that were dispatched.
        groups: the replicas of each group, by their places in the layout.

    Returns:
        int64 of shape `(rows,)`, batch after batch.
    """
    tasks = np.repeat(np.arange(len(items.tokens)), [len(own) for own in items.tokens])
    lengths = np.array(items.lengths, dtype=np.int64)
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
    assert (owners >= 0).all(), "a row was lost"
    return _of_rows(owners, items)


def _of_rows(owners: np.ndarray, items: RowItems) -> np.ndarray:
    """Return the replica of each row, given that of each item."""
    found, start = [np.zeros(0, dtype=np.int64)], 0
    for rows in items.rows:
        own = np.empty(sum(map(len, rows)), dtype=np.int64)
        for number, item in enumerate(rows):
            own[list(item)] = owners[start + number]
        found.append(own)
        start += len(rows)
    return np.concatenate(found)
