"""How a run shows its progress: a live table in a terminal, an output in a notebook, or lines.

`RunTable` draws a `RunView` for any width and height of a window. `make_progress` chooses between `LiveProgress` (the
table, redrawn in place below log lines), `NotebookProgress` (HTML, updated in place) and `Progress` (lines only).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, Any, TextIO

from rich.console import Console, ConsoleOptions, OverflowMethod, RenderableType, RenderResult
from rich.control import Control
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import ControlType
from rich.table import Table
from rich.text import Text

from peft_mux.errors import printable
from peft_mux.reporting.views import (
    RunView,
    RunWatch,
    TaskView,
    drop_columns,
    number_text,
    share_text,
    shortened,
    time_text,
    window_width,
)
from peft_mux.scheduler.units import rate_text

if TYPE_CHECKING:
    import torch

    from peft_mux.engine.tasks.task_run import TaskRun

# ---------------------------------------------------------------- the table

_STYLES = {
    "running": "green",
    "interrupted": "yellow",
    "paused": "yellow",
    "waiting": "dim",
    "succeeded": "bold green",
    "stopped_early": "bold green",
    "failed": "bold red",
    "removed": "dim",
}
_BAR_STYLES = {"failed": "red", "paused": "yellow", "interrupted": "yellow"}
_FIRST = ("failed", "running", "interrupted", "paused", "waiting", "stopped_early", "succeeded", "removed")
"""Which tasks are shown first if there is no room for all."""
_ARROWS = {"down": ("↓", "v"), "up": ("↑", "^"), "flat": ("→", "-"), "": (" ", " ")}
_FIRST_TO_GO = ("tokens/s", "eval", "eta")
"""Which columns go first in a narrow window."""
_LEAST_WIDTH_OF_BAR = 56
_LEAST_NAME, _LEAST_BAR, _MOST_BAR, _GAP = 8, 6, 24, 2
"""Characters. Longer bars would show nothing more, and be wrapped by a window that gets narrower."""
_LEAST_HEIGHT_OF_TWO = 10
"""Height of a window from which the line of the run may take two."""


class RunTable:
    """A run as a table that fits the window it is drawn into, however large that is at the time.

    Args:
        view: the run.
        max_height: rows that may be filled; by default the height of the window.
    """

    def __init__(self, view: RunView, max_height: int | None = None) -> None:
        """Remember what is to be shown."""
        self.view, self.max_height = view, max_height

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the table for the present size of the window."""
        view, width, height = self.view, options.max_width, self.max_height or console.size.height
        is_plain = not (options.encoding or "").lower().startswith("utf")
        overflow: OverflowMethod = "crop" if is_plain else "ellipsis"
        left = f", {time_text(view.left_s)} left" if view.left_s is not None else ""
        parts = [f"run  {'interrupted, ' * view.is_interrupted}{time_text(view.seconds)}{left}"]
        parts += [f"{rate_text(view.tokens_per_s)} tokens/s"] if view.tokens_per_s else []
        if view.memory_bytes is not None and view.total_bytes:
            parts.append(f"memory {view.memory_bytes / 2**30:.2f}/{view.total_bytes / 2**30:.1f} GiB")
        counts = _counts(view.tasks)
        run_lines = ["  ".join([*parts, counts])]
        if len(run_lines[0]) > width:
            # In a low window a second line would take the room of tasks.
            run_lines = ["  ".join(parts), *([f"     {counts}"] if height >= _LEAST_HEIGHT_OF_TWO else [])]
        # Heads, the lines of the run, and the line on which the cursor rests.
        room = max(1, height - 2 - len(run_lines))
        shown, hidden = list(view.tasks), []
        if len(shown) > room:
            by_rank = sorted(view.tasks, key=lambda task: _FIRST.index(task.status))
            shown, hidden = by_rank[: max(1, room - 1)], by_rank[max(1, room - 1) :]
        yield _task_table(shown, width, view.share_of if view.shows_shares else "", is_plain=is_plain)
        if hidden:
            more = f"... and {len(hidden)} more: {_counts(hidden)}"
            yield Text(more, style="dim", no_wrap=True, overflow=overflow)
        for line in run_lines:
            yield Text(line, style="bold", no_wrap=True, overflow=overflow)


def _task_table(tasks: Sequence[TaskView], width: int, share_of: str, *, is_plain: bool) -> Table:
    """Return the rows of tasks, with the columns that fit; `share_of` is "" if no shares are shown."""
    # The records may come from any program.
    tasks = [replace(task, name=_one_line(task.name), status=_one_line(task.status)) for task in tasks]
    cells = [
        {
            "status": task.status,
            "step": f"{task.step}/{task.num_steps}",
            "loss": f"{number_text(task.loss)} {_ARROWS[task.trend][is_plain]}",
            "eval": number_text(task.eval_loss),
            "tokens/s": rate_text(task.tokens_per_s),
            "share": share_text(task.share),
            "eta": time_text(task.left_s),
        }
        for task in tasks
    ]
    longest = max([len(task.name) for task in tasks] + [4])
    titles = {"share": f"of {share_of}"}
    columns = [name for name in cells[0] if name != "share" or share_of] if cells else []
    widths = {name: max(len(titles.get(name, name)), *(len(own[name]) for own in cells)) for name in columns}
    # Shares are shown if no name is cut for them, and a bar remains.
    drop_columns(widths, ["share"], width, longest + _GAP + _LEAST_BAR)
    least = min(longest, _LEAST_NAME) + (_GAP + _LEAST_BAR if width >= _LEAST_WIDTH_OF_BAR else 0)
    room = drop_columns(widths, _FIRST_TO_GO, width, least)
    # The rest is for names and bars; names come first, because they distinguish tasks.
    bar = min(_MOST_BAR, max(_LEAST_BAR, room - _GAP - longest)) if width >= _LEAST_WIDTH_OF_BAR else 0
    name_width = min(longest, max(_LEAST_NAME, room - (bar + _GAP if bar else 0)))
    options: dict[str, Any] = {"no_wrap": True, "overflow": "crop" if is_plain else "ellipsis"}
    table = Table(box=None, padding=(0, _GAP, 0, 0), header_style="bold", pad_edge=False)
    table.add_column("task", width=name_width, **options)
    table.add_column("status", **options)
    if bar:
        table.add_column("done", width=bar, **options)
    for name in [name for name in widths if name != "status"]:
        table.add_column(titles.get(name, name), justify="right", **options)
    for task, own in zip(tasks, cells, strict=True):
        row: list[RenderableType] = [
            Text(shortened(task.name, name_width, ".." if is_plain else "…")),
            Text(task.status, style=_STYLES.get(task.status, "")),
        ]
        if bar and is_plain:
            filled = min(bar, round(bar * task.step / max(task.num_steps, 1)))
            row.append(Text("#" * filled + "-" * (bar - filled)))
        elif bar:
            style = _BAR_STYLES.get(task.status, "green")
            row.append(ProgressBar(task.num_steps, task.step, complete_style=style, finished_style=style))
        table.add_row(*row, *(own[name] for name in widths if name != "status"))
    return table


def _one_line(text: str) -> str:
    return printable(text).replace("\n", " ")


def _counts(tasks: Sequence[TaskView]) -> str:
    found = [(status, sum(task.status == status for task in tasks)) for status in _FIRST]
    return ", ".join(f"{count} {status}" for status, count in found if count)


def table_text(view: RunView, width: int = 80) -> str:
    """Return the table as text without colours, with all tasks; `width` is in characters."""
    console = Console(width=width, color_system=None, force_terminal=False, legacy_windows=False)
    with console.capture() as captured:
        console.print(RunTable(view, len(view.tasks) + 10))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


# ---------------------------------------------------------------- progress

_FRAMES_PER_S = 4
_LEAST_GAP_S = 0.5
_MOST_SHARE = 0.02
"""Share of the time that drawing in a notebook may take."""
_MOST_CHARTS = 24


class Progress:
    """Prints log lines and nothing that moves; base of what shows more.

    Args:
        stream: where lines go; by default the standard output at the time.
        is_silent: prints nothing, as in processes other than the first.

    Attributes:
        shows_losses: whether losses are part of what is shown, so that no lines are printed for them.
        width: characters of a line.
        watch: follows the tasks; `None` if nothing moves.
    """

    shows_losses = False
    watch: RunWatch | None = None

    def __init__(self, stream: TextIO | None = None, *, is_silent: bool = False) -> None:
        """Print nothing yet."""
        self.stream, self.is_silent = stream, is_silent

    @property
    def width(self) -> int:
        """Characters of a line of the terminal; 80 if the output is a file or a pipe."""
        return window_width()

    def start(self, tasks: Iterable[TaskRun]) -> None:
        """Begin to show tasks."""
        if self.watch is not None:
            self.watch.start(tasks)

    def advance(self, tasks: Iterable[TaskRun]) -> None:
        """Show where the tasks are after a step."""
        if self.watch is not None:
            self.watch.advance(tasks)

    def log(self, line: str) -> None:
        """Print a line; if a full disk or a closed pipe refuses it, only that line is lost."""
        if self.is_silent:
            return
        with suppress(OSError, ValueError):
            stream = self.stream or sys.stdout
            # An output that knows only ASCII shows other letters by their numbers.
            encoding = getattr(stream, "encoding", None) or "utf-8"
            print(line.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)

    def stop(self) -> None:
        """End."""


class LiveProgress(Progress):
    """A table that a thread redraws several times per second, so that the time also moves during long steps.

    Args:
        watch: follows the tasks.
        console: the terminal.
    """

    shows_losses = True

    def __init__(self, watch: RunWatch, console: Console | None = None) -> None:
        """Draw nothing yet."""
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

    def start(self, tasks: Iterable[TaskRun]) -> None:
        """Show every task."""
        super().start(tasks)
        self._live.start()

    def log(self, line: str) -> None:
        """Print above the table."""
        # Lines contain brackets, which rich would read as markup. A closed terminal must not end the run.
        with suppress(OSError, ValueError):
            self.console.print(line, markup=False, highlight=False, soft_wrap=True)

    def stop(self) -> None:
        """Leave the last frame standing."""
        with suppress(OSError, ValueError):
            self._live.stop()

    def _frame(self) -> RenderableType:
        """Return the next frame; first erase the rest of the last one if the window got narrower."""
        assert self.watch is not None, "set by the constructor"
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
        """Show nothing yet."""
        super().__init__()
        self.watch = watch
        self._handle: Any = None
        self._next_s = 0.0

    @property
    def width(self) -> int:
        """Characters of a line below the table."""
        return 110

    def start(self, tasks: Iterable[TaskRun]) -> None:
        """Begin an output in the cell that runs."""
        super().start(tasks)
        self._update(begins=True)

    def advance(self, tasks: Iterable[TaskRun]) -> None:
        """Show where the tasks are, unless they were shown a moment ago."""
        super().advance(tasks)
        began = time.perf_counter()
        if began >= self._next_s:
            self._update()
            took = time.perf_counter() - began
            self._next_s = began + max(_LEAST_GAP_S, took / _MOST_SHARE)

    def log(self, line: str) -> None:
        """Keep a line below the table; lines after the last step are shown at once."""
        assert self.watch is not None, "set by the constructor"
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

        assert self.watch is not None, "set by the constructor"
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
