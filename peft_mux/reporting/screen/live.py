"""`LiveProgress`: the table of a run, drawn in place in a terminal, with log lines above it."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from math import ceil

from rich.console import Console, RenderableType
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType

from peft_mux.reporting.screen.table import RunTable
from peft_mux.reporting.task_times import ShownTask
from peft_mux.reporting.views import RunWatch

_FRAMES_PER_S = 4


class LiveProgress:
    """A table that is redrawn several times a second by a thread of its own, so that long steps do not stop the time.

    Args:
        watch: follows the tasks.
        console: the terminal.
    """

    shows_losses = True

    def __init__(self, watch: RunWatch, console: Console | None = None) -> None:
        """Draw nothing yet."""
        self.watch = watch
        self.console = console or Console()
        # Before the display is made, which asks for a frame at once.
        self._drawn_width = self.console.size.width
        self._drawn_lines: list[int] = []
        self._live = Live(
            get_renderable=self._frame,
            console=self.console,
            refresh_per_second=_FRAMES_PER_S,
            # What the code of tasks prints comes above the table, instead of through it.
            redirect_stdout=True,
            redirect_stderr=True,
            vertical_overflow="crop",
        )

    @property
    def width(self) -> int:
        """Characters of a line of the window, as it is now."""
        return self.console.size.width

    def start(self, tasks: Iterable[ShownTask]) -> None:
        """Show every task."""
        self.watch.start(tasks)
        self._live.start()

    def advance(self, tasks: Iterable[ShownTask]) -> None:
        """Take note of a step; the next frame shows it."""
        self.watch.advance(tasks)

    def log(self, line: str) -> None:
        """Print above the table."""
        # Messages hold brackets, which rich would take for markup. A terminal that is gone ends no run.
        with suppress(OSError, ValueError):
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def stop(self) -> None:
        """Leave the last frame standing."""
        with suppress(OSError, ValueError):
            self._live.stop()

    def _frame(self) -> RenderableType:
        """Return the next frame; before it, take away what is left of the last one where the window got narrower."""
        table = RunTable(self.watch.view())
        width = self.console.size.width
        if width < self._drawn_width:
            self._erase_wrapped(width)
        self._drawn_width = width
        self._drawn_lines = [
            sum(segment.cell_length for segment in line) for line in self.console.render_lines(table, pad=False)
        ]
        return table

    def _erase_wrapped(self, width: int) -> None:
        """Erase the rows that lines of the last frame take beyond one each, since the terminal has wrapped them."""
        more = sum(max(1, ceil(cells / width)) - 1 for cells in self._drawn_lines)
        step = [(ControlType.CURSOR_UP, 1), (ControlType.ERASE_IN_LINE, 2)]
        if more:
            erase = (ControlType.CARRIAGE_RETURN, (ControlType.ERASE_IN_LINE, 2), *(step * more))
            self.console.control(Control(*erase))
