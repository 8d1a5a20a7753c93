"""Files on disk that are either whole or absent, even after a crash while they are written.

* **Folders** (`write_folder`) are filled under a temporary name on the same file system. A manifest with the size and
  SHA-256 of each file is written last, everything is flushed to disk, and the folder is renamed into place. An older
  folder of that name is moved aside first; if the process dies in between, `remove_stale` moves it back. safetensors
  has no checksum, so `verify_folder` checks integrity. The manifest carries its own digest (`sealed_json`).
* **Files** (`write_file`) are written under a temporary name, flushed, and renamed.
* **Adapters** stay plain PEFT adapters, in a folder that also holds checkpoints and files of the user. Checksums of the
  adapter's two files lie next to them, as sealed JSON (`write_checksums`).
* **Locks** (`FolderLock`): one process writes a run folder. The operating system releases the lock when it dies.
* **States** are safetensors and JSON, never pickle; equal content gives equal bytes (`pack_state`, `save_tensors`).
* **Names** of tasks become folder names, so they are restricted to what every file system accepts.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout
from safetensors import SafetensorError

from peft_mux.errors import CheckpointError, Fault, raise_faults, shown

if TYPE_CHECKING:  # commands that only look at a run import this module, and must not wait for torch
    import torch

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

# ---------------------------------------------------------------- names of tasks

NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")
RESERVED_NAMES = frozenset(
    "run state control plan metrics report config environment tmp con prn aux nul".split()
    + [f"com{port}" for port in range(10)]
    + [f"lpt{port}" for port in range(10)]
)
"""Names that the run folder uses itself, and device names of Windows; compared case-folded."""


def check_task_names(names: Iterable[str], taken: Iterable[str] = ()) -> None:
    """Refuse names that differ only in case from each other or from those already taken.

    Raises:
        ConfigError: naming each duplicate.
    """
    # Windows and macOS fold the case of folder names.
    faults, seen = [], {name.casefold(): name for name in taken}
    for name in names:
        if name.casefold() in seen:
            faults.append(
                Fault(
                    f"tasks.{name}.name",
                    f'"{name}" and "{seen[name.casefold()]}"',
                    "different from other names in more than case (names become folders)",
                    "Rename one of them.",
                )
            )
        seen[name.casefold()] = name
    raise_faults(faults)


def name_fault(name: object, where: str = "task.name") -> Fault | None:
    """Return what is wrong with a task's name, or `None`; `where` is the path of the field for the message."""
    allowed = "1 to 64 letters, digits, '_' and '-', beginning with a letter or digit (it becomes a folder)"
    if not isinstance(name, str):
        return Fault(where, f"{shown(name)} ({type(name).__name__})", allowed)
    got = repr(name) if len(name) <= 80 else f"a name of {len(name)} characters"
    if not NAME_PATTERN.fullmatch(name):
        return Fault(where, got, allowed)
    if name.casefold() in RESERVED_NAMES:
        return Fault(where, got, f"any name except {', '.join(sorted(RESERVED_NAMES))} (reserved)")
    return None


def safe_child(root: Path, name: str) -> Path:
    """Return the folder of a task under `root`.

    Raises:
        CheckpointError: if the name is not a valid task name, or the folder is a link or leads outside of `root`.
    """
    fault = name_fault(name, "task")
    if fault is not None:
        raise CheckpointError(str(fault))
    child = root / name
    # Compared after links are resolved: a link defeats a comparison of the names alone.
    base, real = os.path.realpath(root), os.path.realpath(child)
    if child.is_symlink() or os.path.commonpath((base, real)) != base or real == base:
        raise CheckpointError(
            f'task "{name}" must have its folder inside {base}, got {child}, which leads to {real}. Remove the link.'
        )
    return child


# ---------------------------------------------------------------- reading and checking

MANIFEST_NAME = "manifest.json"
CHECKSUMS_NAME = "adapter_checksums.json"
_NUMBERED = re.compile(r"checkpoint-(0|[1-9][0-9]*)")


def read_regular(path: Path) -> bytes:
    """Return the content of a regular file; a pipe, which would block the reader, is refused.

    Raises:
        OSError: if the file cannot be read, or is not a regular file.
    """
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is not a regular file")
    return path.read_bytes()


def digest_file(path: Path) -> tuple[int, str]:
    """Return the size in bytes and the SHA-256 of a regular file.

    Raises:
        OSError: if the file cannot be read, or is not a regular file.
    """
    if path.exists() and not path.is_file():
        raise OSError(f"{path} is not a regular file")
    digest, size_bytes = hashlib.sha256(), 0
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
            size_bytes += len(block)
    return size_bytes, digest.hexdigest()


def sealed_json(value: Any) -> bytes:
    """Return JSON that carries a digest of itself."""
    # The digest is that of the exact bytes of the body, independent of how a reader parses numbers and keys.
    body = json.dumps(value, sort_keys=True)
    return json.dumps({"sha256": hashlib.sha256(body.encode()).hexdigest(), "body": body}).encode()


def unsealed_json(path: Path) -> Any:
    """Return the value that `sealed_json` wrapped.

    Raises:
        CheckpointError: if the file is missing, torn or changed.
    """
    try:
        # Compared as bytes: JSON has several spellings of one value, and any except ours is a change.
        raw = read_regular(path)
        value = json.loads(json.loads(raw)["body"])
        is_intact = raw == sealed_json(value)
    # A file that was grown to any size is too large to read.
    except (OSError, MemoryError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({str(error) or type(error).__name__}).") from error
    if not is_intact:
        raise CheckpointError(f"{path} was changed since it was written.")
    return value


def make_manifest(folder: Path, facts: Mapping[str, Any]) -> bytes:
    """Return the manifest of the files in a folder; `facts` say what the folder is, such as its task and step."""
    files = {path.name: list(digest_file(path)) for path in sorted(folder.iterdir()) if path.name != MANIFEST_NAME}
    return sealed_json({"facts": dict(facts), "files": files})


def verify_folder(folder: Path, *, expect: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Check every file of a folder against its manifest, and the facts in it against those expected; return the facts.

    Raises:
        CheckpointError: naming the file that is missing, extra or changed, or the fact that differs.
    """
    path = folder / MANIFEST_NAME
    value = unsealed_json(path)
    try:
        facts, files = dict(value["facts"]), {name: (size, digest) for name, (size, digest) in value["files"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path} is not an intact manifest ({error!r}).") from error
    for key, wanted in (expect or {}).items():
        if facts.get(key) != wanted:
            raise CheckpointError(f"{folder} must have {key} {wanted!r}, got {facts.get(key)!r}.")
    present = {path.name for path in listed(folder)} - {MANIFEST_NAME}
    for odd in sorted(present ^ files.keys()):
        state = "extra" if odd in present else "missing"
        raise CheckpointError(f"{folder / odd} is {state}; the folder must have exactly the files of its manifest.")
    for name, wanted in files.items():
        # A link is refused even if its content is right: its target may change later.
        if (folder / name).is_symlink() or not _is_unchanged(folder / name, wanted):
            raise CheckpointError(f"{folder / name} was changed since it was written.")
    return facts


def _is_unchanged(path: Path, wanted: tuple[int, str]) -> bool:
    """Return whether a file has the size in bytes and the SHA-256 that it should have.

    Raises:
        CheckpointError: if it cannot be read.
    """
    try:
        # Sizes are compared first, because a file that was grown may take hours to read.
        return path.stat().st_size == wanted[0] and digest_file(path) == wanted
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error}).") from error


def write_checksums(folder: Path, names: Sequence[str]) -> None:
    """Write the sizes and digests of some files of a folder into a file next to them.

    Raises:
        CheckpointError: if a file cannot be read, or the checksums cannot be written.
    """
    path = folder / CHECKSUMS_NAME
    try:
        content = sealed_json({"files": {name: list(digest_file(folder / name)) for name in sorted(names)}})
        # Unlinked first, so that no link is followed. Not flushed: callers that need that rename the file into place.
        path.unlink(missing_ok=True)
        path.write_bytes(content)
    except OSError as error:
        raise CheckpointError(f"{path}: could not be written ({error}).") from error


def verify_checksums(folder: Path, names: Sequence[str]) -> None:
    """Check files of a folder against the checksums next to them.

    Raises:
        CheckpointError: naming the file that is missing or changed, or checksums that cannot be read.
    """
    path = folder / CHECKSUMS_NAME
    value = unsealed_json(path)
    try:
        wanted = {name: tuple(value["files"][name]) for name in names}
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path} has no checksums of {', '.join(names)}.") from error
    for name in names:
        if not _is_unchanged(folder / name, wanted[name]):
            raise CheckpointError(
                f"{folder / name} was changed since it was written: it does not match {CHECKSUMS_NAME} next to it. "
                "Resume the run, which restores it from a checkpoint, or delete the checksums if the change was "
                "intended."
            )


def listed(folder: Path) -> list[Path]:
    """Return what a folder holds, sorted by name; nothing if it does not exist.

    Raises:
        CheckpointError: if it cannot be read, as when the process has too many open files.
    """
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be read ({error}).") from error


def numbered_folders(parent: Path) -> list[int]:
    """Return the numbers of the `checkpoint-<number>` folders that have a manifest, ascending; intact or not.

    Raises:
        CheckpointError: if the folder cannot be read.
    """
    numbers = []
    for path in listed(parent):
        match = _NUMBERED.fullmatch(path.name)
        if match and os.path.isfile(path / MANIFEST_NAME):
            numbers.append(int(match.group(1)))
    return sorted(numbers)


# ---------------------------------------------------------------- writing

CRASHPOINTS = (
    "before_fill",
    "after_fill",
    "after_manifest",
    "after_fsync",
    "after_move_aside",
    "after_rename",
    "after_cleanup",
)
"""Places in `write_folder` where a test can kill the process, to prove that a crash there loses nothing."""
_times_passed: dict[str, int] = {}
_FIX = "Free space on its disk, or make the folder writable."


def crashpoint(name: str) -> None:
    """Kill the process if `PEFT_MUX_CRASHPOINT` is `name`, or `name:count` and this is the count-th time."""
    target, _, count = os.environ.get("PEFT_MUX_CRASHPOINT", "").partition(":")
    if target == name:
        _times_passed[name] = _times_passed.get(name, 0) + 1
        if _times_passed[name] == int(count or 1):
            # SIGKILL instead of an exception: as in a power cut, no further code may run.
            os.kill(os.getpid(), signal.SIGKILL)


def write_folder(final: Path, fill: Callable[[Path], None], *, facts: Mapping[str, Any]) -> None:
    """Write a folder whole or not at all; it replaces an older one.

    Args:
        final: the folder to write.
        fill: writes the files into the folder that it is given.
        facts: what the folder is, such as its task and step, for the manifest.

    Raises:
        CheckpointError: if writing failed; the old content is then unchanged.
    """
    try:
        with scratch_folder(final.parent) as scratch:
            crashpoint("before_fill")
            fill(scratch)
            crashpoint("after_fill")
            # Written last, so that a folder with a manifest is complete.
            (scratch / MANIFEST_NAME).write_bytes(make_manifest(scratch, facts))
            crashpoint("after_manifest")
            # Before the rename: a file system may write the new name before the content, and a power cut would leave
            # empty files.
            for path in (*scratch.iterdir(), scratch):
                _flush(path)
            crashpoint("after_fsync")
            # Two renames, because no portable call exchanges two folders. `remove_stale` repairs a crash between them.
            aside = final.parent / f".old-{final.name}-{uuid.uuid4().hex}"
            is_replaced = final.exists() or final.is_symlink()
            if is_replaced:
                os.rename(final, aside)
                crashpoint("after_move_aside")
            try:
                os.rename(scratch, final)
            except OSError:
                if is_replaced:
                    os.rename(aside, final)
                raise
            crashpoint("after_rename")
            # The old folder is deleted only when the new name is safe on disk.
            _flush(final.parent)
            if is_replaced:
                _delete(aside)
            crashpoint("after_cleanup")
    except OSError as error:
        raise CheckpointError(
            f"{final}: could not be written ({error}); the previous content is unchanged. {_FIX}"
        ) from error


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """Make a folder under a temporary name in `parent`, and remove it afterwards unless it was renamed."""
    scratch = parent / f".tmp-{uuid.uuid4().hex}"
    scratch.mkdir(parents=True)
    try:
        yield scratch
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def write_file(path: Path, content: bytes) -> None:
    """Write a file whole or not at all; a link of that name is replaced, not followed.

    Raises:
        CheckpointError: if writing failed; the old content is then unchanged.
    """
    scratch = path.parent / f".tmp-{uuid.uuid4().hex}"
    try:
        scratch.write_bytes(content)
        replace_file(scratch, path)
    except OSError as error:
        raise CheckpointError(
            f"{path}: could not be written ({error}); the previous content is unchanged. {_FIX}"
        ) from error
    finally:
        with suppress(OSError):
            scratch.unlink(missing_ok=True)


def replace_file(source: Path, target: Path) -> None:
    """Move a finished file to `target` on the same file system, whole or not at all; a link there is replaced.

    Raises:
        OSError: if that failed; the old content is then unchanged.
    """
    # Flushed in this order: the content, then the folder that holds its new name.
    _flush(source)
    os.replace(source, target)
    _flush(target.parent)


def append_line(path: Path, line: str) -> None:
    """Append one line to a file, whole or not at all, and hand it to the operating system at once.

    Raises:
        OSError: if that failed, as on a full disk, or if a link or a pipe stands there.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    descriptor = os.open(path, flags, 0o644)
    try:
        size_bytes = os.fstat(descriptor).st_size
        rest = memoryview(f"{line}\n".encode())
        try:
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        except OSError:
            # Half a line would make the next one unreadable too. Truncating works on a full disk.
            os.ftruncate(descriptor, size_bytes)
            raise
    finally:
        os.close(descriptor)


def remove_stale(parent: Path) -> None:
    """Clean up after a crash: delete unfinished writes, and move back what was moved aside and not replaced."""
    for path in sorted(parent.iterdir()):
        # Only names that this module makes: anything else belongs to the user.
        if match := re.fullmatch(r"\.old-(.+)-[0-9a-f]{32}", path.name):
            final = parent / match[1]
            if final.exists():
                _delete(path)
            else:
                os.rename(path, final)
        elif re.fullmatch(r"\.tmp-[0-9a-f]{32}", path.name):
            _delete(path)


def prune(parent: Path, *, keep: int, protect: set[Path] = frozenset()) -> list[Path]:  # type: ignore[assignment]
    """Delete all but the newest `keep` intact checkpoints of a folder; return the folders that were deleted.

    The order is by number, never by time. At least one intact checkpoint and all `protect`ed ones stay. A folder
    without a manifest is not ours and stays too.
    """
    num_kept, deleted = 0, []
    for number in reversed(numbered_folders(parent)):
        folder = parent / f"checkpoint-{number}"
        is_wanted = num_kept < max(keep, 1)
        if folder in protect or is_wanted:
            # Only intact ones count, so that `keep` of those stay.
            with suppress(CheckpointError):
                verify_folder(folder)
                num_kept += 1
        if folder not in protect and not is_wanted:
            _delete(folder)
            deleted.append(folder)
    return deleted


def _delete(path: Path) -> None:
    """Delete a file, a pipe, a folder or a link; the target of a link stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _flush(path: Path) -> None:
    """Force a file, or the entries of a folder, to disk; without the latter a power cut may undo a rename."""
    # Windows cannot open folders.
    if hasattr(os, "O_DIRECTORY") or not path.is_dir():
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


# ---------------------------------------------------------------- one writer per run folder

LOCK_NAME = "run.lock"
HOLDER_NAME = "run.lock.json"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)
_MOST_ASKING_S = 10.0
"""Seconds for which processes that only ask who trains may keep a trainer from the lock (the system may suspend
them)."""


class FolderLock:
    """Reserves a run folder for one writer at a time, across processes and within one process.

    Args:
        root: the folder. `acquire` creates it if needed, and `release` removes it again if it is still empty.
        loading: what the process loads before it trains, for processes that ask: "data" or "model".
        setting: the setting that names the folder, for messages.

    Attributes:
        is_held: whether this object holds the lock now.
    """

    def __init__(self, root: Path, loading: str = "", setting: str = "output_dir") -> None:
        self.root, self.is_held, self._loading, self._setting = root, False, loading, setting
        self._lock: FileLock | None = None
        self._made_root = False
        self._pid: int | None = None
        self._file: os.stat_result | None = None

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            CheckpointError: naming the folder and the host and process that hold the lock, or why the folder is not
                writable.
        """
        assert not self.is_held, "acquired once"
        self._pid = os.getpid()
        try:
            self._made_root |= not self.root.exists()
            self.root.mkdir(parents=True, exist_ok=True)
            # Made here, as filelock does not take a lock in a forked process that was made before the fork.
            # No soft lock in place of a missing one: after a crash it would stay.
            self._lock = FileLock(self.root / LOCK_NAME, thread_local=False, fallback_to_soft=False)
            until = time.monotonic() + _MOST_ASKING_S
            try:
                while True:
                    with suppress(Timeout):
                        self._lock.acquire(timeout=0.1, poll_interval=0.02)
                        break
                    # If no process trains, others may hold it for a moment, to ask: `keeper_of`.
                    holder = keeper_of(self.root)
                    if holder or time.monotonic() > until:
                        raise CheckpointError(
                            f"{self.root} must have one writer at a time, got {holder or 'another process'} there. "
                            "Wait for its end, end it, or give another folder."
                        )
            except OSError as error:
                # Some network file systems have no locks; refusing to train there would cost more than it saves.
                if error.errno not in _NO_LOCKS:
                    raise
            self.is_held = True
            with suppress(OSError):
                self._file = os.stat(self.root / LOCK_NAME)
            # In a file of its own: processes that try to take the lock may truncate the lock file.
            self.note_loading(self._loading)
        except (CheckpointError, OSError, RuntimeError) as error:  # filelock raises the last two
            self.release()
            if isinstance(error, CheckpointError) and error.__cause__ is None:  # another trainer holds the lock
                raise
            raise unwritable(self.root, error.__cause__ or error, self._setting) from error

    def renew(self) -> None:
        """Take the lock again if its file is gone or another one, as when temporary files were cleaned away.

        Raises:
            CheckpointError: if another trainer has taken the folder meanwhile.
        """
        if self._lock is None or not self._is_lost():
            return
        self._lock.release()
        self.is_held = False
        try:
            self.acquire()
        except CheckpointError:
            if keeper_of(self.root):
                raise
            self.is_held = True  # the disk fails, which ends no run

    def note_loading(self, loading: str) -> None:
        """Say what the process that holds the lock loads now: "data", "model", or "" when it trains.

        Raises:
            CheckpointError: if it cannot be written.
        """
        holder = {"host": socket.gethostname(), "pid": self._pid, "loading": loading}
        write_file(self.root / HOLDER_NAME, json.dumps(holder).encode())

    def _is_lost(self) -> bool:
        try:
            return self._file is not None and not os.path.samestat(os.stat(self.root / LOCK_NAME), self._file)
        except OSError as error:  # any other means that the disk fails
            return isinstance(error, FileNotFoundError)

    def release(self) -> None:
        """Release the lock if this process holds it; a process forked from the holder changes nothing."""
        if self._pid != os.getpid():
            return
        if self._lock is not None and self.is_held:
            # Before the release: a process that opens the file from now on finds another one, and filelock tries again.
            for name in () if self._is_lost() else (HOLDER_NAME, LOCK_NAME):
                with suppress(OSError):  # a file that is left over unlocked is harmless
                    (self.root / name).unlink(missing_ok=True)
            self._lock.release()
            self.is_held = False
        if self._made_root:
            self._made_root = False
            with suppress(OSError):  # it is not empty
                self.root.rmdir()


def keeper_of(root: Path) -> str:
    """Return in words which process holds the lock of a run folder now; "" for none."""
    path = root / LOCK_NAME
    if not path.is_file():
        return ""
    try:
        with path.open("rb") as file:
            if fcntl is not None:
                # Shared, and released at once, so that two processes that ask do not see each other.
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return ""
    except OSError:
        pass  # held; or locks are not supported, and the file below is all that is known
    pid, host, _ = _holder(root)
    return f"process {pid} on host {host!r}" if host else "another process"


def loading_of(root: Path) -> str:
    """Return what the process that keeps a run folder loads, "data" or "model"; "" if it trains, or it is unknown."""
    return _holder(root)[2]


def _holder(root: Path) -> tuple[int, str, str]:
    """Return id and host of the process that holds a lock and what it loads; "" where it has not written that."""
    try:
        holder = json.loads(read_regular(root / HOLDER_NAME))
        loading = holder["loading"] if holder["loading"] in ("data", "model") else ""
        return int(holder["pid"]), str(holder["host"]), loading
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return 0, "", ""


def unwritable(root: Path, error: BaseException, setting: str = "output_dir") -> CheckpointError:
    """Return the refusal of a folder that cannot be written to; `setting` names it."""
    return CheckpointError(
        f"{setting} must be a folder with free space in which this process may write, got {root} ({error}). Free "
        f"space, change its permissions, or set another {setting}."
    )


# ---------------------------------------------------------------- tensors and states

_TENSOR, _TUPLE, _MAP, _FLOAT = "__tensor__", "__tuple__", "__map__", "__float__"


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors to a file; views of one storage are written separately.

    Raises:
        CheckpointError: if the file cannot be written.
    """
    from safetensors.torch import save_file

    # Cloned, because safetensors refuses tensors that share memory, as the parameters of a page do. Sorted, so that
    # equal content gives equal bytes.
    copies = {name: tensors[name].detach().cpu().clone().contiguous() for name in sorted(tensors)}
    try:
        save_file(copies, path, metadata={"format": "pt"})
    except SafetensorError as error:  # also for a full disk
        raise CheckpointError(f"{path}: could not be written ({error}).") from error


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file.

    Raises:
        CheckpointError: if the file cannot be read.
    """
    from safetensors.torch import load

    try:
        return load(read_regular(path))  # load_file leaks two objects a tensor (safetensors 0.8.0)
    # A crafted header makes torch raise several kinds of errors.
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(f"{path} is not an intact safetensors file ({error}).") from error


def pack_state(state: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Split a `state_dict()` into tensors by running name, and a JSON tree that refers to them.

    Args:
        state: nested dicts (string or integer keys), lists, tuples, tensors, numbers, strings and `None`.

    Raises:
        CheckpointError: naming the place of anything else.
    """
    import torch

    tensors: dict[str, torch.Tensor] = {}

    def pack(value: Any, path: str) -> Any:
        if isinstance(value, torch.Tensor):
            # Padded with zeros, so that sorted names are in the order of the tree.
            name = str(len(tensors)).zfill(8)
            tensors[name] = value
            return {_TENSOR: name}
        if isinstance(value, float):
            # Hexadecimal is exact, and has inf and nan, which JSON does not.
            return {_FLOAT: value.hex()}
        if value is None or type(value) in (bool, int, str):
            return value
        if isinstance(value, Mapping):
            if not all(type(key) in (str, int) for key in value):
                raise CheckpointError(f"{path}: keys must be strings or integers.")
            return {_MAP: [[key, pack(item, f"{path}.{key}")] for key, item in value.items()]}
        # By exact type: a subclass, such as a named tuple, would come back as something else.
        if type(value) is tuple:
            return {_TUPLE: [pack(item, f"{path}[{index}]") for index, item in enumerate(value)]}
        if type(value) is list:
            return [pack(item, f"{path}[{index}]") for index, item in enumerate(value)]
        raise CheckpointError(
            f"{path} must have tensors, numbers, strings, None, and nestings of them, got a {type(value).__name__}."
        )

    return tensors, pack(state, "state")


def unpack_state(tensors: Mapping[str, torch.Tensor], tree: Any) -> Any:
    """Return the state that `pack_state` split."""
    if isinstance(tree, list):
        return [unpack_state(tensors, item) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if _TENSOR in tree:
        return tensors[tree[_TENSOR]]
    if _FLOAT in tree:
        return float.fromhex(tree[_FLOAT])
    if _TUPLE in tree:
        return tuple(unpack_state(tensors, item) for item in tree[_TUPLE])
    return {key: unpack_state(tensors, item) for key, item in tree[_MAP]}
