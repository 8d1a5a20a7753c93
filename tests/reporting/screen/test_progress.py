"""Where a run shows its progress: what is chosen for which place, and what a terminal is sent."""

from __future__ import annotations

import io
import sys
from typing import Any

import pytest
import torch
from rich.console import Console

from peft_mux.engine.allocator import memory_now
from peft_mux.reporting import screen as progress
from peft_mux.reporting.screen import LiveProgress, Progress, make_progress
from peft_mux.reporting.views import RunWatch
from tests.reporting.lab import shown_task

CPU = torch.device("cpu")
UP = "\x1b[1A"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def task(name: str) -> Any:
    return shown_task(name, step=3, num_steps=9, last_loss=1.5, num_tokens=10, eval_data={})


def made(monkeypatch: pytest.MonkeyPatch, stream: Any, **options: bool) -> Any:
    monkeypatch.setattr(sys, "stdout", stream)
    return make_progress(**{"enabled": True, "is_main_process": True, **options}, device=CPU)


@pytest.mark.parametrize(
    ("stream", "term", "options", "kind"),
    [
        (Terminal, "xterm", {}, LiveProgress),
        (Terminal, "dumb", {}, Progress),
        (io.StringIO, "xterm", {}, Progress),
        (Terminal, "xterm", {"enabled": False}, Progress),
        (Terminal, "xterm", {"is_main_process": False}, Progress),
    ],
)
def test_a_table_is_drawn_only_by_the_first_process_and_where_a_cursor_moves(
    stream: Any, term: str, options: dict[str, bool], kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", term)
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    shown = made(monkeypatch, stream(), **options)
    assert type(shown) is kind
    assert shown.is_silent is (options == {"is_main_process": False})


def test_in_a_kernel_of_a_notebook_rich_takes_no_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "in_notebook", lambda: True)
    assert type(made(monkeypatch, Terminal())).__name__ == "NotebookProgress"


def live(width: int = 80) -> tuple[LiveProgress, Any]:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, height=24, color_system=None)
    shown = LiveProgress(RunWatch(), console)
    shown._live.auto_refresh = False  # frames come when the test asks for them
    return shown, console


def test_lines_and_what_tasks_print_come_above_the_table_and_the_last_frame_stays(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shown, console = live()
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    shown.start([task("a"), task("b")])
    shown._live.refresh()
    print("from a callback")
    shown.log("a line with [brackets] in it")
    shown.stop()
    printed = console.file.getvalue()
    assert printed.index("a line with [brackets] in it") < printed.rindex("b     running")
    assert printed.count("a line with") == printed.count("from a callback") == 1
    assert printed.rstrip().endswith("\x1b[?25h"), "the cursor is there again"


@pytest.mark.parametrize(("width", "rows"), [(80, 4), (120, 4), (40, 8)])
def test_in_a_narrower_window_the_rows_that_were_wrapped_are_taken_away_too(width: int, rows: int) -> None:
    shown, console = live()
    shown.start([task("a"), task("b")])
    shown._live.refresh()
    console.width = width
    before = len(console.file.getvalue())
    shown._live.refresh()
    sent = console.file.getvalue()[before:]
    shown.stop()
    # Of four lines, the line of the run has 25 characters.
    assert sent.count(UP) == rows - 1 - (width == 40)


def test_a_terminal_that_is_gone_ends_no_run() -> None:
    tried: list[str] = []

    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            tried.append(text)
            raise OSError(5, "Input/output error")

    shown, console = live()
    shown.start([])
    console.file = Gone()
    shown.log("lost above the table")
    shown.stop()
    assert "lost above the table" in "".join(tried)
    Progress(Gone()).log("lost line")
    assert "lost line" in tried[-1]


def test_the_memory_of_the_host_is_what_this_process_holds() -> None:
    held, total = memory_now(CPU) or (0, 0)
    assert 2**20 < held < total
