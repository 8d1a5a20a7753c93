"""How a run shows its progress: a live table in a terminal, an output in a notebook, or lines.

`make_progress` chooses between `LiveProgress` (the table, redrawn in place below log lines), `NotebookProgress` (HTML,
updated in place) and `Progress` (lines only).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType

from peft_mux.log.lines import Progress
from peft_mux.reporting.table import RunTable, table_text
from peft_mux.reporting.views import RunView, RunWatch

if TYPE_CHECKING:
    import torch

    from peft_mux.engine.tasks.active_task import ActiveTask

_FRAMES_PER_S = 4
_LEAST_GAP_S = 0.5
_MOST_SHARE = 0.02
"""Share of the time that drawing in a notebook may take."""
_MOST_CHARTS = 24


class LiveProgress(Progress):
    """A table that a thread redraws several times per second, so that the time also moves during long steps.

    Args:
        watch: follows the tasks.
        console: the terminal.
    """

    shows_losses = True

    def __init__(self, watch: RunWatch, console: Console | None = None) -> None:
        super().__init__()
        self.watch = watch
        self.console = console or Console()
        # Before `Live` is made, which asks for a frame at once.
        self._drawn_width, self._drawn_lines = self.console.size.width, []
        self._live = Live(
            get_renderable=self._frame,
            console=self.console,
            refresh_per_second=_FRAMES_PER_S,
            # What the code of tasks prints appears above the table instead of inside it.
            redirect_stdout=True,
            redirect_stderr=True,
            vertical_overflow="crop",
        )

    @property
    def width(self) -> int:
        """Characters of a line of the window, as it is now."""
        return self.console.size.width

    def start(self, tasks: Iterable[ActiveTask]) -> None:
        """Show every task."""
        self.watch.start(tasks)
        self._live.start()

    def advance(self, tasks: Iterable[ActiveTask]) -> None:
        """Show where the tasks are after a step, in the next frame."""
        self.watch.advance(tasks)

    def log(self, line: str) -> None:
        """Print above the table."""
        # Lines contain brackets, which rich would read as markup. A closed terminal must not end the run.
        with suppress(Exception):
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def stop(self) -> None:
        """Leave the last frame standing."""
        with suppress(Exception):
            self._live.stop()

    def _frame(self) -> RenderableType:
        """Return the next frame; first erase the rest of the last one if the window got narrower."""
        table, width = RunTable(self.watch.view()), self.console.size.width
        if width < self._drawn_width:
            # The terminal has wrapped the lines of the last frame: these are the rows beyond one each.
            num_more = sum(max(1, ceil(cells / width)) - 1 for cells in self._drawn_lines)
            step = [(ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2)]
            if num_more:
                erase = (ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2), *(step * num_more))
                self.console.control(Control(*erase))
        lines = self.console.render_lines(table, pad=False)
        self._drawn_width = width
        self._drawn_lines = [sum(segment.cell_length for segment in line) for line in lines]
        return table


class NotebookProgress(Progress):
    """The run as HTML, in one output of a notebook's cell that is updated in place.

    Args:
        watch: follows the tasks, and keeps the lines.
    """

    shows_losses = True

    def __init__(self, watch: RunWatch) -> None:
        super().__init__()
        self.watch = watch
        self._handle: Any = None
        self._next_s = 0.0

    @property
    def width(self) -> int:
        """Characters of a line below the table."""
        return 110

    def start(self, tasks: Iterable[ActiveTask]) -> None:
        """Begin an output in the cell that runs."""
        self.watch.start(tasks)
        self._update(begins=True)

    def advance(self, tasks: Iterable[ActiveTask]) -> None:
        """Show where the tasks are, unless they were shown a moment ago."""
        self.watch.advance(tasks)
        began = time.perf_counter()
        if began >= self._next_s:
            self._update()
            took = time.perf_counter() - began
            self._next_s = began + max(_LEAST_GAP_S, took / _MOST_SHARE)

    def log(self, line: str) -> None:
        """Keep a line below the table; lines after the last step are shown at once."""
        self.watch.log(line)
        if self._next_s == float("inf"):
            self._update()

    def stop(self) -> None:
        """Show where the tasks stand, and from now on each line as it comes."""
        self._next_s = float("inf")
        self._update()

    def _update(self, *, begins: bool = False) -> None:
        from IPython.display import HTML, display

        # Not at the top: commands that only print a table must not import transformers and PEFT.
        from peft_mux.reporting.page import run_html

        html = HTML(run_html(self.watch.view(with_curves=True), most_charts=_MOST_CHARTS))
        if begins:
            self._handle = display(html, display_id=True)
        elif self._handle is not None:
            self._handle.update(html)


def make_progress(*, enabled: bool, is_main_process: bool, device: torch.device) -> Progress:
    """Return the progress that suits where the run prints.

    Args:
        enabled: whether anything may move; else lines are printed (`disable_tqdm`, as in Trainer).
        is_main_process: whether this process is the one that prints.
        device: the device whose memory is shown.
    """
    # Not at the top: commands that only print a table must not wait for torch.
    from peft_mux.engine.allocator import memory_now

    if not is_main_process:
        return Progress(is_silent=True)
    watch = RunWatch(partial(memory_now, device))
    if enabled and in_notebook():
        return NotebookProgress(watch)
    # Standard output may be missing, or be an object without `isatty`.
    with suppress(AttributeError, OSError, ValueError):
        console = Console()
        # A terminal that cannot move its cursor gets lines.
        if enabled and sys.stdout.isatty() and console.is_terminal and not console.is_dumb_terminal:
            return LiveProgress(watch, console)
    return Progress()


def in_notebook() -> bool:
    """Whether this code runs in the kernel of a notebook, which shows HTML."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


def show_view(view: RunView) -> None:
    """Show a run once, with its curves: as HTML in a notebook, else as a table of text."""
    if in_notebook():
        from IPython.display import HTML, display

        from peft_mux.reporting.page import run_html

        display(HTML(run_html(view)))
    else:
        progress = Progress()
        progress.log(table_text(view, progress.width))
