"""`ReadAhead`: takes the items of a task's own iterator in a thread, one ahead, and waits for none of them for ever."""

# MERGED: `StreamLoader`: the global batches of a task whose rows come from a stream, in the stream's own order.

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import count
from typing import Any, Generic, NamedTuple, TypeVar

from peft_mux.data.dataset import DataReport, checked_row, data_report, num_target_tokens
from peft_mux.data.task_batch import Arrange, TaskBatch, TokenSequence, prefix_trie
from peft_mux.data.tokenize import RowTokenizer
from peft_mux.errors import DataError, PeftMuxError
from peft_mux.user_code import describe_error

Item = TypeVar("Item")

_EXIT_S = 2.0
"""Seconds that the end of the interpreter waits for threads that still read."""


class ReadAhead(Generic[Item]):
    """Takes items one after another, each in a daemon thread of its own.

    One thread an item, not one a stream: a thread ends with what it reads, so none is left when a task or a run ends.
    One that is blocked cannot be ended; it is abandoned, and never read from again.

    Args:
        items: where the items come from; only one thread at a time reads it.
        where: the dataset, for messages, such as `tasks.sql.train_dataset`.
        timeout_s: seconds that `take` waits.
    """

    def __init__(self, items: Iterator[Item], *, where: str, timeout_s: float) -> None:
        """Read nothing yet."""
        self.where = where
        # No lock can wait for longer.
        self.timeout_s = min(timeout_s, threading.TIMEOUT_MAX)
        self._items = items
        self._reading: _Reading[Item] | None = None

    def begin(self) -> None:
        """Begin to read the next item, unless that is under way; returns at once."""
        if self._reading is None:
            self._reading = _Reading(self._items, self.where)
            self._reading.begin()

    def settle(self) -> None:
        """Wait until nothing reads the iterator any more.

        Raises:
            DataError: if that is not so in time.
        """
        # Asked of the result, not of the thread, which needs a moment longer.
        if self._reading is not None and not self._reading.is_done.wait(self.timeout_s):
            raise DataError(
                f"{self.where}: got no rows for {self.timeout_s:g} s; allowed: those of a step within data_timeout_s. "
                "Raise data_timeout_s, or make the stream faster."
            )

    def take(self) -> Item:
        """Return the next item, read early or now.

        Raises:
            DataError: if the iterator raises anything at all, or gives nothing in time.
            PeftMuxError: what our own code raises while it reads, such as a `ConfigError`.
        """
        self.begin()
        self.settle()
        reading, self._reading = self._reading, None
        assert reading is not None, "begun above"
        return reading.result()


class _Reading(threading.Thread, Generic[Item]):
    """Reads one item.

    Args:
        items: where it comes from.
        where: the dataset, which the thread is named after.
    """

    def __init__(self, items: Iterator[Item], where: str) -> None:
        super().__init__(name=f"peft_mux {where}", daemon=True)
        self.is_done = threading.Event()
        self._items = items
        self._found: list[Item] = []
        self._error: BaseException | None = None

    def begin(self) -> None:
        """Start; where the process may have no more threads, that is the error to be kept."""
        try:
            self.start()
        except RuntimeError as error:
            self._error = error
            self.is_done.set()

    def run(self) -> None:
        """Read it; an error is kept for the thread that waits."""
        _under_way.add(self)
        try:
            self._found.append(next(self._items))
        except BaseException as error:
            self._error = error
        finally:
            _under_way.discard(self)
            self.is_done.set()

    def result(self) -> Item:
        """Return the item, or raise what came instead of it."""
        if self._error is None:
            return self._found[0]
        if isinstance(self._error, PeftMuxError):
            raise self._error
        raise DataError(describe_error(self._error)) from self._error


_under_way: set[_Reading] = set()


@atexit.register
def _wait_for_threads() -> None:
    """Let threads end what they read: where the interpreter stops them in compiled code, that may abort."""
    deadline = time.monotonic() + _EXIT_S
    for reading in list(_under_way):
        reading.is_done.wait(max(0.0, deadline - time.monotonic()))


_Opener = Callable[[Mapping[str, Any]], RowTokenizer]


class _Rows(NamedTuple):
    """The rows of a step.

    Attributes:
        step: index of the step.
        sequences: the tokenised rows of one step.
        report: what became of all rows up to here.
    """

    step: int
    sequences: tuple[TokenSequence, ...]
    report: DataReport


class StreamLoader:
    """Global batches of one task from a stream.

    Rows are read and tokenised in a thread, as they come: whatever the stream raises, and a stream that gives nothing
    in time, is a `DataError` of this task. Stepping forward is cheap; going back further than to the batch last given
    reads the stream again from its start, as resuming does. When the stream ends it is read anew, with `set_epoch`
    called where it has one. Shuffling is the stream's own affair (`IterableDataset.shuffle`).

    Args:
        stream: rows that can be iterated over again and again.
        open_rows: returns what turns rows into sequences, given the first row.
        where: the dataset, for messages: `tasks.sql.train_dataset`.
        task: name of the task.
        batch_size: number of rows of a global batch.
        seed: the task's seed, on which its dropout depends.
        timeout_s: seconds within which the rows of a step must come once they are waited for.
        arrange: makes the rows of a global batch of rows of the stream; `None` where they are the same.

    Attributes:
        report: what became of the rows of all batches given so far; `None` before the first one.
        shares_prefixes: whether what the sequences of a batch begin with alike may be computed once.
    """

    shares_prefixes = False

    steps_per_epoch: int | None = None

    def __init__(
        self,
        stream: Iterable[Any],
        open_rows: _Opener,
        *,
        where: str,
        task: str,
        batch_size: int,
        seed: int,
        timeout_s: float,
        arrange: Arrange | None = None,
    ) -> None:
        """Keep the stream, and read nothing of it yet."""
        self.stream = stream
        self.where = where
        self.task = task
        self.batch_size = batch_size
        self.seed = seed
        self.timeout_s = timeout_s
        self.arrange = arrange
        self.report: DataReport | None = None
        self._open_rows = open_rows
        self._rows = self._read_from_start()
        self._next_step = 0
        self._last: TaskBatch | None = None
        self._sample: tuple[TokenSequence, ...] = ()

    def sample(self, num_rows: int) -> tuple[TokenSequence, ...]:
        """Return at most so many rows of the first global batch; read once, as going back reads the stream anew."""
        if not self._sample:
            self._sample = self.batch(0).sequences
        return self._sample[:num_rows]

    def sample_batches(self, num_batches: int) -> list[TaskBatch]:
        """Return the first global batch, for plans; another one would move the stream."""
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
        """Begin to read the global batch of a step, where it is the next one of the stream; returns at once."""
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
        if step < self._next_step:
            self._restart()
        rows = self._next_rows()
        if rows.step > step:
            # A forced interrupt came between reading rows and counting them; whoever trains on must not miss these.
            self._restart()
            rows = self._next_rows()
        while rows.step < step:
            # Each step on the way has the time limit for itself: seeking is no standstill.
            rows = self._next_rows()
        arranged = rows.sequences if self.arrange is None else self.arrange(rows.sequences)
        trie = prefix_trie(arranged) if self.shares_prefixes else None
        self._last = TaskBatch(self.task, step, self.seed, arranged, trie=trie)
        self.report = rows.report
        return self._last

    def _next_rows(self) -> _Rows:
        rows = self._rows.take()
        self._next_step = rows.step + 1
        return rows

    def _restart(self) -> None:
        """Read from the start again: left-out rows make it unknown where a step began."""
        # Two readers would disturb each other, where they share a file or the stream's epoch.
        self._rows.settle()
        self._rows, self._next_step = self._read_from_start(), 0

    def _read_from_start(self) -> ReadAhead[_Rows]:
        return ReadAhead(self._batches(), where=self.where, timeout_s=self.timeout_s)

    def _batches(self) -> Iterator[_Rows]:
        """Yield the rows of one step after another, without end."""
        rows = _UsableRows(self.stream, self._open_rows, self.where)
        for step in count():
            sequences = tuple(next(rows.sequences) for _ in range(self.batch_size))
            # Taken here, as the thread goes on counting while the batch is trained on.
            yield _Rows(step, sequences, rows.report())


class _UsableRows:
    """Reads the rows of a stream that can be trained on, and counts what becomes of them.

    Args:
        stream: rows that can be iterated over again and again.
        open_rows: returns what turns rows into sequences, given the first row.
        where: the dataset, for messages.

    Attributes:
        sequences: the usable rows of the stream, epoch after epoch and without end.
    """

    def __init__(self, stream: Iterable[Any], open_rows: _Opener, where: str) -> None:
        """Read nothing yet."""
        self.sequences = self._tokenised()
        self._stream, self._open_rows, self._where = stream, open_rows, where
        self._row_tokenizer: RowTokenizer | None = None
        self._num_rows = self._num_kept = self._num_tokens = self._num_target_tokens = 0

    def report(self) -> DataReport:
        """Return what became of the rows up to here."""
        assert self._row_tokenizer is not None, "a row was read"
        return data_report(
            self._row_tokenizer,
            num_rows=self._num_rows,
            num_kept=self._num_kept,
            num_tokens=self._num_tokens,
            num_target_tokens=self._num_target_tokens,
        )

    def _tokenised(self) -> Iterator[TokenSequence]:
        epoch = 0
        while True:
            if hasattr(self._stream, "set_epoch"):
                self._stream.set_epoch(epoch)  # type: ignore[attr-defined]
            num_kept_before = self._num_kept
            for index, row in enumerate(self._stream):
                sequence = self._sequence(row, index)
                if sequence is not None:
                    self._num_kept += 1
                    self._num_tokens += len(sequence)
                    self._num_target_tokens += num_target_tokens(sequence)
                    yield sequence
            if self._num_rows == 0:
                raise DataError(f"{self._where}: got a stream without rows; allowed: at least one row.")
            # An unusable stream would be read for ever.
            if self._num_kept == num_kept_before:
                raise DataError(f"{self._where}: got a stream without usable rows; allowed: at least one.")
            epoch += 1

    def _sequence(self, row: Any, index: int) -> TokenSequence | None:
        """Return the sequence of a row, or `None` where it is left out."""
        row = checked_row(row, index, self._where)
        if self._row_tokenizer is None:
            # The first row tells the columns.
            self._row_tokenizer = self._open_rows(row)
        self._num_rows += 1
        return self._row_tokenizer(row, index)
