"""What each process does in a run in which one process is killed; started by `parallel_cases.launch`."""

from __future__ import annotations

import os
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.engine.replicas import layout_cases as cases
from tests.engine.replicas.layout_cases import LaidOut, Watcher

_PATIENCE_S = 20.0


@dataclass(frozen=True)
class Kill:
    """Which process is killed when.

    Attributes:
        rank: of the process.
        step: at whose beginning, counted from 0, the killer starts.
        delay_s: that the killer waits.
        crashpoint: of a write at which the process dies instead, as `PEFT_MUX_CRASHPOINT` has it.
    """

    rank: int
    step: int = 0
    delay_s: float = 0.0
    crashpoint: str | None = None


def killed(rank: int, folder: Path, model: str, arguments: dict[str, Any], kill: Kill) -> LaidOut:
    """Train with checkpoints; one process is killed on the way."""
    acts = {}
    if rank == kill.rank and kill.crashpoint is not None:
        os.environ["PEFT_MUX_CRASHPOINT"] = kill.crashpoint
    elif rank == kill.rank:
        # The last step waits for the killer, so that it also works on fast machines.
        acts = {kill.step: lambda trainer: _start_killer(kill.delay_s), 7: lambda trainer: time.sleep(_PATIENCE_S)}
    return cases.train(
        folder, model, cases.tasks_of("llama"), watcher=Watcher(at_begin=acts), save_steps=2, **arguments
    )


def go_on(rank: int, folder: Path, model: str, arguments: dict[str, Any], is_saved: bool) -> LaidOut:
    """Resume the run of a folder; start from the beginning if nothing was saved."""
    return cases.train(folder, model, cases.tasks_of("llama"), resume=is_saved, save_steps=2, **arguments)


def _start_killer(delay_s: float) -> None:
    """Let another process kill this one after a delay."""
    subprocess.Popen(["sh", "-c", f"sleep {delay_s:.3f}; kill -KILL {os.getpid()}"])
