"""Writing so that a crash at any moment leaves the old content or the new, never a mixture.

A folder is filled under a temporary name on the same file system, its manifest is written last, everything is flushed
to the disk, and it is renamed into place. Where a folder stands there already, that one is moved aside first; should
the process die in between, `remove_stale` moves it back.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from peft_mux.errors import CheckpointError
from peft_mux.storage.crashpoints import crashpoint
from peft_mux.storage.manifest import MANIFEST_NAME, make_manifest
from peft_mux.storage.reading import require_regular

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
