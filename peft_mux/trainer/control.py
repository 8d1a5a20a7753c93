"""Requests of other programs to a run (`peft-mux pause | resume | remove | add`), as files in its folder.

    <folder>/control/<time>-<process>-<random>.request.json     written aside and renamed, so it is whole or absent
    <folder>/control/<the same>.answer.json

Each request has its own file, so any number of processes may write at once; names sort by time. `Mailbox` writes and
reads the files. `Control` is the thread of the run that looks into the folder twice a second and passes what it finds
to `Membership`, which carries it out between two steps, with several processes on all of them. The first process
answers.
"""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from peft_mux.errors import ConfigError, PeftMuxError, ProcessError
from peft_mux.storage import read_regular, write_file
from peft_mux.task import Task
from peft_mux.trainer.membership import Command, Membership
from peft_mux.trainer.run import Run
from peft_mux.user_code import describe_error

CONTROL_FOLDER = "control"
_REQUEST, _ANSWER = ".request.json", ".answer.json"
_MOST_BYTES = 2**20


class Mailbox:
    """The requests of one run folder.

    Args:
        root: the folder of the run.
    """

    def __init__(self, root: Path) -> None:
        """Make nothing yet."""
        self.folder = root / CONTROL_FOLDER

    def send(self, request: Mapping[str, Any]) -> str:
        """Write a request, plain JSON, and return its name.

        Raises:
            CheckpointError: if it cannot be written.
        """
        self.folder.mkdir(exist_ok=True)
        name = f"{time.time_ns():020d}-{os.getpid()}-{secrets.token_hex(4)}"
        write_file(self.folder / f"{name}{_REQUEST}", json.dumps(dict(request)).encode())
        return name

    def requests(self) -> list[tuple[str, dict[str, Any]]]:
        """Return all requests with their names, oldest first; one that cannot be read is empty."""
        if not self.folder.is_dir() or self.folder.is_symlink():
            return []
        names = sorted(path.name.removesuffix(_REQUEST) for path in self.folder.glob(f"*{_REQUEST}"))
        return [(name, _read(self.folder / f"{name}{_REQUEST}")) for name in names]

    def answer(self, name: str, value: Mapping[str, Any]) -> None:
        """Answer a request and delete it; a disk that takes nothing costs only the answer."""
        with suppress(Exception):
            write_file(self.folder / f"{name}{_ANSWER}", json.dumps(dict(value)).encode())
        self.withdraw(name)

    def wait(self, name: str, timeout_s: float, is_heard: Callable[[], object] = lambda: True) -> dict[str, Any] | None:
        """Return the answer to a request and delete it; `None` if none came in time.

        Args:
            name: name of the request.
            timeout_s: seconds to wait at most.
            is_heard: whether a run is still there that may answer; called again and again.
        """
        path, until = self.folder / f"{name}{_ANSWER}", time.monotonic() + timeout_s
        while not path.is_file():
            gives_up = time.monotonic() > until or not is_heard()
            # Looked for once more, as an answer may have come since.
            if gives_up and not path.is_file():
                return None
            time.sleep(0.05)
        found = _read(path)
        with suppress(OSError):
            path.unlink()
        return found

    def withdraw(self, name: str) -> bool:
        """Delete a request; return whether it was still there."""
        try:
            (self.folder / f"{name}{_REQUEST}").unlink()
        except OSError:
            return False
        return True


def _read(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _MOST_BYTES:
            return {}
        value = json.loads(read_regular(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


POLL_S = 0.5
"""Seconds between two looks into the folder."""
END_S = 5.0
"""Seconds that the end of a run waits for a request that is being read: the rows of an `add` may be slow to come."""


class Control:
    """Takes requests of other programs while a run trains.

    Args:
        run: the run under way, in whose folder the requests are.
        membership: carries them out.

    Attributes:
        read_tasks: reads the tasks of an `add` request from a file, by their names. `None` if the program that trains
            cannot read such files; then adding is refused.
    """

    def __init__(self, run: Run, membership: Membership) -> None:
        """Look at nothing yet."""
        self.read_tasks: Callable[[str, Sequence[str]], list[Task]] | None = None
        self._run, self._membership = run, membership
        self._mailbox = Mailbox(run.root)
        self._taken: set[str] = set()
        self._ended = threading.Event()

    @contextmanager
    def listening(self, *, is_alone: bool) -> Iterator[None]:
        """Take requests in the `with` block, in a thread.

        Args:
            is_alone: whether this is the only process; then requests that wait already are done before the first step.
                Several processes need not see them at the same time.
        """
        ended = self._ended = threading.Event()
        if is_alone:
            self.take()

        def listen() -> None:
            while not ended.wait(POLL_S):
                with suppress(OSError):  # a fault of the folder must not end the thread
                    self.take()

        thread = threading.Thread(target=listen, name="control", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(END_S)
            if thread.is_alive():
                self._run.log.warn("control: a request to add tasks still reads its rows; it is not done")

    def take(self) -> None:
        """Pass on what was asked for since the last look."""
        for name, request in self._mailbox.requests():
            if name in self._taken:
                continue
            self._taken.add(name)
            try:
                answer, done = self._give(request)
            except Exception as error:  # goes to the program that asks; no request ends a run
                self._answer(name, error, "")
                continue
            answer.add_done_callback(lambda own, name=name, done=done: self._answer(name, own.exception(0), done))

    def _give(self, request: dict[str, Any]) -> tuple[Command, str]:
        """Give a request to `Membership`; return the command, and what to say when it is done."""
        command, task = request.get("command"), request.get("task")
        if command in ("pause", "resume") and isinstance(task, str):
            is_paused = command == "pause"
            return self._membership.set_paused(task, is_paused), f"{task}: {'paused' if is_paused else 'goes on'}"
        if command == "remove" and isinstance(task, str):
            saves = request.get("save") is not False
            return self._membership.remove(task, save=saves), f"{task}: removed{'' if saves else ', not saved'}"
        if command != "add":
            raise ConfigError(
                f"control: got {command!r}; allowed: pause, resume, remove or add, with the name of a task."
            )
        if self.read_tasks is None:
            raise ConfigError(
                "control: got add for a run that was not started by peft-mux train; allowed: "
                "trainer.register_tasks([...]) in the program that trains."
            )
        names, ended = [str(name) for name in request.get("tasks") or ()], self._ended
        tasks = self.read_tasks(str(request.get("file")), names)
        if ended.is_set():  # reading has taken longer than the run
            raise ProcessError("control: the run has ended before the rows of these tasks were read.")
        # Without names, those are meant that the run does not have.
        tasks = [task for task in tasks if names or task.name not in self._run.table]
        if not tasks:
            raise ConfigError("control: got a file whose tasks are all part of the run; allowed: one with new tasks.")
        return self._membership.register(tasks), f"added: {', '.join(task.name for task in tasks)}"

    def _answer(self, name: str, error: BaseException | None, done: str) -> None:
        if not self._run.saver.is_writer:
            return
        if error is None:
            self._mailbox.answer(name, {"ok": True, "said": done, "run_step": self._run.state.global_step})
        else:
            text = str(error) if isinstance(error, PeftMuxError) else describe_error(error)
            self._mailbox.answer(name, {"ok": False, "said": text})
