"""`RowMix`: whose rows the sequences of a bucket are, for giving a replica its part of each task.

Deployment search knows lengths alone (L Eq. 2). What a replica's tasks cost together depends on which tasks bring the
sequences that it is dispatched, so each task is taken to have its share of every bucket.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from peft_mux.scheduler.deployment.task_lengths import TaskLengths, joint_rows


class RowMix:
    """Rows of all tasks in proportion to their batches, by length.

    Args:
        tasks: the sampled lengths of each task, and its batch.

    Example:
        >>> mix = RowMix([TaskLengths("chat", (10, 20), 2), TaskLengths("books", (90,), 1)])
        >>> mix.rows([32, 96], [1, 2])
        ((20,), (90, 90))
    """

    def __init__(self, tasks: Sequence[TaskLengths]) -> None:
        self.num_tasks = len(tasks)
        lengths, owners = (np.array(column, dtype=np.int64) for column in joint_rows(tasks))
        order = np.lexsort((owners, lengths))
        self.lengths, self.owners = lengths[order], owners[order]

    def rows(self, boundaries: Sequence[int], counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Return for each task the lengths of its rows among so many sequences of each bucket.

        They are spread evenly over the sampled rows of the bucket, by task and then by length, so that the same counts
        are the same rows anywhere.

        Args:
            boundaries: padded length of each bucket in tokens, ascending.
            counts: sequences of each bucket.

        Raises:
            ValueError: for sequences of a bucket that the sample has no row of.
        """
        ends = np.searchsorted(self.lengths, np.asarray(boundaries), side="right")
        found: list[list[int]] = [[] for _ in range(self.num_tasks)]
        for start, end, boundary, count in zip([0, *ends[:-1]], ends, boundaries, counts, strict=True):
            if not count:
                continue
            if start == end:
                raise ValueError(
                    f"{count} sequences are padded to {boundary} tokens, which no sampled row is; allowed: buckets of "
                    "the sample."
                )
            by_task = np.lexsort((self.lengths[start:end], self.owners[start:end])) + start
            for place in by_task[((np.arange(count) + 0.5) * (end - start) / count).astype(np.int64)].tolist():
                found[int(self.owners[place])].append(int(self.lengths[place]))
        return tuple(map(tuple, found))
