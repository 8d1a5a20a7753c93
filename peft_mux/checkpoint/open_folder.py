"""How the folder of a run is opened: one's own to write to, another one's to read."""

from __future__ import annotations

from pathlib import Path

from peft_mux import storage
from peft_mux.checkpoint.run_folder import STATE_FOLDER, RunFolder
from peft_mux.checkpoint.run_record import record_paths
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
    if is_writer and not is_resumed:
        refuse_held_folder(root)
    return RunFolder(root, model, keep=keep, is_writer=is_writer, fingerprint=fingerprint)


def refuse_held_folder(root: Path) -> None:
    """Refuse to begin a run in a folder that holds one.

    Raises:
        CheckpointError: if it does.
    """
    if record_paths(root / STATE_FOLDER):
        raise CheckpointError(
            f"output_dir: got {root}, which holds a run; allowed: a new folder, or to go on with it: "
            "train(resume_from_checkpoint=True), or peft-mux train FILE --resume. Delete it to train anew."
        )


def require_state(root: Path) -> None:
    """Require that a folder holds a state to go on from; whether it is intact is looked at when it is read.

    Raises:
        CheckpointError: if it holds none.
    """
    if not record_paths(root / STATE_FOLDER):
        raise CheckpointError(
            f"resume_from_checkpoint: got {root}, which holds no state of a run; allowed: the output_dir of a run that "
            "has saved at least once. Call train() without it to begin, or peft-mux train without --resume."
        )
