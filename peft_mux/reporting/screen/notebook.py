"""`NotebookProgress`: one output of a notebook's cell, updated in place."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from peft_mux.reporting.page.parts import run_html
from peft_mux.reporting.task_times import ShownTask
from peft_mux.reporting.views import RunWatch

_LEAST_GAP_S = 0.5
_MOST_SHARE = 0.02
"""Share of the time that drawing may take."""
_MOST_CHARTS = 24


class NotebookProgress:
    """The run as HTML, under a `display_id` of its own.

    Args:
        watch: follows the tasks, and keeps the lines.
    """

    shows_losses = True
    width = 110

    def __init__(self, watch: RunWatch) -> None:
        """Show nothing yet."""
        self.watch = watch
        self._handle: Any = None
        self._next_s = 0.0

    def start(self, tasks: Iterable[ShownTask]) -> None:
        """Begin an output in the cell that runs."""
        from IPython.display import HTML, display

        self.watch.start(tasks)
        self._handle = display(HTML(self._html()), display_id=True)

    def advance(self, tasks: Iterable[ShownTask]) -> None:
        """Show where the tasks are, unless they were shown a moment ago."""
        self.watch.advance(tasks)
        began = time.perf_counter()
        if began >= self._next_s:
            self._update()
            took = time.perf_counter() - began
            self._next_s = began + max(_LEAST_GAP_S, took / _MOST_SHARE)

    def log(self, line: str) -> None:
        """Keep a line below the table; what is said after the last step is shown at once."""
        self.watch.log(line)
        if self._next_s == float("inf"):
            self._update()

    def stop(self) -> None:
        """Show where the tasks stand, and from now on each line as it comes."""
        self._next_s = float("inf")
        self._update()

    def _update(self) -> None:
        from IPython.display import HTML

        if self._handle is not None:
            self._handle.update(HTML(self._html()))

    def _html(self) -> str:
        return run_html(self.watch.view(with_curves=True), most_charts=_MOST_CHARTS)
