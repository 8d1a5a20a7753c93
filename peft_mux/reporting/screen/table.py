"""The table of a run under way, as a terminal shows it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console, ConsoleOptions, Group, OverflowMethod, RenderableType, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from peft_mux.reporting.views import RunView, TaskView
from peft_mux.reporting.words import number_text, rate_text, share_text, shortened, time_text

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
