"""The order of a task's rows: a pure function of its own seed and step, which no other task influences.

Because the global batch of any step can be computed from the step alone, resuming and pausing need no saved position.
"""

from __future__ import annotations

import numpy as np

from peft_mux.data.dataset import DataReport, TokenizedDataset
from peft_mux.data.task_batch import Arrange, TaskBatch, TokenSequence, prefix_trie

_ORDER_STREAM = 0x0DE7  # keeps these draws apart from others that begin with the task's seed


class TaskLoader:
    """Global batches of one task from tokenised rows.

    Every epoch visits each row once; its last batch may be smaller.

    Args:
        dataset: the tokenised rows of the task.
        task: name of the task.
        batch_size: number of rows of a global batch.
        seed: the task's seed, which fixes the order of its rows.
        shuffle: whether each epoch has an order of its own, rather than that of the dataset.
        arrange: makes the rows of a global batch of rows of the dataset; `None` where they are the same.

    Attributes:
        shares_prefixes: whether what the sequences of a batch begin with alike may be computed once.
    """

    shares_prefixes = False

    def __init__(
        self,
        dataset: TokenizedDataset,
        *,
        task: str,
        batch_size: int,
        seed: int,
        shuffle: bool,
        arrange: Arrange | None = None,
    ) -> None:
        """Keep what the order of rows follows from."""
        self.dataset = dataset
        self.task = task
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self.arrange = arrange
        self._order: tuple[int, np.ndarray] | None = None

    @property
    def report(self) -> DataReport:
        """What became of the rows."""
        return self.dataset.report

    @property
    def steps_per_epoch(self) -> int:
        """Global batches of an epoch."""
        return -(-len(self.dataset) // self.batch_size)

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens of a global batch."""
        return float(self.dataset.lengths.sum()) / self.steps_per_epoch

    def sample(self, num_rows: int) -> tuple[TokenSequence, ...]:
        """Return at most so many rows, in dataset order."""
        return tuple(self.dataset[row] for row in range(min(len(self.dataset), num_rows)))

    @property
    def sample_lengths(self) -> list[int]:
        """Lengths of the rows."""
        return self.dataset.lengths.tolist()

    def order(self, epoch: int) -> np.ndarray:
        """Return the rows of an epoch in the order in which they are trained on."""
        # One epoch is kept: its batches are asked for one after another.
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, self._drawn_order(epoch))
        return self._order[1]

    def _drawn_order(self, epoch: int) -> np.ndarray:
        rows = np.arange(len(self.dataset))
        if self.shuffle:
            # From seed and epoch alone: a resumed run, or any process, finds the same order.
            rows = np.random.default_rng([_ORDER_STREAM, self.seed, epoch]).permutation(rows)
        return rows

    def sample_batches(self, num_batches: int) -> list[TaskBatch]:
        """Return at most so many global batches, the first ones, for plans; nothing of the training changes by it."""
        # Drawn anew: the epoch that is kept may be in use by a thread that reads ahead.
        order, count = self._drawn_order(0), min(num_batches, self.steps_per_epoch)
        return [
            self._batch(step, order[step * self.batch_size : (step + 1) * self.batch_size]) for step in range(count)
        ]

    def batch(self, step: int) -> TaskBatch:
        """Return the global batch of an optimizer step, counted from 0 over all epochs."""
        epoch, place = divmod(step, self.steps_per_epoch)
        rows = self.order(epoch)[place * self.batch_size : (place + 1) * self.batch_size]
        return self._batch(step, rows)

    def _batch(self, step: int, rows: np.ndarray) -> TaskBatch:
        sequences = tuple(self.dataset[int(row)] for row in rows)
        arranged = sequences if self.arrange is None else self.arrange(sequences)
        trie = prefix_trie(arranged) if self.shares_prefixes else None
        return TaskBatch(self.task, step, self.seed, arranged, trie=trie)
