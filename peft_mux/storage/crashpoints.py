"""Places where a test may kill the process, to prove that a crash there loses nothing."""

from __future__ import annotations

import os
import signal

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
