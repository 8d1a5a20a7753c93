"""The table at the end of a run."""

from __future__ import annotations

import math
import shlex
import textwrap
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from peft_mux.engine.tasks.task_run import TaskRun
from peft_mux.reporting.views import curve_of, number_text, share_text, shortened, time_text
from peft_mux.task import TaskStatus


class RankRecord(NamedTuple):
    """What one process has done in a run.

    Attributes:
        rank: the rank of the process.
        tokens: tokens that went through its backbone.
        seconds: seconds that it has trained.
        waited_seconds: those of these seconds that it waited for other processes on the host.
        peak_bytes: most memory that the process has held: of its GPU, else of the host.
        part: which part of the model it held, in words.
    """

    rank: int
    tokens: int
    seconds: float
    waited_seconds: float
    peak_bytes: int
    part: str


class ReportRow(NamedTuple):
    """How one task has ended, or where it stands.

    Attributes:
        name: name of the task.
        status: where it stands.
        reason: why it failed, stopped or waits; "" where there is nothing to say.
        step: optimizer steps taken.
        num_steps: optimizer steps to take.
        loss: loss of its last step; `None` before the first.
        best_loss: least loss of training rows, of those that were logged and the last; `None` where there is none.
        eval_loss: held-out loss of the adapter that was kept: the best where it went back to that; `None` without one.
        seconds: seconds of the steps that it took part in, in this process.
        num_tokens: tokens that it was trained on.
        place: folder of its adapter as it is now; `None` where there is none.
        time_share: its share of the time of the run's steps in this process, from 0 to 1; the time of a step of several
            tasks is divided by their tokens. `None` before the first step.
    """

    name: str
    status: str
    reason: str
    step: int
    num_steps: int
    loss: float | None
    best_loss: float | None
    eval_loss: float | None
    seconds: float
    num_tokens: int
    place: Path | None
    time_share: float | None = None


def report_row(run: TaskRun, place: Path | None, seconds: float, status: TaskStatus | None = None) -> ReportRow:
    """Return the line of a task, but for its share of the time, which is known when all are.

    Args:
        run: the task.
        place: folder of its adapter as it is now; `None` where there is none.
        seconds: seconds of the steps that it took part in.
        status: how it is told of; by default its status.
    """
    logged = [loss for _, loss in curve_of(run.state.log_history, "loss")]
    return ReportRow(
        run.name,
        (status or run.status).value,
        run.reason,
        run.step,
        run.num_steps,
        run.last_loss if math.isfinite(run.last_loss) else None,
        # Logged losses are means over the steps since the log before, which the last one by itself may be below.
        min((loss for loss in (run.last_loss, *logged) if math.isfinite(loss)), default=None),
        _kept_eval_loss(run),
        seconds,
        run.num_tokens,
        place,
    )


def _kept_eval_loss(run: TaskRun) -> float | None:
    points = curve_of(run.state.log_history, "eval_loss")
    goes_back = (
        run.best.keeps_weights
        and run.best.value is not None
        and run.status in (TaskStatus.SUCCEEDED, TaskStatus.STOPPED_EARLY)
    )
    if goes_back:
        points = tuple(point for point in points if point[0] == run.best.step) or points
    return points[-1][1] if points else None


def report_table(
    rows: Iterable[ReportRow],
    records: Sequence[RankRecord] = (),
    notes: Sequence[str] = (),
    width: int | None = None,
    *,
    is_interrupted: bool = False,
) -> str:
    """Return one line a task: how it ended, its steps, its losses, its time, its tokens, and where its adapter lies.

    Where several processes have trained, one line a process follows: its tokens, its seconds, how many it waited, its
    memory, and which part of the model it held.

    Args:
        rows: the tasks of the run, in the order of the lines.
        records: what each process has done, by rank.
        notes: lines for the end, such as how fast the run was and what to type next.
        width: characters of the window, to which all is fitted; by default as many as it takes.
        is_interrupted: whether nobody trains the run, so that nobody waits for tasks which are to go on.
    """
    rows = tuple(rows)
    cells = _table_cells(rows, is_interrupted)
    lines = _aligned(cells)
    if width is not None and max(map(len, lines)) > width:
        lines = _narrow(cells, rows, width)
    lines += [f"{row.name}: {row.reason}" for row in rows if row.reason]
    lines += _process_lines(records) if len(records) > 1 else []
    lines += [*([""] if notes else []), *notes]
    return "\n".join(lines if width is None else [fitted for line in lines for fitted in _fitted(line, width)])


def _aligned(cells: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for own in cells:
        left = [cell.ljust(width) for cell, width in zip(own[:2], widths, strict=False)]
        right = [cell.rjust(width) for cell, width in zip(own[2:-1], widths[2:], strict=False)]
        # Paths come last, as they are the longest, and are copied from here.
        lines.append("  ".join([*left, *right, own[-1]]).rstrip())
    return lines


def _narrow(cells: Sequence[Sequence[str]], rows: Sequence[ReportRow], width: int) -> list[str]:
    """Return the lines without paths, which are told once for all below, and with names cut as far as they must be."""
    rest = [(*own[1:-1], "") for own in cells]
    room = max(_LEAST_NAME, width - max(map(len, _aligned([("", *own) for own in rest]))))
    lines = _aligned([(shortened(own[0], room), *other) for own, other in zip(cells, rest, strict=True)])
    folders = dict.fromkeys(row.place.parent for row in rows if row.place is not None)
    lines += [f"adapters are in {folder}/TASK" for folder in folders]
    without = [row.name for row in rows if row.place is None]
    return [*lines, *([f"not saved: {', '.join(without)}"] if without else [])]


def _fitted(line: str, width: int) -> list[str]:
    """Return a line in as many as the window needs, broken between words; commands stay whole, without their remark."""
    if len(line) <= width:
        return [line]
    if _REMARK in line:
        return [line[: line.index(_REMARK)].rstrip()]
    return textwrap.wrap(
        line, max(width, 20), subsequent_indent=" " * 7, break_long_words=False, break_on_hyphens=False
    )


_LEAST_NAME = 10
_REMARK = "  # "


class RunReport(str):
    """The report of a run: its text, which notebooks show as a table.

    Args:
        rows: the tasks of the run, in the order of the lines.
        records: what each process has done, by rank.
        notes: lines for the end.
        is_interrupted: whether nobody trains the run: running tasks are shown as interrupted, and recorded as running.

    Attributes:
        rows: the tasks of the run.
        lines: what stands below them.
        is_interrupted: whether nobody trains the run.
    """

    rows: tuple[ReportRow, ...]
    lines: str
    is_interrupted: bool
    _made_of: tuple[Any, ...]

    def __new__(
        cls,
        rows: Iterable[ReportRow],
        records: Sequence[RankRecord] = (),
        notes: Sequence[str] = (),
        is_interrupted: bool = False,
    ) -> RunReport:
        """Write the text."""
        rows = tuple(rows)
        made = super().__new__(cls, report_table(rows, records, notes, is_interrupted=is_interrupted))
        made.rows, made.is_interrupted = rows, is_interrupted
        made.lines = "\n".join([*(_process_lines(records) if len(records) > 1 else []), "", *notes]).strip("\n")
        made._made_of = rows, tuple(records), tuple(notes), is_interrupted
        return made

    def fitted(self, width: int | None) -> str:
        """Return the text for a window.

        Args:
            width: its characters; `None` where lines may be of any length.
        """
        *parts, is_interrupted = self._made_of
        return report_table(*parts, width=width, is_interrupted=is_interrupted)

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel between processes as what the report was made of."""
        return RunReport, self._made_of

    def _repr_html_(self) -> str:
        """Return the report as a table, and its lines as text."""
        heads, *cells = _table_cells(self.rows, self.is_interrupted)
        rows = zip(self.rows, cells, strict=True)
        body = "".join(f"{_html_row('td', heads, own)}{_html_reason(row, len(heads))}" for row, own in rows)
        lines = f"<pre style='white-space:pre-wrap'>{escape(self.lines)}</pre>" if self.lines else ""
        return f"<div style='overflow-x:auto'><table>{_html_row('th', heads, heads)}{body}</table></div>{lines}"


def _html_row(tag: str, heads: Sequence[str], cells: Sequence[str]) -> str:
    """Return a row, its numbers to the right."""
    sides = ["left" if head in ("task", "status", "adapter") else "right" for head in heads]
    styles = [f"text-align:{side};white-space:nowrap" for side in sides]
    written = "".join(
        f'<{tag} style="{style}">{escape(cell)}</{tag}>' for style, cell in zip(styles, cells, strict=True)
    )
    return f"<tr>{written}</tr>"


def _html_reason(row: ReportRow, num_columns: int) -> str:
    if not row.reason:
        return ""
    return f'<tr class="reason"><td style="text-align:left" colspan="{num_columns}">{escape(row.reason)}</td></tr>'


_HEADS = ("task", "status", "steps", "loss", "best", "eval", "time", "of time", "tokens", "adapter")


def _table_cells(rows: Sequence[ReportRow], is_interrupted: bool) -> list[tuple[str, ...]]:
    """Return the heads and the cells of each task; with shares of the time where several tasks have one."""
    shows_shares = sum(row.time_share is not None for row in rows) > 1
    cells = [_HEADS, *(_cells(row, is_interrupted) for row in rows)]
    left_out = None if shows_shares else _HEADS.index("of time")
    return [tuple(cell for place, cell in enumerate(own) if place != left_out) for own in cells]


def status_word(row: ReportRow, is_interrupted: bool) -> str:
    """Return the status of a task as it is shown: nobody trains one that runs in a run which was interrupted."""
    return "interrupted" if is_interrupted and row.status == "running" else row.status


def _cells(row: ReportRow, is_interrupted: bool) -> tuple[str, ...]:
    return (
        row.name,
        status_word(row, is_interrupted),
        f"{row.step}/{row.num_steps}",
        *map(number_text, (row.loss, row.best_loss, row.eval_loss)),
        time_text(row.seconds),
        share_text(row.time_share),
        f"{row.num_tokens:,}",
        str(row.place or "not saved"),
    )


def _process_lines(records: Sequence[RankRecord]) -> list[str]:
    rows = [
        f"{one.rank:>4}  {one.tokens:>12,}  {one.seconds:>9.1f}  {one.waited_seconds:>13.1f}  "
        f"{one.peak_bytes / 2**20:>8,.0f}  {one.part}"
        for one in records
    ]
    return ["", f"{'rank':>4}  {'tokens':>12}  {'seconds':>9}  {'of it waiting':>13}  {'peak MiB':>8}  part", *rows]


class InTurn(NamedTuple):
    """How long the steps of a run took, and how long those of one task after another would have taken.

    Attributes:
        measured_s: seconds of the steps as they were taken, together; first ones under a plan as the mean of others.
        predicted_s: seconds that the profile gives for the same steps of one task after another, times `factor`.
        factor: measured over predicted seconds of the steps together, by which the profile is corrected.
        source: where the profile comes from, "measured" or "analytic".
    """

    measured_s: float
    predicted_s: float
    factor: float
    source: str

    def __str__(self) -> str:
        """Return one line, which says what of it was measured."""
        return (
            f"speed  steps together {self.measured_s:,.1f} s, measured; in turn {self.predicted_s:,.1f} s, predicted "
            f"({self.source} profile, times {self.factor:.2f} as measured together): "
            f"{self.predicted_s / self.measured_s:.2f}x"
        )


def next_lines(root: Path, rows: Sequence[ReportRow], report: Path | None, best: str = "") -> list[str]:
    """Return what may be typed next.

    Args:
        root: folder of the run.
        rows: its tasks.
        report: the page of the run; `None` where none was written.
        best: the task to merge, such as the winner of a sweep; "" for the first one.
    """
    saved = [row for row in rows if row.place is not None]
    if not saved:
        return []
    folder, names = shlex.quote(str(root)), [row.name for row in saved]
    name, merged = (best, "the best one") if best in names else (names[0], "one")
    commands = [
        (f"peft-mux export {folder} --vllm", "serve all adapters"),
        (f"peft-mux export {folder} --merge {name} --output merged", f"merge {merged} into the backbone"),
    ]
    if any(row.status in ("running", "paused", "waiting") for row in rows):
        commands.insert(0, ("trainer.train(resume_from_checkpoint=True)", "or: peft-mux train FILE --resume"))
    if report is not None:
        commands.append((str(report), "curves, times, memory: open it in a browser"))
    longest = max(len(command) for command, _ in commands)
    return [
        f"{'       ' if number else 'next   '}{command.ljust(longest)}{_REMARK}{remark}"
        for number, (command, remark) in enumerate(commands)
    ]
