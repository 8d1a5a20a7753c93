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
"""Seconds to wait at interpreter exit for threads that are still reading."""
_unfinished: set[Future[Any]] = set()


class ReadAhead(Generic[Item]):
    """Prefetches the next item of a user's iterator in a thread, with a timeout.

    Each item is read by its own daemon thread, so that no thread is left when a task or a run ends. A blocked thread
    cannot be stopped; it is abandoned, and its iterator is never read again.

    Args:
        items: the iterator; only one thread at a time reads it.
        where: the dataset, for messages, such as `tasks.sql.train_dataset`.
        timeout_s: seconds that `take` waits.

    Attributes:
        is_over: whether `take` has given up; an iterator that reads many rows for one item then stops, as they may have
            no end.
    """

    def __init__(self, items: Iterator[Item], *, where: str, timeout_s: float) -> None:
        self.where = where
        self.timeout_s = min(timeout_s, threading.TIMEOUT_MAX)  # no lock can wait longer
        self._items = items
        self._next: Future[Item] | None = None
        self.is_over = False

    def begin(self) -> None:
        """Start reading the next item in the background if it is not being read already."""
        if self._next is not None:
            return
        self._next = Future()
        thread = threading.Thread(
            target=_read, args=(self._items, self._next), name=f"peft_mux {self.where}", daemon=True
        )
        try:
            thread.start()
        except RuntimeError as error:  # the process cannot start another thread
            self._next.set_exception(error)

    def settle(self) -> None:
        """Wait until no thread is reading the iterator.

        Raises:
            DataError: if a thread is still reading it after the timeout.
        """
        if self._next is not None and not wait([self._next], self.timeout_s).done:
            self.is_over = True
            raise DataError(
                f"{self.where} must deliver all rows of a step within data_timeout_s, got no rows for "
                f"{self.timeout_s:g} s. Raise data_timeout_s, or make the stream faster."
            )

    def take(self) -> Item:
        """Return the next item, waiting for it if it has not been prefetched.

        Raises:
            DataError: if the iterator raises any exception, or returns no item in time.
            PeftMuxError: if our own code raises one while it reads, such as a `ConfigError`.
        """
        self.begin()
        self.settle()
        item, self._next = self._next, None
        assert item is not None, "started above"
        error = item.exception()
        if error is None:
            return item.result()
        if issubclass(type(error), PeftMuxError):
            raise error
        raise DataError(describe_error(error)) from error


def _read(items: Iterator[Item], future: Future[Item]) -> None:
    _unfinished.add(future)
    try:
        future.set_result(next(items))
    except BaseException as error:  # raised again in the waiting thread
        future.set_exception(error)
    finally:
        _unfinished.discard(future)


@atexit.register
def _wait_for_threads() -> None:
    """Wait for running threads: the interpreter may abort if it stops them in compiled code."""
    wait(list(_unfinished), _EXIT_S)


class StreamLoader(RowLoader):
    """Global batches of one task from a stream.

    Rows are read and tokenised in a thread. An exception of the stream, or a timeout, raises a `DataError` for this
    task only. Stepping forward is cheap. Going back beyond the last returned batch reads the stream again from its
    start, and so does resuming. When the stream ends, it is iterated again, after calling `set_epoch` if it has this
    method. The stream itself does any shuffling (`IterableDataset.shuffle`).

    Args:
        stream: an iterable of rows that can be iterated repeatedly.
        open_rows: returns the `RowTokenizer`, given the first row.
        where: the dataset, for messages: `tasks.sql.train_dataset`.
        timeout_s: maximum number of seconds to wait for the rows of a step.
        **settings: arguments of `RowLoader`.

    Attributes:
        report: what happened to the rows of all batches returned so far; `None` before the first one.
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
        """Return up to `num_rows` rows of the first global batch, cached to avoid reading the stream again."""
        if not self._sample:
            self._sample = self.batch(0).sequences
        return self._sample[:num_rows]

    def sample_batches(self, num_batches: int) -> list[TaskBatch]:
        """Return the first global batch, for plans; reading more would advance the stream."""
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
        """Start reading the global batch of a step in the background if it is the next one of the stream."""
        if step == self._next_step:
            self._rows.begin()

    def batch(self, step: int) -> TaskBatch:
        """Return the global batch of an optimizer step.

        Raises:
            DataError: if one of its rows cannot be trained on, the stream raises an exception, or reading times out.
            ConfigError: if the task's settings do not fit the rows.
        """
        if self._last is not None and self._last.step == step:
            # It may have been read as a sample, before `shares_prefixes` was set.
            if self.shares_prefixes and self._last.trie is None:
                self._last = replace(self._last, trie=prefix_trie(self._last.sequences))
            return self._last
        position = -1
        while position != step:
            if step < self._next_step or position > step:
                # Because rows may be dropped, the position at which a step begins is unknown, so going back reads from
                # the start. A forced interrupt between reading rows and counting them may also have lost some. The
                # current reader must finish first, because both would use the same file or epoch of the stream.
                self._rows.settle()
                self._read_from_start()
            # Each skipped step has its own time limit, so seeking does not time out while rows arrive.
            position, rows, self.report = self._rows.take()
            self._next_step = position + 1
        self._last = self._task_batch(step, rows)
        return self._last

    def _batches(self) -> Iterator[tuple[int, tuple[TokenSequence, ...], DataReport]]:
        """Yield each step with its rows and the report on all rows so far, without end."""
        reader: RowTokenizer | None = None
        ahead, step, sequences = self._rows, 0, []
        for epoch in count():
            is_usable = False
            for index, row in enumerate(self._rows_of_epoch(epoch)):
                reader = reader or self._open_rows(row)  # the first row determines the format
                sequence = reader(row, index)
                if ahead.is_over:
                    return
                if sequence is None:
                    continue
                is_usable = True
                sequences.append(sequence)
                if len(sequences) == self.batch_size:
                    # A copy, because the thread keeps counting while the batch is trained on.
                    yield step, tuple(sequences), replace(reader.report)
                    step, sequences = step + 1, []
            if reader is None:
                raise DataError(f"{self.where} must have at least one row, got a stream without rows.")
            if not is_usable:  # it would be read forever
                raise DataError(f"{self.where} must have at least one usable row, got a stream without any.")

    def _rows_of_epoch(self, epoch: int) -> Iterator[Any]:
        """Yield the rows of the stream; an error of ours that its own code raises is like any other of its errors."""
        try:
            if hasattr(self.stream, "set_epoch"):
                self.stream.set_epoch(epoch)  # type: ignore[attr-defined]
            yield from self.stream
        except PeftMuxError as error:
            raise DataError(describe_error(error)) from error
