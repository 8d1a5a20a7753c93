"""Paths that stay inside the run folder, whatever a task is named and whatever links lie there."""

from __future__ import annotations

import os
from pathlib import Path

from peft_mux.errors import CheckpointError
from peft_mux.task_names import name_fault


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
