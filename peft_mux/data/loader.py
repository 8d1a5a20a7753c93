"""The order of a task's rows: a pure function of its own seed and step, which no other task influences.

Because the global batch of any step can be computed from the step alone, resuming and pausing need no saved position.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from peft_mux.data.batch import TaskBatch, TokenSequence
from peft_mux.data.dataset import TokenizedDataset
from peft_mux.data.tokenize import RowTokenizer
from peft_mux.errors import DataError

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
    """

    def __init__(self, dataset: TokenizedDataset, *, task: str, batch_size: int, seed: int, shuffle: bool) -> None:
        """Keep what the order of rows follows from."""
        self.dataset = dataset
        self.task = task
        self.batch_size = batch_size
        self.seed = seed
        self.shuffle = shuffle
        self._order: tuple[int, np.ndarray] | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Global batches of an epoch."""
        return -(-len(self.dataset) // self.batch_size)

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens of a global batch."""
        return float(self.dataset.lengths.sum()) / self.steps_per_epoch

    @property
    def sample_lengths(self) -> list[int]:
        """Lengths of the rows."""
        return self.dataset.lengths.tolist()

    def order(self, epoch: int) -> np.ndarray:
        """Return the rows of an epoch in the order in which they are trained on."""
        # One epoch is kept: its batches are asked for one after another.
        if self._order is None or self._order[0] != epoch:
            rows = np.arange(len(self.dataset))
            if self.shuffle:
                # From seed and epoch alone: a resumed run, or any process, finds the same order.
                rows = np.random.default_rng([_ORDER_STREAM, self.seed, epoch]).permutation(rows)
            self._order = (epoch, rows)
        return self._order[1]

    def batch(self, step: int) -> TaskBatch:
        """Return the global batch of an optimizer step, counted from 0 over all epochs."""
        epoch, place = divmod(step, self.steps_per_epoch)
        rows = self.order(epoch)[place * self.batch_size : (place + 1) * self.batch_size]
        return TaskBatch(self.task, step, self.seed, tuple(self.dataset[int(row)] for row in rows))


class StreamLoader:
    """Global batches of one task from a stream, in the stream's own order.

    Rows are tokenised as they come. Stepping forward is cheap; going back (or resuming) reads the stream again from its
    start. When the stream ends it is read anew, with `set_epoch` called where it has one. Shuffling is the stream's own
    affair (`IterableDataset.shuffle`).

    Args:
        stream: rows that can be iterated over again and again.
        row_tokenizer: turns the rows of the task into sequences.
        task: name of the task.
        batch_size: number of rows of a global batch.
        seed: the task's seed, on which its dropout depends.
    """

    steps_per_epoch: int | None = None

    def __init__(
        self, stream: Iterable[Any], row_tokenizer: RowTokenizer, *, task: str, batch_size: int, seed: int
    ) -> None:
        """Keep the stream, and read nothing of it yet."""
        self.stream = stream
        self.row_tokenizer = row_tokenizer
        self.task = task
        self.batch_size = batch_size
        self.seed = seed
        self._rows: Iterator[TokenSequence] = self._tokenised_rows()
        self._next_step = 0
        self._sample_lengths: list[int] = []

    @property
    def sample_lengths(self) -> list[int]:
        """Lengths of the first global batch, as a sample; read once, as going back reads the stream anew."""
        if not self._sample_lengths:
            self._sample_lengths = [len(sequence) for sequence in self.batch(0).sequences]
        return self._sample_lengths

    @property
    def tokens_per_step(self) -> float:
        """Tokens of the first global batch, as an estimate."""
        return float(sum(self.sample_lengths))

    def batch(self, step: int) -> TaskBatch:
        """Return the global batch of an optimizer step.

        Raises:
            DataError: if a row of it cannot be trained on, or the stream has no rows.
        """
        if step < self._next_step:
            # Left-out rows make it unknown where a step began, so the stream is counted from its start.
            self._rows, self._next_step = self._tokenised_rows(), 0
        while self._next_step < step:
            self._next_sequences()
        return TaskBatch(self.task, step, self.seed, tuple(self._next_sequences()))

    def _next_sequences(self) -> list[TokenSequence]:
        """Read the sequences of the next step."""
        sequences = [next(self._rows) for _ in range(self.batch_size)]
        self._next_step += 1
        return sequences

    def _tokenised_rows(self) -> Iterator[TokenSequence]:
        """Yield the usable rows of the stream, epoch after epoch and without end."""
        epoch = 0
        while True:
            if hasattr(self.stream, "set_epoch"):
                self.stream.set_epoch(epoch)  # type: ignore[attr-defined]
            found = False
            for index, row in enumerate(self.stream):
                sequence = self.row_tokenizer(row, index)
                if sequence is not None:
                    found = True
                    yield sequence
            # An unusable stream would be read for ever.
            if not found:
                raise DataError(f"{self.row_tokenizer.where}: got a stream without usable rows; allowed: at least one.")
            epoch += 1
