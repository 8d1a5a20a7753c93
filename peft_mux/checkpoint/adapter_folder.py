"""The adapter at the root of a task's folder: what it is replaced by, and repaired from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from peft_mux import storage
from peft_mux.errors import CheckpointError
from peft_mux.modeling.adapters.files import ADAPTER_NAMES, CONFIG_NAME, WEIGHTS_NAME


def replace_adapter(folder: Path, scratch: Path) -> None:
    """Let the files of an adapter take the place of those of a task, each whole or not at all.

    Args:
        folder: the folder of the task, which holds its checkpoints too and so cannot be swapped.
        scratch: folder on the same file system with an adapter and its checksums, which are moved.

    Raises:
        OSError: if a file cannot be moved.
    """
    # Gone first and back last: a crash between two files must not leave the checksums of others.
    (folder / storage.CHECKSUMS_NAME).unlink(missing_ok=True)
    for file in (*ADAPTER_NAMES, storage.CHECKSUMS_NAME):
        # The configuration is the same at every save.
        if file != CONFIG_NAME or not _is_same(folder / file, scratch / file):
            storage.replace_file(scratch / file, folder / file)


def _is_same(present: Path, new: Path) -> bool:
    try:
        return not present.is_symlink() and storage.read_regular(present) == new.read_bytes()
    except OSError:
        return False


def mend_adapter(folder: Path, checkpoint: Path, say: Callable[[str], None]) -> None:
    """Repair the adapter of an ended task from the checkpoint that it ended with; write checksums where there are none.

    Args:
        folder: the folder of the task.
        checkpoint: a folder with the same adapter, which was verified.
        say: called with what is wrong and what is done, where anything is.

    Raises:
        CheckpointError: if the adapter cannot be written.
    """
    fault = _fault(folder, checkpoint)
    if fault:
        say(f"{fault} It is taken from {checkpoint}.")
    elif storage.has_checksums(folder):
        return
    # What is whole stays, as that of earlier versions, which wrote no checksums.
    source = checkpoint if fault else folder
    try:
        with storage.scratch_folder(folder) as scratch:
            for file in ADAPTER_NAMES:
                (scratch / file).write_bytes((source / file).read_bytes())
            storage.write_checksums(scratch, ADAPTER_NAMES)
            replace_adapter(folder, scratch)
    except OSError as error:
        raise CheckpointError(f"{folder}: the adapter could not be written ({error}).") from error


def _fault(folder: Path, checkpoint: Path) -> str:
    """Return in a sentence what is wrong with an adapter; "" where it is that of the checkpoint."""
    try:
        if storage.has_checksums(folder):
            storage.verify_checksums(folder, ADAPTER_NAMES)
        is_same = storage.digest_file(folder / WEIGHTS_NAME) == storage.digest_file(checkpoint / WEIGHTS_NAME)
        # Not compared: which backbone it names may differ.
        json.loads(storage.read_regular(folder / CONFIG_NAME))
    except CheckpointError as error:
        return str(error)
    except (OSError, ValueError, RecursionError) as error:
        return f"{folder}: got no readable adapter ({error})."
    return "" if is_same else f"{folder / WEIGHTS_NAME}: got other weights than those that the task ended with."
