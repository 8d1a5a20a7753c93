"""Progress of a run: one live bar a task in a terminal, one plain line a task and log elsewhere.

Outside a terminal (files, CI, notebooks) `rich` would print every frame below the last, so plain lines are printed.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Protocol, TextIO


class ShownTask(Protocol):
    """What is shown of a task."""

    @property
    def name(self) -> str:
        """Name of the task."""
        ...

    @property
    def step(self) -> int:
        """Optimizer steps taken."""
        ...

    @property
    def num_steps(self) -> int:
        """Optimizer steps to take."""
        ...

    @property
    def status(self) -> Any:
        """Where it stands."""
        ...

    @property
    def last_loss(self) -> float:
        """Loss of its last step."""
        ...


class Progress(Protocol):
    """Shows how far each task is."""

    def start(self, tasks: Iterable[ShownTask]) -> None:
        """Begin."""
        ...

    def advance(self, tasks: Iterable[ShownTask]) -> None:
        """Take up the state after a step."""
        ...

    def log(self, line: str) -> None:
        """Print a line beside the progress."""
        ...

    def stop(self) -> None:
        """End."""
        ...


class SilentProgress:
    """Shows nothing (`disable_tqdm`, or a process other than the first)."""

    def start(self, tasks: Iterable[ShownTask]) -> None:
        """Do nothing."""

    def advance(self, tasks: Iterable[ShownTask]) -> None:
        """Do nothing."""

    def log(self, line: str) -> None:
        """Do nothing."""

    def stop(self) -> None:
        """Do nothing."""


class PlainProgress(SilentProgress):
    """Prints log lines, nothing that moves."""

    def __init__(self, stream: TextIO | None = None) -> None:
        """Print to `stream`, by default to what standard output is at the time."""
        self.stream = stream

    def log(self, line: str) -> None:
        """Print a line; one that a full disk or a closed pipe does not take is lost, and nothing else."""
        with suppress(OSError):
            print(line, file=self.stream or sys.stdout, flush=True)


class LiveProgress:
    """One bar a task, redrawn in place."""

    def __init__(self) -> None:
        """Build the columns."""
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self.progress = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TextColumn("loss {task.fields[loss]}"),
            TimeRemainingColumn(),
        )
        self.bars: dict[str, Any] = {}

    def start(self, tasks: Iterable[ShownTask]) -> None:
        """Show a bar for every task."""
        self.progress.start()
        self.advance(tasks)

    def advance(self, tasks: Iterable[ShownTask]) -> None:
        """Move the bars; add one for a task that has arrived."""
        for task in tasks:
            shown: dict[str, Any] = {"status": str(task.status), "loss": f"{task.last_loss:.4f}"}
            if task.name not in self.bars:
                self.bars[task.name] = self.progress.add_task(task.name, total=task.num_steps, **shown)
            self.progress.update(self.bars[task.name], completed=task.step, **shown)

    def log(self, line: str) -> None:
        """Print above the bars."""
        # Messages hold brackets, which rich would take for markup. A terminal that is gone ends no run.
        with suppress(OSError):
            self.progress.console.print(line, markup=False, highlight=False)

    def stop(self) -> None:
        """Leave the last frame standing."""
        self.progress.stop()


def make_progress(*, enabled: bool, is_main_process: bool) -> Progress:
    """Return what suits the place where the run prints."""
    if not enabled or not is_main_process:
        return SilentProgress()
    if sys.stdout.isatty():
        return LiveProgress()
    return PlainProgress()
