"""The files with which other programs send requests to a run: `peft-mux pause | resume | remove | add`.

    <folder>/control/<time>-<process>-<random>.request.json     written aside and renamed, so it is whole or absent
    <folder>/control/<the same>.answer.json

Each request has its own file, so any number of processes may write at once; names sort by time. This module imports
neither transformers nor PEFT, so commands that only ask or look start quickly.
"""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from peft_mux.errors import CheckpointError
from peft_mux.storage import read_regular, write_file

CONTROL_FOLDER = "control"
_REQUEST, _ANSWER = ".request.json", ".answer.json"
_MOST_BYTES = 2**20


class Mailbox:
    """The requests of one run folder.

    Args:
        root: the folder of the run.
    """

    def __init__(self, root: Path) -> None:
        self.folder = root / CONTROL_FOLDER

    def send(self, request: Mapping[str, Any]) -> str:
        """Write a request, plain JSON, and return its name.

        Raises:
            CheckpointError: if it cannot be written.
        """
        try:
            self.folder.mkdir(exist_ok=True)
        except OSError as error:  # something else stands there, or the folder is another user's
            raise CheckpointError(f"{self.folder}: no request can be left there ({error}).") from error
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
        """Answer a request and delete it; on a full disk only the answer is lost."""
        with suppress(Exception):
            write_file(self.folder / f"{name}{_ANSWER}", json.dumps(dict(value)).encode())
        self.withdraw(name)

    def wait(self, name: str, timeout_s: float, is_heard: Callable[[], object] = lambda: True) -> dict[str, Any] | None:
        """Return the answer to a request and delete it; `None` if none came in time.

        Args:
            name: name of the request.
            timeout_s: seconds to wait at most.
            is_heard: whether there is still a run that may answer; called repeatedly.
        """
        path, until = self.folder / f"{name}{_ANSWER}", time.monotonic() + timeout_s
        while not path.is_file():
            gives_up = time.monotonic() > until or not is_heard()
            # Looked for once more, as an answer may have come since.
            if gives_up and not path.is_file():
                return None
            time.sleep(0.05)
        answer = _read(path)
        with suppress(OSError):
            path.unlink()
        return answer

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
