"""The manifest of a folder: size and SHA-256 of every file, and what the folder is; written last.

safetensors has no checksum of its own (a flipped bit loads in silence), so integrity is checked here. The manifest
carries its own digest.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peft_mux.errors import CheckpointError
from peft_mux.storage.reading import open_regular, read_regular

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
