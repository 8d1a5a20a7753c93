"""`ReadAhead`: takes the items of a task's own iterator in a thread, one ahead, and waits for none of them for ever."""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Iterator
from typing import Generic, TypeVar

from peft_mux.errors import DataError, PeftMuxError
from peft_mux.own_code import describe_error

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
