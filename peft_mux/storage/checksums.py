"""Checksums beside the files of an adapter, which stays a plain PEFT adapter: PEFT and vLLM read two files by name.

A manifest says what a folder holds and nothing else; the folder of a task holds checkpoints too, and users add to it.
So only the named files are told of, as sealed JSON::

    <task>/adapter_config.json  adapter_model.safetensors  adapter_checksums.json
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from peft_mux.errors import CheckpointError
from peft_mux.storage.manifest import digest_file, sealed_json, unsealed_json

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
