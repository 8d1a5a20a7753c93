"""`Progress`: where a run shows how it goes on: a live table in a terminal, an output in a notebook, or lines."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Protocol, TextIO

import torch

from peft_mux.reporting.screen.memory import memory_now
from peft_mux.reporting.task_times import ShownTask
from peft_mux.reporting.views import RunView, RunWatch


class Progress(Protocol):
    """Shows how a run goes on.

    Attributes:
        shows_losses: whether losses are part of what is shown, so that no lines are printed of them.
    """

    shows_losses: bool

    @property
    def width(self) -> int | None:
        """Characters of a line; `None` where lines may be of any length."""
        ...

    def start(self, tasks: Iterable[ShownTask]) -> None:
        """Begin."""
        ...

    def advance(self, tasks: Iterable[ShownTask]) -> None:
        """Show where the tasks are."""
        ...

    def log(self, line: str) -> None:
        """Print a line beside the progress."""
        ...

    def stop(self) -> None:
        """End."""
        ...


class SilentProgress:
    """Shows nothing: a process other than the first."""

    shows_losses = False
    width: int | None = None

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
        """Print a line; one that a full disk, a closed pipe or stream does not take is lost, and nothing else."""
        with suppress(OSError, ValueError):
            stream = self.stream or sys.stdout
            # An output that knows ASCII alone shows other letters by their numbers.
            coding = getattr(stream, "encoding", None) or "utf-8"
            print(line.encode(coding, "backslashreplace").decode(coding), file=stream, flush=True)


def make_progress(*, enabled: bool, is_main_process: bool, device: torch.device) -> Progress:
    """Return what suits the place where the run prints.

    Args:
        enabled: whether anything may move; else lines are printed (`disable_tqdm`, as Trainer has it).
        is_main_process: whether this process is the one that prints.
        device: the device whose memory is shown.
    """
    if not is_main_process:
        return SilentProgress()
    if enabled and in_notebook():
        from peft_mux.reporting.screen.notebook import NotebookProgress

        return NotebookProgress(RunWatch(memory_now(device)))
    if enabled and _is_terminal(sys.stdout):
        from rich.console import Console

        from peft_mux.reporting.screen.live import LiveProgress

        console = Console()
        # A terminal that cannot move its cursor gets lines.
        if console.is_terminal and not console.is_dumb_terminal:
            return LiveProgress(RunWatch(memory_now(device)), console)
    return PlainProgress()


def _is_terminal(stream: Any) -> bool:
    """Whether an output is a terminal; there may be none, or one of another make that does not know."""
    try:
        return bool(stream.isatty())
    except (AttributeError, OSError, ValueError):
        return False


def in_notebook() -> bool:
    """Whether this code runs in the kernel of a notebook, which shows HTML."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


def show_view(view: RunView) -> None:
    """Show a run once: as HTML in a notebook, else as a table of text.

    Args:
        view: the run, with its curves.
    """
    if in_notebook():
        from IPython.display import HTML, display

        from peft_mux.reporting.page.parts import run_html

        display(HTML(run_html(view)))
    else:
        from peft_mux.reporting.screen.table import table_text

        PlainProgress().log(table_text(view))
