"""`FolderUpload`: copies a run folder to object storage after each save, and back before a run resumes.

Any URL of fsspec works, such as `s3://bucket/runs/support`. The run itself needs a local folder, because object stores
have neither atomic renames nor locks. Records of states are copied after everything that they name, and old checkpoints
are deleted after that: an upload that is cut off leaves the states before it, and whatever is damaged is recognised by
its checksums.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec

from peft_mux import storage
from peft_mux.checkpoint.run_folder import STATE_FOLDER
from peft_mux.engine.tasks.active_task import ActiveTask
from peft_mux.errors import CheckpointError, ConfigError, shown
from peft_mux.log.callbacks import Observer

_RECORD = re.compile(rf"{STATE_FOLDER}/run-\d+\.json")
_STATE = re.compile(rf"{STATE_FOLDER}/|([^/]+/)?checkpoint-\d+/")
"""Files of states: those that are deleted when the run folder no longer has them."""
_LOCAL_ONLY = frozenset({storage.LOCK_NAME, storage.HOLDER_NAME, "control"})
"""Names in a run folder that only processes of this machine read."""


class FolderUpload(Observer):
    """The copy of a run folder under a URL.

    Args:
        url: a URL of fsspec.
        root: the run folder.
        warn: prints a line that must not be missed.
    """

    def __init__(self, url: str, root: Path, warn: Callable[[str], None]) -> None:
        self.url, self._root, self._warn = url, root, warn
        self._fs: Any = None
        self._path = ""
        self._sent: dict[str, tuple[int, int]] = {}  # size and time of what was copied, by name
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="peft_mux-upload")
        self._under_way: Future[None] | None = None

    def holds_run(self) -> bool:
        """Return whether there is a run under the URL.

        Raises:
            ConfigError: if the URL cannot be read.
        """
        try:
            return any(_RECORD.fullmatch(name) for name in self._names())
        except Exception as error:  # each file system has errors of its own
            said = " ".join(f"{type(error).__name__}: {error}".split())
            raise ConfigError(
                f"args.upload_to must be a URL of fsspec that this process can read and write, got {shown(self.url)} "
                f"({said}). Install its file system (pip install s3fs, gcsfs, adlfs, ...) and set its credentials."
            ) from error

    def fetch(self) -> None:
        """Copy the run under the URL into the run folder, which has no state of a run.

        Raises:
            CheckpointError: if it cannot be copied.
        """
        try:
            # Records last: without one, the copy is made again.
            for name in sorted(self._names(), key=lambda name: (bool(_RECORD.fullmatch(name)), name)):
                target = self._root / name
                target.parent.mkdir(parents=True, exist_ok=True)
                with storage.scratch_folder(target.parent) as scratch:
                    self._fs.get_file(f"{self._path}/{name}", str(scratch / "file"))
                    storage.replace_file(scratch / "file", target)
                self._sent[name] = _mark(target)
        except Exception as error:
            raise CheckpointError(
                f"args.upload_to: the run under {self.url} could not be copied to {self._root} "
                f"({type(error).__name__}: {error}). Resume again once it can be read."
            ) from error

    def on_saved(self, tasks: Sequence[ActiveTask] = ()) -> None:
        """Copy what has changed in the background, once the copy before it is done."""
        self.on_saving()
        self._under_way = self._worker.submit(self._copy)

    def on_close(self) -> None:
        """Copy what has changed, and wait for it."""
        self.on_saved()
        self.on_saving()

    def on_saving(self) -> None:
        """Wait for the copy that was started, and warn if it failed; the next one tries again."""
        if self._under_way is None:
            return
        error = self._under_way.exception()
        self._under_way = None
        if error is not None:
            self._warn(
                f"upload_to: the copy to {self.url} failed ({type(error).__name__}: {error}). The run folder "
                f"{self._root} is complete; the next save, if there is one, copies what is missing."
            )

    def _copy(self) -> None:
        self._connect()
        present = {str(path.relative_to(self._root).as_posix()): path for path in _files(self._root)}
        for name in sorted(present, key=lambda name: (bool(_RECORD.fullmatch(name)), name)):
            try:
                mark = _mark(present[name])
                if self._sent.get(name) == mark:
                    continue
                target = f"{self._path}/{name}"
                self._fs.makedirs(target.rpartition("/")[0], exist_ok=True)
                self._fs.put_file(str(present[name]), target)
            except FileNotFoundError:
                # A checkpoint of a task alone may be deleted meanwhile; records name none of these.
                if present[name].exists():
                    raise
                continue
            self._sent[name] = mark
        for name in [name for name in self._names() if _STATE.match(name) and name not in present]:
            self._fs.rm_file(f"{self._path}/{name}")
            self._sent.pop(name, None)

    def _connect(self) -> None:
        if self._fs is None:
            self._fs, path = fsspec.core.url_to_fs(self.url)
            self._path = path.rstrip("/")

    def _names(self) -> list[str]:
        """Return the names of all files under the URL, relative to it."""
        self._connect()
        self._fs.invalidate_cache()
        prefix = f"{self._path}/"
        names = [path[len(prefix) :] for path in self._fs.find(self._path) if path.startswith(prefix)]
        # Keys of object stores are plain text: "../x" would be written outside of the run folder.
        return [
            name for name in names if name and not {"..", "."} & set(PurePosixPath(name).parts) and "\\" not in name
        ]


def _files(root: Path) -> Iterator[Path]:
    """Yield the files of a run folder that are worth a copy; links and unfinished files are left out."""
    for entry in os.scandir(root):
        if entry.name.startswith(".") or entry.name in _LOCAL_ONLY:
            continue
        if entry.is_dir(follow_symlinks=False):
            yield from _files(Path(entry.path))
        elif entry.is_file(follow_symlinks=False):
            yield Path(entry.path)


def _mark(path: Path) -> tuple[int, int]:
    """Return the size of a file and the time of its last change, in nanoseconds."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns
