"""`StreamLoader`: the global batches of a task whose rows come from a stream, in the stream's own order."""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from dataclasses import replace
from itertools import count
from typing import Any, Generic, TypeVar

from peft_mux.data.dataset import RowLoader
from peft_mux.data.task_batch import TaskBatch, TokenSequence, prefix_trie
from peft_mux.data.tokenize import DataReport, RowTokenizer
from peft_mux.errors import DataError, PeftMuxError
from peft_mux.user_code import describe_error

Item = TypeVar("Item")

_EXIT_S = 2.0
"""Seconds that the end of the interpreter waits for threads that still read."""
_unfinished: set[Future[Any]] = set()


class ReadAhead(Generic[Item]):
    """Reads the items of a task's own iterator in a thread, one item ahead, and limits how long it waits for one.

    Each item is read by a daemon thread of its own, so that no thread is left when a task or a run ends. A thread that
    is blocked cannot be ended; it is abandoned, and its iterator never read again.

    Args:
        items: the iterator; only one thread at a time reads it.
        where: the dataset, for messages, such as `tasks.sql.train_dataset`.
        timeout_s: seconds that `take` waits.
    """

    def __init__(self, items: Iterator[Item], *, where: str, timeout_s: float) -> None:
        """Read nothing yet."""
        self.where = where
        self.timeout_s = min(timeout_s, threading.TIMEOUT_MAX)  # no lock can wait longer
        self._items = items
        self._next: Future[Item] | None = None

    def begin(self) -> None:
        """Begin to read the next item, unless that has begun; return at once."""
        if self._next is not None:
            return
        self._next = Future()
        thread = threading.Thread(
            target=_read, args=(self._items, self._next), name=f"peft_mux {self.where}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # the process may have no more threads
            self._next.set_exception(error)

    def settle(self) -> None:
        """Wait until nothing reads the iterator any more.

        Raises:
            DataError: if something still reads it after the time limit.
        """
        if self._next is not None and not wait([self._next], self.timeout_s).done:
            raise DataError(
                f"{self.where}: got no rows for {self.timeout_s:g} s; allowed: those of a step within data_timeout_s. "
                "Raise data_timeout_s, or make the stream faster."
            )

    def take(self) -> Item:
        """Return the next item, read early or now.

        Raises:
            DataError: if the iterator raises anything at all, or gives nothing in time.
            PeftMuxError: an error of our own code while it reads, such as a `ConfigError`.
        """
        self.begin()
        self.settle()
        item, self._next = self._next, None
        assert item is not None, "begun above"
        error = item.exception()
        if error is None:
            return item.result()
        if isinstance(error, PeftMuxError):
            raise error
        raise DataError(describe_error(error)) from error


def _read(items: Iterator[Item], found: Future[Item]) -> None:
    _unfinished.add(found)
    try:
        found.set_result(next(items))
    except BaseException as error:  # for the thread that waits
        found.set_exception(error)
    finally:
        _unfinished.discard(found)


@atexit.register
def _wait_for_threads() -> None:
    """Let threads finish what they read: the interpreter may abort if it stops them in compiled code."""
    wait(list(_unfinished), _EXIT_S)


class StreamLoader(RowLoader):
    """Global batches of one task from a stream.

    Rows are read and tokenised in a thread, as they come: whatever the stream raises, and a stream that gives nothing
    in time, is a `DataError` of this task. Stepping forward is cheap; going back further than to the batch last given
    reads the stream again from its start, as resuming does. When the stream ends it is read again, after a call of
    `set_epoch` if it has one. Shuffling is done by the stream (`IterableDataset.shuffle`).

    Args:
        stream: rows that can be iterated over again and again.
        open_rows: returns the reader of the rows, given the first one.
        where: the dataset, for messages: `tasks.sql.train_dataset`.
        timeout_s: seconds within which the rows of a step must come once they are waited for.
        **settings: those of `RowLoader`.

    Attributes:
        report: what happened to the rows of all batches given so far; `None` before the first one.
    """

    steps_per_epoch: int | None = None

    def __init__(
        self,
        stream: Iterable[Any],
        open_rows: Callable[[Any], RowTokenizer],
        *,
        where: str,
        timeout_s: float,
        **settings: Any,
    ) -> None:
        """Store the stream, and read nothing of it yet."""
        super().__init__(**settings)
        self.stream = stream
        self.where = where
        self.timeout_s = timeout_s
        self.report: DataReport | None = None
        self._open_rows = open_rows
        self._last: TaskBatch | None = None
        self._sample: tuple[TokenSequence, ...] = ()
        self._read_from_start()

    def _read_from_start(self) -> None:
        self._rows = ReadAhead(self._batches(), where=self.where, timeout_s=self.timeout_s)
        self._next_step = 0

    def sample(self, num_rows: int) -> tuple[TokenSequence, ...]:
        """Return at most so many rows of the first global batch; kept, as going back would read the stream again."""
        if not self._sample:
            self._sample = self.batch(0).sequences
        return self._sample[:num_rows]

    def sample_batches(self, num_batches: int) -> list[TaskBatch]:
        """Return the first global batch, for plans; reading another one would move the stream."""
        rows = self.sample(self.batch_size)
        trie = prefix_trie(rows) if self.shares_prefixes else None
        return [TaskBatch(self.task, 0, self.seed, rows, trie=trie)][:num_batches]

    @property
    def sample_lengths(self) -> list[int]:
        """Lengths of the rows of the first global batch, as a sample."""
        return [len(sequence) for sequence in self.sample(self.batch_size)]

    @property
    def tokens_per_step(self) -> float:
        """Tokens of the first global batch, as an estimate."""
        return float(sum(self.sample_lengths))

    def begin(self, step: int) -> None:
        """Begin to read the global batch of a step if it is the next one of the stream; return at once."""
        if step == self._next_step:
            self._rows.begin()

    def batch(self, step: int) -> TaskBatch:
        """Return the global batch of an optimizer step.

        Raises:
            DataError: if a row of it cannot be trained on, the stream raises anything, or nothing comes in time.
            ConfigError: if the task's settings do not fit the rows.
        """
        if self._last is not None and self._last.step == step:
            # It may have been read, as a sample, before it was known whether rows may share.
            if self.shares_prefixes and self._last.trie is None:
                self._last = replace(self._last, trie=prefix_trie(self._last.sequences))
            return self._last
        found = -1
        while found != step:
            if step < self._next_step or found > step:
                # Left-out rows make it unknown where a step began, so going back reads from the start. A forced
                # interrupt between reading rows and counting them may also have lost some. Two readers would disturb
                # each other, as they share a file or the stream's epoch.
                self._rows.settle()
                self._read_from_start()
            # Each step on the way has its own time limit: seeking is no standstill.
            found, rows, self.report = self._rows.take()
            self._next_step = found + 1
        self._last = self._task_batch(step, rows)
        return self._last

    def _batches(self) -> Iterator[tuple[int, tuple[TokenSequence, ...], DataReport]]:
        """Yield each step with its rows and what happened to all rows up to there, without end."""
        reader: RowTokenizer | None = None
        step, sequences = 0, []
        for epoch in count():
            if hasattr(self.stream, "set_epoch"):
                self.stream.set_epoch(epoch)  # type: ignore[attr-defined]
            is_usable = False
            for index, row in enumerate(self.stream):
                reader = reader or self._open_rows(row)  # the first row decides the columns
                sequence = reader(row, index)
                if sequence is None:
                    continue
                is_usable = True
                sequences.append(sequence)
                if len(sequences) == self.batch_size:
                    # A copy, as the thread continues to count while the batch is trained on.
                    yield step, tuple(sequences), replace(reader.report)
                    step, sequences = step + 1, []
            if reader is None:
                raise DataError(f"{self.where}: got a stream without rows; allowed: at least one row.")
            if not is_usable:  # it would be read forever
                raise DataError(f"{self.where}: got a stream without usable rows; allowed: at least one.")
