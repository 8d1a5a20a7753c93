"""The table at the end of a run."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from peft_mux.reporting.views import curve_of
from peft_mux.reporting.words import number_text, time_text
from peft_mux.task import TaskStatus
from peft_mux.tasks.task_run import TaskRun


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


def report_row(run: TaskRun, place: Path | None, seconds: float, status: TaskStatus | None = None) -> ReportRow:
    """Return the line of a task.

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


def report_table(rows: Iterable[ReportRow], records: Sequence[RankRecord] = (), notes: Sequence[str] = ()) -> str:
    """Return one line a task: how it ended, its steps, its losses, its time, its tokens, and where its adapter lies.

    Where several processes have trained, one line a process follows: its tokens, its seconds, how many it waited, its
    memory, and which part of the model it held.

    Args:
        rows: the tasks of the run, in the order of the lines.
        records: what each process has done, by rank.
        notes: lines for the end, such as how fast the run was and what to type next.
    """
    cells = [_HEADS, *(_cells(row) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = []
    for own in cells:
        left = [cell.ljust(width) for cell, width in zip(own[:2], widths, strict=False)]
        right = [cell.rjust(width) for cell, width in zip(own[2:-1], widths[2:], strict=False)]
        # Paths come last, as they are the longest, and are copied from here.
        lines.append("  ".join([*left, *right, own[-1]]))
    lines += _process_lines(records) if len(records) > 1 else []
    return "\n".join([*lines, *([""] if notes else []), *notes])


class RunReport(str):
    """The report of a run: its text, which notebooks show as a table.

    Args:
        rows: the tasks of the run, in the order of the lines.
        records: what each process has done, by rank.
        notes: lines for the end.

    Attributes:
        rows: the tasks of the run.
        lines: what stands below them.
    """

    rows: tuple[ReportRow, ...]
    lines: str
    _made_of: tuple[Any, ...]

    def __new__(
        cls, rows: Iterable[ReportRow], records: Sequence[RankRecord] = (), notes: Sequence[str] = ()
    ) -> RunReport:
        """Write the text."""
        rows = tuple(rows)
        made = super().__new__(cls, report_table(rows, records, notes))
        made.rows = rows
        made.lines = "\n".join([*(_process_lines(records) if len(records) > 1 else []), "", *notes]).strip("\n")
        made._made_of = rows, tuple(records), tuple(notes)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """Travel between processes as what the report was made of."""
        return RunReport, self._made_of

    def _repr_html_(self) -> str:
        """Return the report as a table, and its lines as text."""
        heads = "".join(f'<th style="text-align:left">{head}</th>' for head in _HEADS)
        body = "".join(
            f"<tr>{''.join(f'<td style=text-align:left>{escape(cell)}</td>' for cell in _cells(row))}</tr>"
            for row in self.rows
        )
        return f"<table><tr>{heads}</tr>{body}</table><pre>{escape(self.lines)}</pre>"


_HEADS = ("task", "status", "steps", "loss", "best", "held out", "time", "tokens", "adapter")


def _cells(row: ReportRow) -> tuple[str, ...]:
    return (
        row.name,
        row.status,
        f"{row.step}/{row.num_steps}",
        *map(number_text, (row.loss, row.best_loss, row.eval_loss)),
        time_text(row.seconds),
        f"{row.num_tokens:,}",
        f"{row.place or 'not saved'}{f'  ({row.reason})' if row.reason else ''}",
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
        measured_s: seconds of the steps as they were taken, together.
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


def next_lines(root: Path, rows: Sequence[ReportRow], report: Path | None) -> list[str]:
    """Return what may be typed next.

    Args:
        root: folder of the run.
        rows: its tasks.
        report: the page of the run; `None` where none was written.
    """
    saved = [row for row in rows if row.place is not None]
    if not saved:
        return []
    folder, name = shlex.quote(str(root)), saved[0].name
    lines = [
        f"next   peft-mux export {folder} --vllm              # the command that serves all adapters",
        f"       peft-mux export {folder} --merge {name} --output merged   # one adapter merged into the backbone",
    ]
    if any(row.status in ("running", "paused", "waiting") for row in rows):
        lines.append("       trainer.train(resume_from_checkpoint=True)   # or: peft-mux train FILE --resume")
    if report is not None:
        lines.append(f"       {report}      # curves, timeline, memory and configuration, for a browser")
    return lines
