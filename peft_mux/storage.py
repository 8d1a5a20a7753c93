"""Names of tasks: they become folders, so no name may lead out of one, or be another in a file system without case."""

# MERGED: Places where a test may kill the process, to prove that a crash there loses nothing.
# MERGED: Paths that stay inside the run folder, whatever a task is named and whatever links lie there.
# MERGED: Reading what may have been put in the place of a file: a pipe would hang whoever opens it, a device never end.
# MERGED: The manifest of a folder: size and SHA-256 of every file, and what the folder is; written last.
# MERGED: safetensors has no checksum of its own (a flipped bit loads in silence), so integrity is checked here. The
# MERGED: manifest
# MERGED: carries its own digest.
# MERGED: Writing so that a crash at any moment leaves the old content or the new, never a mixture.
# MERGED: A folder is filled under a temporary name on the same file system, its manifest is written last, everything
# MERGED: is flushed
# MERGED: to the disk, and it is renamed into place. Where a folder stands there already, that one is moved aside
# MERGED: first; should
# MERGED: the process die in between, `remove_stale` moves it back.
# MERGED: Checksums beside the files of an adapter, which stays a plain PEFT adapter: PEFT and vLLM read two files by
# MERGED: name.
# MERGED: A manifest says what a folder holds and nothing else; the folder of a task holds checkpoints too, and users
# MERGED: add to it.
# MERGED: So only the named files are told of, as sealed JSON::
# MERGED:     <task>/adapter_config.json  adapter_model.safetensors  adapter_checksums.json
# MERGED: `FolderLock`: one process writes a run folder, and the system lets go of it when that process dies.
# MERGED: The lock is the operating system's, on an open file of the folder, so a killed process leaves none behind;
# MERGED: the content
# MERGED: of the file only tells who holds it. Threads and trainers of one process exclude each other as processes do.
# MERGED: Tensors and states as safetensors and JSON: no pickle, and the same bytes for the same content.

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import signal
import socket
import stat
import uuid
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from peft_mux.errors import CheckpointError, Fault, raise_faults, shown

# Names become folders, so they keep to what every file system takes.
NAME_PATTERN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,63}")


RESERVED_NAMES = frozenset(
    "run state control plan metrics report config environment tmp con prn aux nul".split()
    + [f"com{port}" for port in range(10)]
    + [f"lpt{port}" for port in range(10)]
)
"""Names that the run folder uses itself, and device names of Windows; compared case-folded."""


def check_task_names(names: Iterable[str], taken: Iterable[str] = ()) -> None:
    """Refuse names that differ at most in case, among themselves or from those already taken.

    Args:
        names: names of the tasks to check.
        taken: names that other tasks of the run have already.

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
                    f'"{name}" beside "{seen[name.casefold()]}"',
                    "names that differ in more than case (they become folders)",
                    "Rename one of them.",
                )
            )
        seen[name.casefold()] = name
    raise_faults(faults)


def name_fault(name: object, where: str = "task.name") -> Fault | None:
    """Return what is wrong with a task's name, or `None`.

    Args:
        name: what was given as the name.
        where: dotted path of the field, for the message.
    """
    allowed = "1 to 64 letters, digits, '_' and '-', beginning with a letter or digit (it becomes a folder)"
    if not isinstance(name, str):
        return Fault(where, f"{shown(name)} ({type(name).__name__})", allowed)
    got = repr(name) if len(name) <= 80 else f"a name of {len(name)} characters"
    if not NAME_PATTERN.fullmatch(name):
        return Fault(where, got, allowed)
    if name.casefold() in RESERVED_NAMES:
        return Fault(where, got, f"any name but {', '.join(sorted(RESERVED_NAMES))} (reserved)")
    return None


CRASHPOINTS = (
    "before_fill",
    "after_fill",
    "after_manifest",
    "after_fsync",
    "after_move_aside",
    "after_rename",
    "after_cleanup",
)
_VARIABLE = "PEFT_MUX_CRASHPOINT"
_counts: dict[str, int] = {}


def crashpoint(name: str) -> None:
    """Kill the process here, if `PEFT_MUX_CRASHPOINT` is `name` or `name:count` and this is the count-th time."""
    wanted = os.environ.get(_VARIABLE)
    if wanted is None:
        return
    assert name in CRASHPOINTS, f"unknown crash point {name}"
    # SIGKILL and no exception: nothing may run that a power cut would not let run.
    target, _, count = wanted.partition(":")
    if target == name:
        _counts[name] = _counts.get(name, 0) + 1
        if _counts[name] == int(count or 1):
            os.kill(os.getpid(), signal.SIGKILL)


def safe_child(root: Path, name: str) -> Path:
    """Return the folder of a task under `root`.

    Raises:
        CheckpointError: if the name is not a plain one, or the folder is a link or leads outside of `root`.
    """
    fault = name_fault(name, "task")
    if fault is not None:
        raise CheckpointError(str(fault))
    child = root / name
    # After links are resolved: comparing the names alone is beaten by a link.
    base, real = os.path.realpath(root), os.path.realpath(child)
    if child.is_symlink() or os.path.commonpath((base, real)) != base or real == base:
        raise CheckpointError(
            f'task "{name}": got {child}, which leads to {real}; allowed: a folder inside {base}. Remove the link.'
        )
    return child


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading; a link is followed, anything but a regular file refused.

    Raises:
        OSError: if it cannot be opened, or is a folder, a pipe, a socket or a device.
    """
    # A pipe without a writer is opened at once so, instead of waiting for one.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    require_regular(descriptor, path)
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: if it cannot be read, or is a folder, a pipe, a socket or a device.
    """
    with open_regular(path) as file:
        return file.read()


def require_regular(descriptor: int, path: Path) -> None:
    """Close an open file that is none.

    Raises:
        OSError: naming the path, if it is a folder, a pipe, a socket or a device.
    """
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no regular file")


MANIFEST_NAME = "manifest.json"
_NUMBERED = re.compile(r"checkpoint-(0|[1-9][0-9]*)")


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a folder holds.

    Attributes:
        facts: what the folder is, such as its task and step.
        files: size in bytes and SHA-256 of each file, by its name.
    """

    facts: dict[str, Any]
    files: dict[str, tuple[int, str]]


def digest_file(path: Path) -> tuple[int, str]:
    """Return the size and the SHA-256 of a file."""
    digest, size = hashlib.sha256(), 0
    with open_regular(path) as file:
        while block := file.read(2**20):
            digest.update(block)
            size += len(block)
    return size, digest.hexdigest()


def make_manifest(folder: Path, facts: Mapping[str, Any]) -> bytes:
    """Return the manifest of a folder's present files, as sealed JSON."""
    files = {path.name: list(digest_file(path)) for path in sorted(folder.iterdir()) if path.name != MANIFEST_NAME}
    return sealed_json({"facts": dict(facts), "files": files})


def sealed_json(value: Any) -> bytes:
    """Return JSON that carries a digest of itself."""
    # The body as a string: its digest is then of exact bytes, whatever a reader makes of numbers and keys.
    body = json.dumps(value, sort_keys=True)
    return json.dumps({"sha256": hashlib.sha256(body.encode()).hexdigest(), "body": body}).encode()


def unsealed_json(path: Path) -> Any:
    """Return what `sealed_json` wrapped.

    Raises:
        CheckpointError: if the file is missing, torn or changed.
    """
    try:
        # Compared as bytes: JSON has several spellings of one value, and each but ours is a change.
        raw = read_regular(path)
        value = json.loads(json.loads(raw)["body"])
        intact = raw == sealed_json(value)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{path}: got no readable file ({error}); allowed: an intact one.") from error
    if not intact:
        raise CheckpointError(f"{path}: got a file that was changed since it was written; allowed: an intact one.")
    return value


def verify_folder(folder: Path, *, expect: Mapping[str, Any] | None = None) -> Manifest:
    """Check every file of a folder against its manifest.

    Args:
        folder: the folder, as `write_folder` has written it.
        expect: facts that must be so, such as the task, lest another task's folder be taken for this one's.

    Returns:
        The manifest of the folder.

    Raises:
        CheckpointError: naming the file that is missing, extra or changed, or the fact that differs.
    """
    manifest = _read_manifest(folder / MANIFEST_NAME)
    for key, wanted in (expect or {}).items():
        if manifest.facts.get(key) != wanted:
            raise CheckpointError(f"{folder}: got {key} {manifest.facts.get(key)!r}; allowed: {wanted!r}.")
    present = {path.name for path in folder.iterdir()} - {MANIFEST_NAME}
    for odd in sorted(present ^ manifest.files.keys()):
        state = "extra" if odd in present else "missing"
        raise CheckpointError(
            f"{folder / odd}: got a file that is {state}; allowed: exactly the files of the manifest."
        )
    for name, wanted_file in manifest.files.items():
        path = folder / name
        # A link is refused even where the content is right: what it leads to may change later.
        if path.is_symlink() or not path.is_file() or digest_file(path) != wanted_file:
            raise CheckpointError(f"{path}: got a file that was changed since it was written; allowed: an intact one.")
    return manifest


def _read_manifest(path: Path) -> Manifest:
    value = unsealed_json(path)
    try:
        return Manifest(dict(value["facts"]), {name: (size, digest) for name, (size, digest) in value["files"].items()})
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: got a file that is no manifest ({error!r}); allowed: an intact one.") from error


def numbered_folders(parent: Path) -> list[int]:
    """Return the numbers of the `checkpoint-<number>` folders that have a manifest, ascending; intact or not."""
    numbers = []
    for path in parent.iterdir() if parent.is_dir() else ():
        match = _NUMBERED.fullmatch(path.name)
        if match and (path / MANIFEST_NAME).is_file():
            numbers.append(int(match.group(1)))
    return sorted(numbers)


def is_intact(folder: Path) -> bool:
    """Whether all files of a folder are as its manifest says."""
    try:
        verify_folder(folder)
    except CheckpointError:
        return False
    return True


def prune(parent: Path, *, keep: int, protect: set[Path] = frozenset()) -> list[Path]:  # type: ignore[assignment]
    """Delete all but the newest `keep` intact checkpoints of a folder.

    By number, never by time; the last intact one and the protected stay; a folder without our manifest is not ours.

    Returns:
        The folders that were deleted.
    """
    folders = [parent / f"checkpoint-{number}" for number in reversed(numbered_folders(parent))]
    kept = 0
    deleted = []
    for folder in folders:
        is_wanted = kept < max(keep, 1)
        # One that is not intact counts for nothing: `keep` intact ones stay.
        if (folder in protect or is_wanted) and is_intact(folder):
            kept += 1
        elif folder not in protect and not is_wanted:
            shutil.rmtree(folder)
            deleted.append(folder)
    return deleted


_FIX = "Free space on its disk, or make the folder writable."
_SCRATCH = ".tmp-"
_ASIDE = ".old-"
_ASIDE_NAME = re.compile(r"\.old-(?P<name>.+)-[0-9a-f]{32}")


def write_folder(final: Path, fill: Callable[[Path], None], *, facts: Mapping[str, Any]) -> None:
    """Write a folder whole or not at all.

    Args:
        final: the folder to write; it is replaced where it exists.
        fill: writes the files into the folder that it is given.
        facts: what the folder is, such as its task and step, for the manifest.

    Raises:
        CheckpointError: if writing failed; then the old content stands as it was.
    """
    try:
        with scratch_folder(final.parent) as scratch:
            crashpoint("before_fill")
            fill(scratch)
            crashpoint("after_fill")
            # Last of the files, so that a folder with a manifest is complete.
            (scratch / MANIFEST_NAME).write_bytes(make_manifest(scratch, facts))
            crashpoint("after_manifest")
            # Before the rename: a file system may write the new name before the content, and a power cut leave empty
            # files.
            _flush_tree(scratch)
            crashpoint("after_fsync")
            _move_into_place(scratch, final)
    except OSError as error:
        raise CheckpointError(
            f"{final}: could not be written ({error}); what stood there before is unchanged. {_FIX}"
        ) from error


def _move_into_place(scratch: Path, final: Path) -> None:
    """Rename the scratch folder, moving what stands in its place aside until that is done."""
    # Two renames, as no portable call exchanges two folders; `remove_stale` mends a crash between them.
    aside = None
    if final.exists() or final.is_symlink():
        aside = final.parent / f"{_ASIDE}{final.name}-{uuid.uuid4().hex}"
        os.rename(final, aside)
        crashpoint("after_move_aside")
    try:
        os.rename(scratch, final)
    except OSError:
        if aside is not None:
            os.rename(aside, final)
        raise
    crashpoint("after_rename")
    # The rename itself lies in the parent. What stood here before goes only when the new name is safe.
    _flush_folder(final.parent)
    if aside is not None:
        _delete(aside)
    crashpoint("after_cleanup")


@contextmanager
def scratch_folder(parent: Path) -> Iterator[Path]:
    """Make a folder under a temporary name in `parent`, and remove it afterwards unless it was renamed."""
    scratch = parent / f"{_SCRATCH}{uuid.uuid4().hex}"
    parent.mkdir(parents=True, exist_ok=True)
    scratch.mkdir()
    try:
        yield scratch
    finally:
        if scratch.exists():
            shutil.rmtree(scratch, ignore_errors=True)


def write_file(path: Path, content: bytes) -> None:
    """Write a file whole or not at all; a link that stands there is replaced, not followed.

    Raises:
        CheckpointError: if writing failed; then the old content stands as it was.
    """
    scratch = path.parent / f"{_SCRATCH}{uuid.uuid4().hex}"
    try:
        with scratch.open("xb") as file:
            file.write(content)
            file.flush()
            # Content first, then the name, then the folder that holds the name.
            os.fsync(file.fileno())
        os.replace(scratch, path)
        _flush_folder(path.parent)
    except OSError as error:
        raise CheckpointError(
            f"{path}: could not be written ({error}); what stood there before is unchanged. {_FIX}"
        ) from error
    finally:
        with suppress(OSError):
            scratch.unlink(missing_ok=True)


def replace_file(source: Path, target: Path) -> None:
    """Let a finished file of a scratch folder on the same file system take another's place, whole or not at all.

    A link that stands there is replaced, not followed.

    Raises:
        OSError: if that failed; then the old content stands as it was.
    """
    with source.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(source, target)
    _flush_folder(target.parent)


def append_line(path: Path, line: str) -> None:
    """Append one line to a regular file, whole or not at all, and hand it to the operating system at once.

    Raises:
        OSError: if that failed, as on a full disk; or a link, a pipe or a device stands there.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    descriptor = os.open(path, flags, 0o644)
    require_regular(descriptor, path)
    try:
        size = os.fstat(descriptor).st_size
        rest = memoryview(f"{line}\n".encode())
        try:
            while rest:
                rest = rest[os.write(descriptor, rest) :]
        except OSError:
            # Half a line would make the next one unreadable too. A full disk takes back what it has taken.
            os.ftruncate(descriptor, size)
            raise
    finally:
        os.close(descriptor)


def remove_stale(parent: Path) -> None:
    """Clear away what a crash left in a folder: unfinished writes go, a folder moved aside comes back if it must."""
    for path in sorted(parent.iterdir()):
        match = _ASIDE_NAME.fullmatch(path.name)
        if match is not None:
            final = parent / match["name"]
            if final.exists():
                _delete(path)
            else:
                # The crash came between the two renames: the old content takes its place again.
                os.rename(path, final)
        # Only names that we make ourselves: anything else in the folder belongs to somebody else.
        elif path.name.startswith(_SCRATCH) and re.fullmatch(r"\.tmp-[0-9a-f]{32}", path.name):
            _delete(path)


def _delete(path: Path) -> None:
    """Delete a file, a link, a pipe or a folder; a link is not followed."""
    # Asked for folders: `rmtree` would open a pipe, and wait for somebody who writes into it.
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _flush_tree(folder: Path) -> None:
    """Force the files of a folder, and the folder itself, to the disk."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
    _flush_folder(folder)


def _flush_folder(folder: Path) -> None:
    """Force a folder's entries to the disk: without this, a rename may be lost though the files are safe."""
    # Windows opens no folders, so there the rename cannot be forced to the disk.
    if not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


CHECKSUMS_NAME = "adapter_checksums.json"


def write_checksums(folder: Path, names: Sequence[str]) -> None:
    """Write size and SHA-256 of some files of a folder beside them.

    Raises:
        CheckpointError: if a file cannot be read or the checksums not be written.
    """
    path = folder / CHECKSUMS_NAME
    try:
        content = sealed_json({"files": {name: list(digest_file(folder / name)) for name in sorted(names)}})
        # Anew, so that no link is followed. Not flushed: whoever needs that moves the files into place.
        path.unlink(missing_ok=True)
        with path.open("xb") as file:
            file.write(content)
    except OSError as error:
        raise CheckpointError(f"{path}: could not be written ({error}).") from error


def has_checksums(folder: Path) -> bool:
    """Whether there are checksums beside the files of a folder; earlier versions wrote none."""
    path = folder / CHECKSUMS_NAME
    return path.exists() or path.is_symlink()


def verify_checksums(folder: Path, names: Sequence[str]) -> None:
    """Check files of a folder against the checksums beside them.

    Raises:
        CheckpointError: naming the file that is missing or changed; or the checksums, where they are no readable ones.
    """
    path = folder / CHECKSUMS_NAME
    value = unsealed_json(path)
    try:
        wanted = {name: tuple(value["files"][name]) for name in names}
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: got no checksums of {', '.join(names)}; allowed: an intact file.") from error
    for name in names:
        file = folder / name
        try:
            found = digest_file(file)
        except OSError as error:
            raise CheckpointError(f"{file}: got no readable file ({error}); allowed: an intact one.") from error
        if found != wanted[name]:
            raise CheckpointError(
                f"{file}: got a file that was changed since it was written; allowed: the one that {CHECKSUMS_NAME}"
                " beside it tells of. Resume the run, which takes it from a checkpoint, or delete the checksums if the"
                " change was meant."
            )


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


_TENSOR, _TUPLE, _MAP, _FLOAT = "__tensor__", "__tuple__", "__map__", "__float__"


def save_tensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write tensors to a file; views of one storage are written apart.

    Raises:
        CheckpointError: if the file cannot be written; safetensors has an error of its own for a full disk.
    """
    # Cloned, as safetensors refuses tensors that share memory, which all parameters of a page do; sorted for equal
    # bytes.
    copies = {name: tensors[name].detach().cpu().clone().contiguous() for name in sorted(tensors)}
    try:
        save_file(copies, path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise CheckpointError(f"{path}: could not be written ({error}).") from error


def load_tensors(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a file.

    Raises:
        CheckpointError: if the file cannot be read.
    """
    try:
        return load_file(path)
    # Of a crafted header, torch says in its own words what it cannot make.
    except (OSError, SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"{path}: got no readable tensors ({error}); allowed: an intact safetensors file."
        ) from error


def pack_state(state: Any) -> tuple[dict[str, torch.Tensor], Any]:
    """Take a `state_dict()` apart into tensors and JSON.

    Args:
        state: nested dicts (string or integer keys), lists, tuples, tensors, numbers, strings and `None`.

    Returns:
        Tensors by running name, and a tree that refers to them.

    Raises:
        CheckpointError: naming the place of anything else.
    """
    tensors: dict[str, torch.Tensor] = {}
    return tensors, _pack(state, "state", tensors)


def _pack(value: Any, path: str, tensors: dict[str, torch.Tensor]) -> Any:
    """Return the tree of a value, and put its tensors into `tensors`; `path` names the place in errors."""
    if isinstance(value, torch.Tensor):
        # Zeros in front, so that sorted names are in the order of the tree.
        name = str(len(tensors)).zfill(8)
        tensors[name] = value
        return {_TENSOR: name}
    if isinstance(value, float) and not isinstance(value, bool):
        # Hexadecimal is exact, and knows inf and nan, which JSON does not.
        return {_FLOAT: value.hex()}
    if value is None or type(value) in (bool, int, str):
        return value
    if isinstance(value, Mapping):
        if not all(type(key) in (str, int) for key in value):
            raise CheckpointError(f"{path}: got a key that is neither a string nor an integer; allowed: those two.")
        return {_MAP: [[key, _pack(item, f"{path}.{key}", tensors)] for key, item in value.items()]}
    # By exact type: a subclass, such as a named tuple, would come back as something else.
    if type(value) is tuple:
        return {_TUPLE: [_pack(item, f"{path}[{index}]", tensors) for index, item in enumerate(value)]}
    if type(value) is list:
        return [_pack(item, f"{path}[{index}]", tensors) for index, item in enumerate(value)]
    raise CheckpointError(
        f"{path}: got a {type(value).__name__}; allowed: tensors, numbers, strings, None, and nestings of them."
    )


def unpack_state(tensors: Mapping[str, torch.Tensor], tree: Any) -> Any:
    """Put together what `pack_state` took apart."""
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
