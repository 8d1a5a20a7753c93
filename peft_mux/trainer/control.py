"""`Mailbox`: requests to a run, and their answers, as files in its folder; any number of processes may write at once.

    <folder>/control/<time>-<process>-<random>.request.json     written aside and renamed, so it is whole or absent
    <folder>/control/<the same>.answer.json

Each request has a file of its own, so that no two of them meet; the order of their names is that of their times.
"""

# MERGED: `AdapterFiles`: adapters that are written or uploaded because somebody asks for them, not because a step is
# MERGED: due.
# MERGED: `Control`: what `peft-mux pause | resume | remove | add` ask of a run through its folder, done as any other
# MERGED: command.
# MERGED: A thread of each process looks into the folder twice a second and hands what it finds to `Membership`, which
# MERGED: carries it
# MERGED: out between two steps, where several processes train on all of them alike. The first process answers.

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

from peft_mux.checkpoint.hub import check_push, push_task
from peft_mux.checkpoint.run_folder import RunFolder
from peft_mux.errors import ConfigError, PeftMuxError, ProcessError
from peft_mux.storage import read_regular, write_file
from peft_mux.task import Task
from peft_mux.trainer.membership import Answer, Membership
from peft_mux.trainer.placement import Placement
from peft_mux.trainer.plan_follower import PlanFollower
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
        """Write a request, and return its name.

        Args:
            request: what is asked for, as plain JSON.

        Raises:
            CheckpointError: if it cannot be written.
        """
        self.folder.mkdir(exist_ok=True)
        name = f"{time.time_ns():020d}-{os.getpid()}-{secrets.token_hex(4)}"
        write_file(self.folder / f"{name}{_REQUEST}", json.dumps(dict(request)).encode())
        return name

    def requests(self) -> list[tuple[str, dict[str, Any]]]:
        """Return all requests with their names, oldest first; what cannot be read is an empty one."""
        if not self.folder.is_dir() or self.folder.is_symlink():
            return []
        names = sorted(path.name.removesuffix(_REQUEST) for path in self.folder.glob(f"*{_REQUEST}"))
        return [(name, _read(self.folder / f"{name}{_REQUEST}")) for name in names]

    def answer(self, name: str, value: Mapping[str, Any]) -> None:
        """Answer a request, and take it away; a disk that takes nothing costs the answer and nothing else.

        Args:
            name: its name.
            value: the answer, as plain JSON.
        """
        with suppress(Exception):
            write_file(self.folder / f"{name}{_ANSWER}", json.dumps(dict(value)).encode())
        with suppress(OSError):
            (self.folder / f"{name}{_REQUEST}").unlink()

    def wait(self, name: str, timeout_s: float, is_heard: Callable[[], object] = lambda: True) -> dict[str, Any] | None:
        """Return the answer to a request, and take it away; `None` where none came in time.

        Args:
            name: its name.
            timeout_s: seconds to wait at most.
            is_heard: whether there is still somebody who may answer; asked again and again.
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
        """Take a request back; return whether nobody had taken it up."""
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


class AdapterFiles:
    """Writes and uploads adapters as they are now, between two steps of a run.

    Args:
        run: the run.
        placement: the model of this process.
        plans: tells how a model that is not loaded yet is cut into stages.
        membership: knows the tasks, and when the run may be asked.
    """

    def __init__(self, run: Run, placement: Placement, plans: PlanFollower, membership: Membership) -> None:
        """Write nothing yet."""
        self._run, self._placement, self._plans, self._membership = run, placement, plans, membership

    def save(self, folder: str | Path | None = None) -> None:
        """Write every task's adapter, each at the root of its sub-folder, loadable by plain PEFT.

        Args:
            folder: where the sub-folders go; by default the run's own.
        """
        self._membership.queue.ask("save_model", lambda: self._save(Path(folder or self._run.root)))

    def _save(self, folder: Path) -> None:
        self._placement.materialise(self._plans.plan_stages)
        saver = self._run.saver
        for run in self._run.table:
            # On every process: where each holds a part of the adapter, the writer needs all of them.
            weights = saver.full_weights(run)
            if saver.is_writer:
                RunFolder(folder, self._placement.model).save_adapter(run.name, weights)

    def push(self, task: str, repo_id: str, options: Mapping[str, Any]) -> Any:
        """Upload one task's adapter with a model card, and return what the Hub says; `None` where others write.

        Args:
            task: name of the task.
            repo_id: repository on the Hub, such as "me/sql-lora"; made where absent.
            options: `token`, `private`, `revision` and `commit_message`, as `huggingface_hub` takes them.

        Raises:
            ConfigError: for a task that is not there or not trained, or where the Hub refuses.
        """
        run, saver = self._membership.run_of(task), self._run.saver
        check_push(run, repo_id, options)

        def push() -> Any:
            weights = saver.full_weights(run)  # on every process, though one of them writes
            if not saver.is_writer:
                return None
            own = {"folder": saver.place(run), "num_tasks": len(list(self._run.table))}
            return push_task(self._placement.model, run, weights, repo_id, options, **own)

        return self._membership.queue.ask(f"push_to_hub {task}", push)


POLL_S = 0.5
"""Seconds between two looks into the folder."""
END_S = 5.0
"""Seconds that the end of a run waits for a request that is being read: the rows of an `add` may be slow to come."""


class Control:
    """Takes requests of other processes while a run trains.

    Args:
        run: the run under way, in whose folder the requests lie.
        membership: carries them out.

    Attributes:
        read_tasks: reads the tasks of a request to add some: a file, and which of its tasks. `None` where the program
            that trains cannot read such files; then adding is refused.
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
        thread = threading.Thread(target=self._listen, args=(ended,), name="control", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(END_S)
            if thread.is_alive():
                self._run.log.warn("control: a request to add tasks still reads its rows; it is not done")

    def _listen(self, ended: threading.Event) -> None:
        while not ended.wait(POLL_S):
            # What the folder is made of is no reason to hear nobody any more.
            with suppress(OSError):
                self.take()

    def take(self) -> None:
        """Hand on what was asked for since the last look."""
        for name, request in self._mailbox.requests():
            if name in self._taken:
                continue
            self._taken.add(name)
            try:
                answer, done = self._give(request)
            # Whoever asks is told; nothing that was asked for ends a run.
            except Exception as error:
                self._answer(name, error, "")
                continue
            answer.add_done_callback(lambda own, name=name, done=done: self._answer(name, own.exception(0), done))

    def _give(self, request: dict[str, Any]) -> tuple[Answer, str]:
        """Ask `Membership` for what a request says; return its answer, and what to say when it is done."""
        command, task = request.get("command"), request.get("task")
        if command == "add":
            return self._add(request)
        if command not in ("pause", "resume", "remove") or not isinstance(task, str):
            raise ConfigError(
                f"control: got {command!r}; allowed: pause, resume, remove or add, with the name of a task."
            )
        if command == "remove":
            saves = request.get("save") is not False
            return self._membership.remove(task, save=saves), f"{task}: removed{'' if saves else ', not saved'}"
        if command == "pause":
            return self._membership.pause(task), f"{task}: paused"
        return self._membership.resume(task), f"{task}: goes on"

    def _add(self, request: dict[str, Any]) -> tuple[Answer, str]:
        if self.read_tasks is None:
            raise ConfigError(
                "control: got add for a run that was not started by peft-mux train; allowed: "
                "trainer.register_tasks([...]) in the program that trains."
            )
        names, ended = [str(name) for name in request.get("tasks") or ()], self._ended
        tasks = self.read_tasks(str(request.get("file")), names)
        if ended.is_set():  # reading has taken longer than the run
            raise ProcessError("control: the run has ended before the rows of these tasks were read.")
        # Unless they are named, those are meant that the run does not have.
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
            told = str(error) if isinstance(error, PeftMuxError) else describe_error(error)
            self._mailbox.answer(name, {"ok": False, "said": told})
