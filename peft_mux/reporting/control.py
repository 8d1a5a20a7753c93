"""Requests from other programs to a run, read from its folder while it trains.

`Control` is the thread of the run that looks into the `Mailbox` twice a second and passes what it finds to
`Membership`, which carries it out between two steps, with several processes on all of them. The first process answers.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from peft_mux.errors import ConfigError, PeftMuxError, ProcessError
from peft_mux.reporting.mailbox import Mailbox
from peft_mux.task import Task
from peft_mux.trainer.membership import Command, Membership
from peft_mux.trainer.run import Run
from peft_mux.user_code import describe_error

POLL_S = 0.5
"""Seconds between two looks into the folder."""
END_S = 5.0
"""Seconds that the start and the end of a run wait for rows of an `add` that are being read."""


class Control:
    """Receives requests from other programs while a run trains.

    Args:
        run: the present run, whose folder has the requests.
        membership: carries them out.

    Attributes:
        read_tasks: reads the tasks of an `add` request from a file, by their names. `None` if the program that trains
            cannot read such files; then adding is refused.
    """

    def __init__(self, run: Run, membership: Membership) -> None:
        self.read_tasks: Callable[[str, Sequence[str]], list[Task]] | None = None
        self._run, self._membership = run, membership
        self._mailbox = Mailbox(run.root)
        self._taken: set[str] = set()
        self._readers: list[threading.Thread] = []
        self._ended = threading.Event()

    @contextmanager
    def listening(self, *, is_alone: bool) -> Iterator[None]:
        """Receive requests in the `with` block, in a thread; the rows of each `add` are read in a thread of their own.

        Args:
            is_alone: whether this is the only process; then waiting requests are carried out before the first step,
                unless their rows are slow to come. Several processes need not see them at the same time.
        """
        ended = self._ended = threading.Event()
        if is_alone:
            self.take()
            self._await_readers()

        def listen() -> None:
            while not ended.wait(POLL_S):
                with suppress(Exception):  # a fault of the folder must not end the thread
                    self.take()

        thread = threading.Thread(target=listen, name="control", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(END_S)
            self._await_readers()
            if self._readers:
                self._run.log.warn("control: a request to add tasks is still reading its rows; it was not carried out")

    def _await_readers(self) -> None:
        """Wait for rows that are being read, `END_S` at most; keep the threads that still read."""
        until = time.monotonic() + END_S
        for reader in self._readers:
            reader.join(max(0.0, until - time.monotonic()))
        self._readers = [reader for reader in self._readers if reader.is_alive()]

    def take(self) -> None:
        """Pass on the requests that came since the last look."""
        for name, request in self._mailbox.requests():
            if name in self._taken:
                continue
            self._taken.add(name)
            if request.get("command") == "add":
                reader = threading.Thread(target=self._carry, args=(name, request), name=f"control {name}", daemon=True)
                reader.start()
                self._readers.append(reader)
            else:
                self._carry(name, request)

    def _carry(self, name: str, request: dict[str, Any]) -> None:
        """Pass on one request; it is answered when it is done or refused."""
        try:
            answer, done = self._give(request)
        # Goes to the program that asks: neither a request nor code that reads rows ends a run or this thread.
        except BaseException as error:
            self._answer(name, error, "")
        else:
            answer.add_done_callback(lambda command: self._answer(name, command.exception(0), done))

    def _give(self, request: dict[str, Any]) -> tuple[Command, str]:
        """Give a request to `Membership`; return the command, and the answer for when it is done."""
        command, task = request.get("command"), request.get("task")
        if command in ("pause", "resume") and isinstance(task, str):
            is_paused = command == "pause"
            return self._membership.set_paused(task, is_paused), f"{task}: {'paused' if is_paused else 'resumed'}"
        if command == "remove" and isinstance(task, str):
            saves = request.get("save") is not False
            return self._membership.remove(task, save=saves), f"{task}: removed{'' if saves else ', not saved'}"
        if command != "add":
            raise ConfigError(
                f"control: a command must be pause, resume, remove or add, with the name of a task, got {command!r}."
            )
        if self.read_tasks is None:
            raise ConfigError(
                "control: add works for runs that peft-mux train started. Call trainer.register_tasks([...]) in the "
                "program that trains."
            )
        names, ended = [str(name) for name in request.get("tasks") or ()], self._ended
        tasks = self.read_tasks(str(request.get("file")), names)
        if ended.is_set():  # reading has taken longer than the run
            raise ProcessError("control: the run has ended before the rows of these tasks were read.")
        # Without names, all tasks that the run does not have yet.
        tasks = [task for task in tasks if names or task.name not in self._run.table]
        if not tasks:
            raise ConfigError("control: the file must have new tasks, got one whose tasks are all part of the run.")
        return self._membership.register(tasks), f"added: {', '.join(task.name for task in tasks)}"

    def _answer(self, name: str, error: BaseException | None, done: str) -> None:
        if not self._run.saver.is_writer:
            return
        if error is None:
            self._mailbox.answer(name, {"ok": True, "said": done, "run_step": self._run.state.global_step})
        else:
            text = str(error) if issubclass(type(error), PeftMuxError) else describe_error(error)
            self._mailbox.answer(name, {"ok": False, "said": text})
