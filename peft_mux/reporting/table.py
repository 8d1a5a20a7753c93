"""The table of a run: `RunTable` draws a `RunView` for any width and height of a window."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rich.console import Console, ConsoleOptions, OverflowMethod, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from peft_mux.errors import printable
from peft_mux.log.lines import time_text
from peft_mux.reporting.views import RunView, TaskView, drop_columns, number_text, share_text, shortened
from peft_mux.scheduler.units import rate_text

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
    widths = {name: max(len(titles.get(name, name)), *(len(line[name]) for line in cells)) for name in columns}
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
    for task, line in zip(tasks, cells, strict=True):
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
        table.add_row(*row, *(line[name] for name in widths if name != "status"))
    return table


def _one_line(text: str) -> str:
    return printable(text).replace("\n", " ")


def _counts(tasks: Sequence[TaskView]) -> str:
    counts = [(status, sum(task.status == status for task in tasks)) for status in _FIRST]
    return ", ".join(f"{count} {status}" for status, count in counts if count)


def table_text(view: RunView, width: int = 80) -> str:
    """Return the table as text without colours, with all tasks; `width` is in characters."""
    console = Console(width=width, color_system=None, force_terminal=False, force_jupyter=False, legacy_windows=False)
    with console.capture() as captured:
        console.print(RunTable(view, len(view.tasks) + 10))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())
