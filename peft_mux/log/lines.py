"""The lines that a run prints: text of any width, and `Progress`, which prints lines and nothing that moves."""

from __future__ import annotations

import re
import shutil
import sys
import textwrap
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:  # commands that only print lines need neither transformers nor PEFT
    from peft_mux.engine.tasks.active_task import ActiveTask


def counted(number: int, word: str) -> str:
    """Return a number with its noun, such as `1 step` or `1,200 steps`."""
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def time_text(seconds: float | None) -> str:
    """Return a time as 0:07, 12:03 or 3:25:00; "-" for none."""
    if seconds is None:
        return "-"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


FILE_WIDTH = 10_000
"""Characters of a line if the output is a file or a pipe: lines there are not broken."""


def window_width() -> int:
    """Return the characters of a line: `COLUMNS`, else those of the terminal, else `FILE_WIDTH`."""
    return shutil.get_terminal_size((FILE_WIDTH, 24)).columns


_LABEL = re.compile(r" *\S+(?: \S+)*? {2,}")
_CELL = re.compile(r"(?<= {2})(?:\S+ \S+|(?=.{1,24}(?: {2}|$))\S+(?: \S+)+)(?= {2}|$)")
"""Two words, such as a name and its number, or up to 24 characters."""
_BEFORE_UNIT = re.compile(r"(?<=\d) (?=%|(?:ms|s|[KMG]iB)\b)")
_MOST_INDENT = 32


def wrapped(text: str, width: int) -> str:
    """Return text whose long lines are broken at spaces; words that are wider than `width` stay whole.

    The rest of a broken line begins below the text after its label (`note  tales: ...`), else 4 characters further in.
    Short cells and those of two words, which two spaces separate from others (`step 5  sql 2.31`), stay whole, too.
    """
    lines = []
    for line in text.split("\n"):
        if len(line) <= width:
            lines.append(line)
            continue
        label = _LABEL.match(line)
        indent = len(line) - len(line.lstrip()) + 4 if label is None else label.end()
        indent = " " * (indent if indent <= min(_MOST_INDENT, width // 2) else 4)
        line = _CELL.sub(lambda cell: cell[0].replace(" ", "\0"), line)
        line = _BEFORE_UNIT.sub("\0", line)
        lines += textwrap.wrap(line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines).replace("\0", " ")


class Progress:
    """Prints log lines and nothing that moves; base of what shows more.

    Args:
        stream: where lines go; by default the standard output at the time.
        is_silent: prints nothing, as in processes other than the first.

    Attributes:
        shows_losses: whether losses are part of what is shown, so that no lines are printed for them.
        width: characters of a line.
    """

    shows_losses = False

    def __init__(self, stream: TextIO | None = None, *, is_silent: bool = False) -> None:
        self.stream, self.is_silent = stream, is_silent

    @property
    def width(self) -> int:
        """Characters of a line of the terminal; in a file or a pipe lines are not broken."""
        return window_width()

    def start(self, tasks: Iterable[ActiveTask]) -> None:
        """Begin to show tasks."""

    def advance(self, tasks: Iterable[ActiveTask]) -> None:
        """Show where the tasks are after a step."""

    def log(self, line: str) -> None:
        """Print a line; if a full disk or a closed pipe refuses it, only that line is lost."""
        if self.is_silent:
            return
        with suppress(Exception):
            stream = self.stream or sys.stdout
            # An output that knows only ASCII shows other letters by their numbers.
            encoding = getattr(stream, "encoding", None) or "utf-8"
            print(line.encode(encoding, "backslashreplace").decode(encoding), file=stream, flush=True)

    def stop(self) -> None:
        """End."""
