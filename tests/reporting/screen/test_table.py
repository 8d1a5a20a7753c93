"""The table of a run in a window of 80 characters, in smaller ones, and with more tasks than have room."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from peft_mux.log.lines import time_text
from peft_mux.reporting.table import RunTable, table_text
from peft_mux.reporting.views import RunView, TaskView
from peft_mux.scheduler.units import rate_text

TASKS = (
    TaskView("sql", "running", 570, 1000, "", 0.84, "down", 0.91, 9812.0, 720.4),
    TaskView("math", "paused", 210, 1000, "", 1.37, "flat", 1.4),
    TaskView("a-name-that-is-much-too-long-for-a-column", "failed", 3, 60, "nan", None),
    TaskView("tales", "waiting", 0, 24),
    TaskView("sums", "succeeded", 60, 60, "", 123456.0, "up", 0.0123),
)
RUN = RunView(TASKS, 570, 3725.0, int(58.1 * 2**30), 139 * 2**30)


def drawn(view: RunView, width: int, height: int, *, encoding: str = "utf-8") -> list[str]:
    stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
    console = Console(file=stream, width=width, height=height, color_system=None, legacy_windows=False)
    console.print(RunTable(view))
    stream.seek(0)
    return stream.read().splitlines()


def many(count: int) -> RunView:
    statuses = ("running", "waiting", "succeeded", "failed", "paused")
    return RunView(tuple(TaskView(f"t{number}", statuses[number % 5], 1, 9) for number in range(count)))


def test_at_a_width_of_80_the_table_is_this() -> None:
    assert table_text(RUN, 80).splitlines() == [
        "task           status     done        step         loss    eval  tokens/s    eta",
        "sql            running    ━━━     570/1000     0.8400 ↓  0.9100     9,812  12:00",
        "math           paused     ━       210/1000     1.3700 →  1.4000         -      -",
        "a-name…column  failed                 3/60            -       -         -      -",
        "tales          waiting                0/24            -       -         -      -",
        "sums           succeeded  ━━━━━━     60/60  1.235e+05 ↑  0.0123         -      -",
        "run  1:02:05, 12:00 left  9,812 tokens/s  memory 58.10/139.0 GiB",
        "     1 failed, 1 running, 1 paused, 1 waiting, 1 succeeded",
    ]


def test_shares_of_several_tasks_are_a_column_where_no_name_is_cut_for_it() -> None:
    tasks = tuple(replace(one, share=0.25) for one in TASKS[:2])
    view = replace(RUN, tasks=tasks, share_of="tokens")
    head, sql, *_ = drawn(view, 80, 24)
    assert head.endswith("tokens/s  of tokens    eta")
    assert sql.split()[-2:] == ["25%", "12:00"]
    assert "of time" in drawn(replace(view, share_of="time"), 80, 24)[0]
    for other in (replace(view, tasks=tasks[:1]), replace(view, tasks=(*tasks, TASKS[2]))):
        assert "of tokens" not in drawn(other, 80, 24)[0]
    assert "of tokens" in drawn(replace(view, tasks=(*tasks, TASKS[2])), 120, 24)[0]


def test_names_that_differ_in_their_middle_or_at_their_end_stay_apart_at_any_width() -> None:
    names = [f"sql-learning_rate-{rate}-r-{rank}" for rate in ("1e-4", "1e-3") for rank in (8, 16)]
    tasks = tuple(TaskView(name, "running", 7, 99, "", 2.5, "down", 2.6, 812.0, 20.4) for name in names)
    for width in (56, 80, 120):
        lines = drawn(RunView(tasks), width, 24)[1:5]
        assert all(line.split()[0].endswith(name[-3:]) for line, name in zip(lines, names, strict=True))
    assert [line.split()[0] for line in drawn(RunView(tasks), 100, 24)[1:5]] == names


def test_at_any_width_numbers_are_whole_no_line_is_too_wide_and_the_table_is_not_stretched() -> None:
    for width in (30, *range(42, 121), 200, 300):
        lines = drawn(RUN, width, 40)
        assert max(map(len, lines)) <= width
        assert max(map(len, lines[:-1])) <= 130
        assert width < 42 or ("570/1000" in lines[1] and "1.235e+05 ↑" in lines[5]), width


@pytest.mark.parametrize(
    ("width", "there", "gone"),
    [
        (80, ["done", "eval", "tokens/s", "eta"], []),
        (70, ["done", "eval", "eta"], ["tokens/s"]),
        (60, ["done", "eta"], ["eval", "tokens/s"]),
        (30, ["task", "status", "step", "loss"], ["done", "eval", "tokens/s", "eta"]),
    ],
)
def test_narrow_windows_leave_out_whole_columns(width: int, there: list[str], gone: list[str]) -> None:
    head = drawn(RUN, width, 40)[0]
    assert all(name in head for name in there)
    assert not any(name in head for name in gone)


@pytest.mark.parametrize("count", [1, 7, 20, 21, 22, 200])
def test_the_table_and_the_cursor_fit_into_the_window(count: int) -> None:
    lines = drawn(many(count), 80, 24)
    assert len(lines) <= 23
    names = [line.split()[0] for line in lines if line.startswith("t") and line[1].isdigit()]
    assert len(names) == (count if count <= 21 else 20)
    assert count > 21 or names == [f"t{number}" for number in range(count)], "in the order in which they came"


def test_where_not_all_have_room_failed_and_running_tasks_come_first_and_the_others_are_counted() -> None:
    lines = drawn(many(25), 80, 12)
    words = [line.split()[1] for line in lines[1:-2]]
    assert words == ["failed"] * 5 + ["running"] * 3
    assert lines[-2] == "... and 17 more: 2 running, 5 paused, 5 waiting, 5 succeeded"
    assert "5 failed, 5 running, 5 paused, 5 waiting, 5 succeeded" in lines[-1]


def test_a_terminal_without_unicode_gets_plain_characters() -> None:
    lines = drawn(RUN, 80, 24, encoding="ascii")
    assert "  ###---  " in lines[1]
    assert lines[3].startswith("a-name..olumn ")
    assert "0.8400 v" in lines[1]
    assert all(line.isascii() for line in lines)


def test_a_run_of_unknown_memory_and_without_steps_says_nothing_of_them() -> None:
    bare = replace(RUN, memory_bytes=None, tasks=TASKS[3:4])
    assert table_text(bare).splitlines()[-1] == "run  1:02:05  1 waiting"


def test_rates_and_times_take_few_characters() -> None:
    rates = {None: "-", 7.4: "7", 9_812: "9,812", 13_090: "13.1k", 2.5e6: "2.5M"}
    assert {rate: rate_text(rate) for rate in rates} == rates
    times = {None: "-", 0.4: "0:00", 723: "12:03", 12_300: "3:25:00"}
    assert {seconds: time_text(seconds) for seconds in times} == times
