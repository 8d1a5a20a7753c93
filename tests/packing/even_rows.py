"""The division of rows among equal replicas, for tests that have batches."""

from __future__ import annotations

from collections.abc import Sequence

from peft_mux.data.packing.passes import even_shares
from peft_mux.data.task_batch import TaskBatch


def even_rows(batches: Sequence[TaskBatch], num_replicas: int) -> list[list[list[int]]]:
    """Return for each replica and each batch the indices of its sequences."""
    return even_shares([[len(sequence) for sequence in batch.sequences] for batch in batches], num_replicas)
