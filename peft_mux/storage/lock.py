"""`FolderLock`: one process writes a run folder, and the system lets go of it when that process dies.

The lock is the operating system's, on an open file of the folder, so a killed process leaves none behind; the content
of the file only tells who holds it. Threads and trainers of one process exclude each other as processes do.
"""

from __future__ import annotations

import errno
import json
import os
import socket
import weakref
from contextlib import suppress
from pathlib import Path

from peft_mux.errors import CheckpointError
from peft_mux.storage.reading import require_regular

try:
    import fcntl
except ImportError:  # Windows has none; there a folder is not locked
    fcntl = None

LOCK_NAME = "run.lock"
_BUSY = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)
_FLAGS = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)


class FolderLock:
    """Keeps a run folder for one writer at a time.

    Args:
        root: the folder; made where it is absent, and removed again by `release` where nothing was put into it.

    Attributes:
        is_held: whether the folder is kept now.
    """

    def __init__(self, root: Path) -> None:
        """Keep nothing yet."""
        self.root = root
        self._descriptor: int | None = None
        self._made_root = False
        _locks.add(self)

    @property
    def is_held(self) -> bool:
        """Whether the folder is kept now."""
        return self._descriptor is not None

    def acquire(self) -> None:
        """Keep the folder, which nobody else may keep.

        Raises:
            CheckpointError: naming the folder, and the host and process that keep it; or why it cannot be written to.
        """
        assert not self.is_held, "kept once"
        try:
            self._made_root = not self.root.exists()
            self.root.mkdir(parents=True, exist_ok=True)
            while not self._try():
                pass
        except OSError as error:
            self.release()
            raise unwritable(self.root, error) from error

    def release(self) -> None:
        """Let others keep the folder; nothing happens where it is not kept."""
        if self._descriptor is not None:
            # While it is locked: whoever opens it from now on finds another file, and looks again.
            with suppress(OSError):  # one that is left over unlocked keeps nobody out
                (self.root / LOCK_NAME).unlink(missing_ok=True)
            self._close()
        if self._made_root:
            # Nothing was written, where what was asked for was refused; as a rule there is something in it.
            with suppress(OSError):
                self.root.rmdir()
            self._made_root = False

    def _try(self) -> bool:
        """Lock the file; return `False` where its holder has just removed it, so that another one has to be made."""
        path = self.root / LOCK_NAME
        self._descriptor = descriptor = os.open(path, _FLAGS, 0o644)
        try:
            require_regular(descriptor, path)
        except OSError:
            self._descriptor = None
            raise
        if fcntl is not None and not self._lock(descriptor):
            self._close()
            raise CheckpointError(
                f"output_dir: got {self.root}, in which {_holder(path)} trains; allowed: one trainer at a time in a run"
                " folder. Wait for its end, end it, or set another output_dir."
            )
        if not _is_same(descriptor, path):
            self._close()
            return False
        os.ftruncate(descriptor, 0)
        os.write(descriptor, json.dumps({"host": socket.gethostname(), "pid": os.getpid()}).encode())
        return True

    def _lock(self, descriptor: int) -> bool:
        assert fcntl is not None, "asked for only where there is one"
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _BUSY:
                return False
            # Some network file systems have no locks: to refuse to train there would cost more than it saves.
            if error.errno not in _NO_LOCKS:
                raise
        return True

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def keeper_of(root: Path) -> str:
    """Return in words who keeps a folder now, "" where nobody does; where there are no locks, who says so."""
    path = root / LOCK_NAME
    try:
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    except OSError:
        return ""
    try:
        if fcntl is not None:
            # Shared, and let go of at once: two who ask are no keepers of one another.
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return ""
        return _holder(path)
    except OSError:
        return _holder(path)
    finally:
        os.close(descriptor)


def unwritable(root: Path, error: OSError) -> CheckpointError:
    """Return the refusal of a folder that a run cannot write to."""
    return CheckpointError(
        f"output_dir: got {root}, which cannot be written to ({error}); allowed: a folder with room in which this"
        " process may write. Free space, change its permissions, or set another output_dir."
    )


def _holder(path: Path) -> str:
    """Return in words who holds a lock."""
    try:
        with path.open("rb") as file:
            value = json.loads(file.read(4096))
        return f"process {int(value['pid'])} on host {str(value['host'])!r}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "another process"  # it has not said yet, or its disk had no room for it


def _is_same(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


_locks: weakref.WeakSet[FolderLock] = weakref.WeakSet()


def _forget_in_child() -> None:
    """Close the copies that a forked process has, which would keep the folders when this process has died."""
    for lock in list(_locks):
        lock._close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
