"""The table of a run under way, as a terminal shows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, OverflowMethod, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from peft_mux.reporting.views import RunView, TaskView
from peft_mux.reporting.words import number_text, rate_text, time_text

_STYLES = {
    "running": "green",
    "paused": "yellow",
    "waiting": "dim",
    "succeeded": "bold green",
    "stopped_early": "bold green",
    "failed": "bold red",
    "removed": "dim",
}
_FIRST = ("failed", "running", "paused", "waiting", "stopped_early", "succeeded", "removed")
"""Which tasks are shown where not all have room."""
_ARROWS = {"down": ("↓", "v"), "up": ("↑", "^"), "flat": ("→", "-"), "": (" ", " ")}
_COLUMNS = (("eta", 40), ("tokens/s", 76), ("eval", 66), ("bar", 56))
"""Columns beside name, status, step and loss, each with the width from which on it is there."""
_LEAST_NAME, _LEAST_BAR = 8, 6


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
        console.print(RunTable(view, len(view.tasks) + 4))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _rows(view: RunView, width: int, height: int, *, is_plain: bool) -> list[RenderableType]:
    # Heads, the line of the run, and the line on which the cursor rests.
    room = max(1, height - 3)
    overflow: OverflowMethod = "crop" if is_plain else "ellipsis"
    shown, hidden = list(view.tasks), []
    if len(shown) > room:
        by_rank = sorted(view.tasks, key=lambda task: _FIRST.index(task.status))
        shown, hidden = by_rank[: max(1, room - 1)], by_rank[max(1, room - 1) :]
    rows: list[RenderableType] = [_table(shown, width, is_plain=is_plain)]
    if hidden:
        counts = ", ".join(f"{sum(task.status == status for task in hidden)} {status}" for status in _present(hidden))
        rows.append(Text(f"... and {len(hidden)} more: {counts}", style="dim", no_wrap=True, overflow=overflow))
    return [*rows, _total(view, overflow)]


def _present(tasks: Sequence[TaskView]) -> list[str]:
    return [status for status in _FIRST if any(task.status == status for task in tasks)]


def _table(tasks: Sequence[TaskView], width: int, *, is_plain: bool) -> Table:
    extra = {name for name, least in _COLUMNS if width >= least}
    table = Table(box=None, padding=(0, 2, 0, 0), expand=True, header_style="bold", pad_edge=False)
    overflow: OverflowMethod = "crop" if is_plain else "ellipsis"
    options: dict[str, Any] = {"no_wrap": True, "overflow": overflow}
    longest = max((len(task.name) for task in tasks), default=0)
    table.add_column("task", width=min(max(longest, 4), max(_LEAST_NAME, width - 68)), **options)
    table.add_column("status", width=max((len(task.status) for task in tasks), default=6), **options)
    if "bar" in extra:
        table.add_column("done", ratio=1, min_width=_LEAST_BAR, **options)
    table.add_column("step", justify="right", **options)
    table.add_column("loss", justify="right", **options)
    for name in ("eval", "tokens/s", "eta"):
        if name in extra:
            table.add_column(name, justify="right", **options)
    for task in tasks:
        table.add_row(*_cells(task, extra, is_plain=is_plain))
    return table


def _cells(task: TaskView, extra: set[str], *, is_plain: bool) -> list[RenderableType]:
    style = _STYLES.get(task.status, "")
    bar_style = "red" if task.status == "failed" else "green" if task.status != "paused" else "yellow"
    bar = ProgressBar(task.num_steps, task.step, complete_style=bar_style, finished_style=bar_style)
    optional = {
        "bar": [_plain_bar(task) if is_plain else bar],
        "eval": [number_text(task.eval_loss)],
        "tokens/s": [rate_text(task.tokens_per_s)],
        "eta": [time_text(task.left_s)],
    }
    arrow = _ARROWS[task.trend][is_plain]
    return [
        Text(task.name, overflow="crop" if is_plain else "ellipsis"),
        Text(task.status, style=style),
        *(optional["bar"] if "bar" in extra else []),
        f"{task.step}/{task.num_steps}",
        f"{number_text(task.loss)} {arrow}",
        *(cell for name in ("eval", "tokens/s", "eta") if name in extra for cell in optional[name]),
    ]


def _plain_bar(task: TaskView) -> Text:
    filled = round(10 * task.step / max(task.num_steps, 1))
    return Text("#" * filled + "-" * (10 - filled))


def _total(view: RunView, overflow: OverflowMethod) -> Text:
    """Return the line of the whole run."""
    counts = ", ".join(f"{view.count(status)} {status}" for status in _present(view.tasks))
    left = f", {time_text(view.left_s)} left" if view.left_s is not None else ""
    parts = [f"run  {time_text(view.seconds)}{left}"]
    if view.tokens_per_s:
        parts.append(f"{rate_text(view.tokens_per_s)} tokens/s")
    if view.memory_bytes is not None and view.total_bytes:
        parts.append(f"memory {view.memory_bytes / 2**30:.2f}/{view.total_bytes / 2**30:.1f} GiB")
    # Last, as a narrow window cuts what is there.
    return Text("   ".join([*parts, counts]), style="bold", no_wrap=True, overflow=overflow)
