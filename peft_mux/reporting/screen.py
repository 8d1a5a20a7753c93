"""How much memory this process holds now, for those who look on, and the most that it has held."""

# MERGED: The table of a run under way, as a terminal shows it.
# MERGED: `LiveProgress`: the table of a run, drawn in place in a terminal, with log lines above it.
# MERGED: `NotebookProgress`: one output of a notebook's cell, updated in place.
# MERGED: `Progress`: where a run shows how it goes on: a live table in a terminal, an output in a notebook, or lines.

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from math import ceil
from typing import Any, Protocol, TextIO

import psutil
import torch
from rich.console import Console, ConsoleOptions, Group, OverflowMethod, RenderableType, RenderResult
from rich.control import Control
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.segment import ControlType
from rich.table import Table
from rich.text import Text

from peft_mux.planning.profiling.memory import host_memory_bytes
from peft_mux.reporting.page import run_html
from peft_mux.reporting.views import (
    RunView,
    RunWatch,
    ShownTask,
    TaskView,
    number_text,
    rate_text,
    share_text,
    shortened,
    time_text,
)

try:
    import resource
except ImportError:  # Windows has none
    resource = None


def memory_now(device: torch.device) -> Callable[[], tuple[int, int] | None]:
    """Return a function that gives the bytes held now and those of the device; `None` where they are not known.

    Args:
        device: a GPU, whose allocated memory counts, or else the host, with all that this process holds of it.
    """

    def of_gpu() -> tuple[int, int]:
        return torch.cuda.memory_allocated(device), torch.cuda.get_device_properties(device).total_memory

    process = psutil.Process()

    def of_host() -> tuple[int, int] | None:
        total = host_memory_bytes()
        try:
            return None if total is None else (process.memory_info().rss, total)
        except (psutil.Error, OSError):
            return None

    return of_gpu if device.type == "cuda" else of_host


def peak_bytes(device: torch.device | None = None) -> int:
    """Return the most bytes that this process has held: of its GPU, else of the host; 0 where nobody knows.

    Args:
        device: the device that it trains on; by default a GPU where it uses one.
    """
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if resource is None:
        return 0
    # Kilobytes on Linux, bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


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
_FIRST = ("failed", "running", "interrupted", "paused", "waiting", "stopped_early", "succeeded", "removed")
"""Which tasks are shown where not all have room."""
_ARROWS = {"down": ("↓", "v"), "up": ("↑", "^"), "flat": ("→", "-"), "": (" ", " ")}
_COLUMNS = (("eval", 66), ("tokens/s", 76), ("share", 80), ("eta", 40))
"""Columns beside name, status, bar, step and loss, each with the width of a window from which on it is there."""
_FIRST_TO_GO = ("share", "tokens/s", "eval", "eta")
"""Which of them make room where numbers are long."""
_LEAST_WIDTH_OF_BAR = 56
_LEAST_NAME, _LEAST_BAR, _MOST_BAR, _GAP = 8, 6, 24, 2
"""Characters. Longer bars would tell nothing more, and be wrapped by a window that gets narrower."""
_LEAST_HEIGHT_OF_TWO = 10
"""Height of a window from which on the line of the run may take two."""


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
        height = self.max_height or console.size.height
        is_plain = not (options.encoding or "").lower().startswith("utf")
        yield Group(*_rows(self.view, options.max_width, height, is_plain=is_plain))


def table_text(view: RunView, width: int = 80) -> str:
    """Return the table as text without colours, all tasks included.

    Args:
        view: the run.
        width: characters of a line.
    """
    console = Console(width=width, color_system=None, force_terminal=False, legacy_windows=False)
    with console.capture() as captured:
        console.print(RunTable(view, len(view.tasks) + 10))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _rows(view: RunView, width: int, height: int, *, is_plain: bool) -> list[RenderableType]:
    overflow: OverflowMethod = "crop" if is_plain else "ellipsis"
    total = _total(view, width, overflow)
    # In a low window a second line would take the room of tasks.
    total = total if height >= _LEAST_HEIGHT_OF_TWO else total[:1]
    # Heads, the lines of the run, and the line on which the cursor rests.
    room = max(1, height - 2 - len(total))
    shown, hidden = list(view.tasks), []
    if len(shown) > room:
        by_rank = sorted(view.tasks, key=lambda task: _FIRST.index(task.status))
        shown, hidden = by_rank[: max(1, room - 1)], by_rank[max(1, room - 1) :]
    share_of = view.share_of if view.shows_shares else ""
    rows: list[RenderableType] = [_table(shown, width, share_of, is_plain=is_plain)]
    if hidden:
        rows.append(
            Text(f"... and {len(hidden)} more: {_counts(hidden)}", style="dim", no_wrap=True, overflow=overflow)
        )
    return [*rows, *total]


def _counts(tasks: Sequence[TaskView]) -> str:
    found = [(status, sum(task.status == status for task in tasks)) for status in _FIRST]
    return ", ".join(f"{count} {status}" for status, count in found if count)


def _table(tasks: Sequence[TaskView], width: int, share_of: str, *, is_plain: bool) -> Table:
    overflow: OverflowMethod = "crop" if is_plain else "ellipsis"
    options: dict[str, Any] = {"no_wrap": True, "overflow": overflow}
    heads, words, widths, room = _fitting(tasks, width, share_of, is_plain=is_plain)
    # What is left is for names and bars; names come first, as they tell one task from another.
    longest = max([len(task.name) for task in tasks] + [4])
    bar = min(_MOST_BAR, max(_LEAST_BAR, room - _GAP - longest)) if width >= _LEAST_WIDTH_OF_BAR else 0
    name = min(longest, max(_LEAST_NAME, room - (bar + _GAP if bar else 0)))
    table = Table(box=None, padding=(0, _GAP, 0, 0), header_style="bold", pad_edge=False)
    table.add_column("task", width=name, **options)
    table.add_column("status", width=widths[0], **options)
    if bar:
        table.add_column("done", width=bar, **options)
    for head in heads[1:]:
        table.add_column(head, justify="right", **options)
    for task, own in zip(tasks, words, strict=True):
        shown = Text(shortened(task.name, name, ".." if is_plain else "…"))
        status = Text(own[0], style=_STYLES.get(task.status, ""))
        table.add_row(shown, status, *([_bar(task, bar, is_plain=is_plain)] if bar else []), *own[1:])
    return table


def _fitting(
    tasks: Sequence[TaskView], width: int, share_of: str, *, is_plain: bool
) -> tuple[list[str], list[list[str]], list[int], int]:
    """Return heads, cells of each task and widths of the columns that have room beside names, and what room is left."""
    heads = ["status", "step", "loss", *(name for name, least in _COLUMNS if width >= least)]
    heads = [name for name in heads if name != "share" or share_of]
    names = max([len(task.name) for task in tasks] + [4])
    while True:
        words = [[_word(task, head, is_plain=is_plain) for head in heads] for task in tasks]
        titles = [f"of {share_of}" if name == "share" else name for name in heads]
        widths = [max(map(len, column)) for column in zip(titles, *words, strict=True)]
        room = width - sum(widths) - _GAP * len(widths)
        # Shares are there where they cost no part of a name, and leave a bar.
        if room >= (names + _GAP + _LEAST_BAR if "share" in heads else _LEAST_NAME) or len(heads) == 3:
            return titles, words, widths, room
        heads.remove(next(name for name in _FIRST_TO_GO if name in heads))


def _word(task: TaskView, head: str, *, is_plain: bool) -> str:
    """Return the cell of a task in one of the columns beside its name and its bar."""
    return {
        "status": task.status,
        "step": f"{task.step}/{task.num_steps}",
        "loss": f"{number_text(task.loss)} {_ARROWS[task.trend][is_plain]}",
        "eval": number_text(task.eval_loss),
        "tokens/s": rate_text(task.tokens_per_s),
        "share": share_text(task.share),
        "eta": time_text(task.left_s),
    }[head]


def _bar(task: TaskView, width: int, *, is_plain: bool) -> RenderableType:
    if is_plain:
        filled = min(width, round(width * task.step / max(task.num_steps, 1)))
        return Text("#" * filled + "-" * (width - filled))
    style = {"failed": "red", "paused": "yellow", "interrupted": "yellow"}.get(task.status, "green")
    return ProgressBar(task.num_steps, task.step, complete_style=style, finished_style=style)


def _total(view: RunView, width: int, overflow: OverflowMethod) -> list[Text]:
    """Return the line of the whole run, or two where one has no room for it."""
    left = f", {time_text(view.left_s)} left" if view.left_s is not None else ""
    parts = [f"run  {'interrupted, ' if view.is_interrupted else ''}{time_text(view.seconds)}{left}"]
    if view.tokens_per_s:
        parts.append(f"{rate_text(view.tokens_per_s)} tokens/s")
    if view.memory_bytes is not None and view.total_bytes:
        parts.append(f"memory {view.memory_bytes / 2**30:.2f}/{view.total_bytes / 2**30:.1f} GiB")
    counts = _counts(view.tasks)
    line = "  ".join([*parts, counts])
    lines = [line] if len(line) <= width else ["  ".join(parts), f"     {counts}"]
    return [Text(one, style="bold", no_wrap=True, overflow=overflow) for one in lines]


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
        return NotebookProgress(RunWatch(memory_now(device)))
    if enabled and _is_terminal(sys.stdout):
        from rich.console import Console

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

        from peft_mux.reporting.page import run_html

        display(HTML(run_html(view)))
    else:
        PlainProgress().log(table_text(view))
