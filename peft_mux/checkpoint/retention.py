"""Which states of a run are kept: the newest, and every checkpoint that they name."""

from __future__ import annotations

from pathlib import Path

from peft_mux import storage
from peft_mux.checkpoint.run_record import read_records


def prune_states(root: Path, records_folder: Path, *, keep: int) -> None:
    """Delete records of a run beyond the newest, and checkpoints of its tasks beyond the newest that no record names.

    Args:
        root: the folder of the run.
        records_folder: the folder that its records lie in.
        keep: number of records, and of checkpoints of each task, that are kept.

    Raises:
        OSError: if something cannot be deleted.
    """
    records = read_records(records_folder)
    for _, path in records[:-keep]:
        # Records before the checkpoints that they name: none may ever name one that is gone.
        path.unlink()
    needed: dict[str, set[Path]] = {}
    for record, _ in records[-keep:]:
        for name, entry in record.tasks.items():
            needed.setdefault(name, set()).add(root / name / f"checkpoint-{entry.step}")
    for name, folders in needed.items():
        # Tasks end at different steps, so a checkpoint that a kept record names may be old by number.
        storage.prune(root / name, keep=keep, protect=folders)
