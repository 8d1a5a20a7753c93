"""How the folder of a run is opened: one's own to write to, another one's to read."""

from __future__ import annotations

from pathlib import Path

from peft_mux import storage
from peft_mux.checkpoint.run_folder import RunFolder
from peft_mux.errors import CheckpointError
from peft_mux.modeling.model import MultiTaskPeftModel


def open_other_folder(
    root: Path, model: MultiTaskPeftModel, *, is_writer: bool = True, fingerprint: str | None = None
) -> RunFolder:
    """Open the folder of another run, to read its state.

    What a crash has left behind there is put in order first, unless a process trains there or the folder cannot be
    written to; then it is read as it is.

    Args:
        root: the folder of that run.
        model: the model whose adapters are read.
        is_writer: whether this process puts anything in order.
        fingerprint: digest of the whole backbone, where the model holds only a part of it.
    """
    lock = storage.FolderLock(root)
    if is_writer and root.is_dir():
        try:
            lock.acquire()
        except CheckpointError:
            is_writer = False
    try:
        is_writer = is_writer and lock.is_held
        return RunFolder(root, model, is_writer=is_writer, fingerprint=fingerprint)
    finally:
        lock.release()


def open_run_folder(
    root: Path,
    model: MultiTaskPeftModel,
    *,
    keep: int | None,
    is_resumed: bool,
    is_writer: bool = True,
    fingerprint: str | None = None,
) -> RunFolder:
    """Open the folder that a run writes to; a process that does not write looks at nothing.

    Args:
        root: the folder, made where it is absent.
        model: the model whose adapters are written and read.
        keep: how many checkpoints are kept of each task, and how many records of the run; `None` for all.
        is_resumed: whether the run goes on with what is there.
        is_writer: whether this process writes.
        fingerprint: digest of the whole backbone, where the model holds only a part of it.

    Raises:
        CheckpointError: if it holds a run that is not resumed, whose state would be mixed with the new one's.
    """
    folder = RunFolder(root, model, keep=keep, is_writer=is_writer, fingerprint=fingerprint)
    if is_writer and folder.record_paths() and not is_resumed:
        raise CheckpointError(
            f"output_dir: got {root}, which holds a run; allowed: a new folder, or train(resume_from_checkpoint=True) "
            "to go on with it. Delete it to train anew."
        )
    return folder
