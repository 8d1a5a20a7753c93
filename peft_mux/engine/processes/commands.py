"""`CommandQueue`: what other threads ask of a run, carried out by the one thread that owns it.

A run has one owner at a time: the thread that trains, or else whoever asks for something. Commands that are given while
it trains wait until the step in progress is over, so that no step sees half of a change.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, NamedTuple

from peft_mux.errors import ConfigError, ProcessError


class Answer(Future[Any]):
    """Tells when a command was done, or why it was not.

    Args:
        label: the command in words.
        is_owner: whether the calling thread is the one that carries commands out, which must not wait for itself.
    """

    def __init__(self, label: str, is_owner: Callable[[], bool]) -> None:
        """Wait for the command."""
        super().__init__()
        self._label, self._is_owner = label, is_owner

    def _check(self) -> None:
        if not self.done() and self._is_owner():
            raise ConfigError(
                f"{self._label}: got a wait for it in the thread that trains; allowed: done(), or add_done_callback(). "
                "It is done after the step in progress, which would wait for ever."
            )

    def result(self, timeout: float | None = None) -> Any:
        """Return what the command gave, once it is done.

        Args:
            timeout: seconds to wait at most; `None` for as long as it takes.

        Raises:
            ConfigError: in a callback, which runs in the thread that would have to carry the command out.
            TimeoutError: if it was not done in time.
        """
        self._check()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return why the command was not done, or `None`; as `result` otherwise."""
        self._check()
        return super().exception(timeout)


class Command(NamedTuple):
    """Something that was asked for.

    Attributes:
        label: what it is in words, such as `remove a`; equal commands of several processes have equal labels.
        action: does it; what it returns is the answer.
        answer: tells whoever asked when it was done, or why it was not.
        is_of_callback: whether a callback asked, which every process calls at the same step; other threads of several
            processes ask at any time.
    """

    label: str
    action: Callable[[], Any]
    answer: Answer
    is_of_callback: bool

    def carry_out(self) -> Exception | None:
        """Do it and answer; return what it raised, if anything."""
        try:
            result = self.action()
        except Exception as error:
            self.answer.set_exception(error)
            return error
        self.answer.set_result(result)
        return None


class CommandQueue:
    """Takes commands from any thread.

    Example:
        >>> queue = CommandQueue()
        >>> queue.give("count", lambda: 3).result()  # nobody trains, so it is done at once
        3
    """

    def __init__(self) -> None:
        """Start without an owner and without commands."""
        self._free = threading.Condition()
        self._owner: int | None = None
        self._trains = False
        self._commands: deque[Command] = deque()

    @property
    def labels(self) -> list[str]:
        """What other threads have asked for and waits to be done, in the order in which it was given."""
        with self._free:
            return [command.label for command in self._commands if not command.is_of_callback]

    @property
    def is_owner(self) -> bool:
        """Whether the calling thread is the one that carries commands out now."""
        return self._owner == threading.get_ident()

    def give(self, label: str, action: Callable[[], Any]) -> Answer:
        """Have something done: at the next step boundary while a run trains, else at once in the calling thread.

        Args:
            label: what it is in words, the same on every process that asks for the same.
            action: does it; what it returns becomes the result of the future.

        Returns:
            A future that tells when it was done, or why it was not. It is complete where nobody trains.

        Raises:
            Exception: what `action` raises, where nobody trains.
        """
        answer = Answer(label, lambda: self.is_owner)
        me = threading.get_ident()
        with self._free:
            self._free.wait_for(lambda: self._trains or self._owner in (None, me))
            if self._trains:
                self._commands.append(Command(label, action, answer, self.is_owner))
                return answer
            # A command that gives another one owns the run already.
            owner_before, self._owner = self._owner, me
        try:
            answer.set_result(action())
        finally:
            with self._free:
                self._owner = owner_before
                self._free.notify_all()
        return answer

    def ask(self, label: str, action: Callable[[], Any]) -> Any:
        """Return what an action gives: at once where the caller owns the run, else after the step in progress.

        Args:
            label: what it is in words, the same on every process that asks for the same.
            action: does what was asked for.
        """
        return action() if self.is_owner else self.give(label, action).result()

    @contextmanager
    def training(self, finish: Callable[[bool], bool]) -> Iterator[None]:
        """Let the calling thread own the run and train in the `with` block.

        Args:
            finish: carries out what still waits at the end. It is told whether the block has failed, and returns
                whether to call it again where something waits by then.

        Raises:
            ConfigError: if another thread trains.
        """
        me = threading.get_ident()
        with self._free:
            self._free.wait_for(lambda: self._trains or self._owner in (None, me))
            if self._trains:
                raise ConfigError("train: got a call while the run trains; allowed: one at a time. Wait for the other.")
            owner_before, self._owner, self._trains = self._owner, me, True
        failed = True
        try:
            yield
            failed = False
        finally:
            try:
                self._finish(finish, failed)
            finally:
                with self._free:
                    left, self._trains, self._owner = list(self._commands), False, owner_before
                    self._commands.clear()
                    self._free.notify_all()
                for command in left:
                    command.answer.set_exception(ProcessError(f"{command.label}: not done, as the run has ended."))

    def _finish(self, finish: Callable[[bool], bool], failed: bool) -> None:
        """Carry out what still waits, and what comes meanwhile; from then on commands are done at once."""
        while finish(failed):
            with self._free:
                # In one breath: a command between the question and the end would never be done.
                if not self._commands:
                    self._trains = False
                    return

    def take(self, labels: Sequence[str] | None = None) -> list[Command]:
        """Take commands out of the queue, to be carried out.

        Args:
            labels: which of those that other threads gave, in this order; by default all, in the order in which they
                were given.
        """
        with self._free:
            own = [command for command in self._commands if command.is_of_callback]
            if labels is None:
                own = list(self._commands)
            for label in labels or ():
                # The first of its label that is not taken yet: equal commands are done as often as they were given.
                own.append(next(one for one in self._commands if one.label == label and one not in own))
            for command in own:
                self._commands.remove(command)
            return own
