"""What a run prints first and last.

First eight lines (`banner_lines`): what is trained, on what, how, and where it is written. Last a table (`RunReport`):
how each task ended, how fast the run was, and commands to run next.
"""

from __future__ import annotations

import math
import platform
import shlex
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import torch

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.engine.allocator import device_words
from peft_mux.engine.backbone_source import BackboneSource
from peft_mux.engine.tasks.active_task import ActiveTask
from peft_mux.errors import installed_version, printable
from peft_mux.kernels.availability import reason_against_kernels
from peft_mux.log.lines import time_text, wrapped
from peft_mux.modeling.backbone.liger import is_fused
from peft_mux.modeling.model import MultiTaskPeftModel
from peft_mux.reporting.views import curve_of, drop_columns, held_out_loss, number_text, share_text, shortened
from peft_mux.scheduler.plan import Plan
from peft_mux.scheduler.units import MEMORY, aligned, bytes_text, step_time_text
from peft_mux.task import TaskStatus


def banner_lines(
    args: MultiTaskTrainingArguments,
    model: MultiTaskPeftModel,
    source: BackboneSource,
    runs: Sequence[ActiveTask],
    plan: Plan,
    *,
    attention: str,
    processes: str,
    root: Path,
) -> list[str]:
    """Return the lines.

    Args:
        args: the arguments of the run.
        model: the whole model with the adapters of all tasks, possibly without weights.
        source: where its backbone comes from.
        runs: its tasks.
        plan: what runs together at first.
        attention: how packed sequences attend to themselves.
        processes: the processes and what each holds, in words; "" for a single one.
        root: folder of the run.
    """
    kind, dtype = type(model.backbone).__name__, str(source.dtype).removeprefix("torch.")
    name = source.model if isinstance(source.model, str) else getattr(source.config, "_name_or_path", "") or kind
    if processes:
        processes += ", optimizer states divided by task" if args.shard_optimizer else ""
        processes += ", gradients added in bf16" if args.reduce_dtype == "bfloat16" else ""
    notes = ", bf16 autocast" if args.bf16 and dtype != "bfloat16" else ""
    if any(coefficients := sorted({run.router_coefficient for run in runs})):
        notes += f", router_aux_loss_coef {_range(coefficients)}"
    elif hasattr(source.config.get_text_config(), "router_aux_loss_coef"):
        notes += ", routers without a balancing loss"
    adapter_parameters = [
        sum(weight.numel() for weight in model.task_parameters(name).values()) for name in model.tasks
    ]
    num_parameters = model.backbone.num_parameters() - sum(adapter_parameters)
    kernels = reason_against_kernels(args.device)
    fused = "; norms, RoPE and MLPs by Liger" if is_fused(model.backbone) else ""
    saved = "nothing is saved" if args.save_strategy == "no" else "Ctrl-C ends the run with everything saved"
    versions = {name: installed_version(name) or "(checkout)" for name in ("peft-mux", "transformers", "peft")}

    ranks = [rank for run in runs if isinstance(rank := getattr(run.task.peft_config, "r", None), int)]
    rows = [len(run.task.train_dataset) for run in runs if hasattr(run.task.train_dataset, "__len__")]
    shares = [100 * count / max(num_parameters + count, 1) for count in adapter_parameters]
    num_streams, steps = len(runs) - len(rows), [run.num_steps for run in runs]
    tasks = [f"{len(runs)}"]
    tasks += [f"rank {_range(ranks)}"] if ranks else []
    tasks += [f"{_range([round(share, 3) for share in shares])} % trainable each"] if shares else []
    tasks += [f"{sum(rows):,} rows"] if rows else []
    tasks += [f"{num_streams} stream{'s' if num_streams > 1 else ''}"] if num_streams else []
    tasks += [f"{_range(steps)} step{'' if max(steps) == 1 else 's'}"]

    passes = sum(htask.micro_batches for htask in plan.htasks)
    planned = [f"{len(plan.htasks)} hTasks"] if len(plan.htasks) > 1 else []
    planned += [f"{passes} pass{'' if passes == 1 else 'es'} a step"]
    planned += [f"{len(plan.waiting)} tasks wait"] if plan.waiting else []
    if plan.step_s:
        step = step_time_text(plan.step_s, plan.profile_source)
        planned.append(f"{step}, predicted{' by a measured profile' * (plan.profile_source == 'measured')}")
    if not plan.htasks and not plan.waiting:
        planned = ["no task has steps to take: all have ended or are paused"]
    peak = max(plan.peak_bytes, default=plan.memory.peak_bytes)
    starts = []
    for run in [run for run in runs if run.task.init_adapter is not None]:
        reference = "this adapter" if run.resolved.has_adapter_reference else "the backbone"
        compared = f", reference: {reference}" if run.resolved.needs_reference else ""
        starts.append(f"{run.name} from {run.task.init_adapter}{compared}")
    limit = "" if plan.limit_bytes is None else f" of {bytes_text(plan.limit_bytes)} that a device may use"
    return [
        f"peft_mux {versions['peft-mux']}  torch {torch.__version__}  transformers {versions['transformers']}  "
        f"peft {versions['peft']}  Python {platform.python_version()}",
        f"device   {device_words(args.device)}{processes and f'; {processes}'}",
        f"model    {kind if name == kind else f'{name}: {kind}'}, {num_parameters:,} parameters, {dtype}{notes}",
        f"tasks    {', '.join(tasks)}",
        *([f"begins   {'; '.join(starts)}"] if starts else []),
        f"kernels  {'Triton' if kernels is None else f'torch, not Triton: {kernels}'}{fused}; attention {attention}",
        f"plan     {', '.join(planned)}",
        f"memory   {bytes_text(peak)} {MEMORY.words} at its peak, predicted{limit}",
        f"output   {root}; {saved}",
    ]


def _range(numbers: Sequence[Any]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


_TO_THE_LEFT = ("task", "status", "adapter")
"""Columns of text; numbers stand to the right."""
_METRIC_WORDS = {"loss": "train", "eval_loss": "eval"}
_STYLES: dict[str, str] = dict.fromkeys(_TO_THE_LEFT, "text-align:left;white-space:nowrap")
_STYLES["adapter"] = "text-align:left;overflow-wrap:anywhere;min-width:16em"
_LEAST_NAME = 10
_FIRST_TO_GO = ("of time", "tokens", "time", "eval", "best")
"""Which columns a narrow window leaves out first."""
_COMMAND = " " * 7
"""The indent of a command to run next, which is never broken."""


class RankRecord(NamedTuple):
    """What one process has done in a run.

    Attributes:
        rank: the rank of the process.
        tokens: tokens that went through its backbone.
        seconds: seconds that it has trained.
        waited_seconds: seconds of these that it waited for other processes on the host.
        peak_bytes: most memory that the process has held: of its GPU, else of the host.
        part: which part of the model it held, in words.
        tensor_bytes: of this memory, what plans predict: on the host, the weights and what was added while it trained.
    """

    rank: int
    tokens: int
    seconds: float
    waited_seconds: float
    peak_bytes: int
    part: str
    tensor_bytes: int = 0


class ReportRow(NamedTuple):
    """How one task has ended, or where it stands.

    Attributes:
        name: name of the task.
        status: its status.
        reason: why it failed, stopped or waits; "" if there is nothing to say.
        step: optimizer steps taken.
        num_steps: optimizer steps to take.
        loss: loss of its last step; `None` before the first.
        best: the best value of the metric that decides which adapter is best (`metric_for_best_model`, or that of early
            stopping), by default of the held-out loss; of a task without evaluations, the least logged or last loss of
            training rows. `None` if there is none.
        best_metric: name of the metric of `best`: `loss` is that of training rows.
        eval_loss: held-out loss of the adapter that was kept, which may be the best one; `None` if there is none.
        seconds: seconds of the steps that it took part in, in this process.
        num_tokens: tokens that it was trained on.
        place: folder of its adapter as it is now; `None` if there is none.
        time_share: its share of the time of the run's steps in this process, from 0 to 1; the time of a step of several
            tasks is divided by their tokens. `None` before the first step.
    """

    name: str
    status: str
    reason: str
    step: int
    num_steps: int
    loss: float | None
    best: float | None
    best_metric: str
    eval_loss: float | None
    seconds: float
    num_tokens: int
    place: Path | None
    time_share: float | None = None


def report_row(run: ActiveTask, place: Path | None, seconds: float, status: TaskStatus | None = None) -> ReportRow:
    """Return the row of a task, without its share of the time, which is known when all rows are.

    Args:
        run: the task.
        place: folder of its adapter as it is now; `None` if there is none.
        seconds: seconds of the steps that it took part in.
        status: the status to show; by default its own.
    """
    # Logged losses are means over the steps since the log before, and the last loss may be below them.
    losses = [run.last_loss, *(loss for _, loss in curve_of(run.state.log_history, "loss"))]
    best, best_metric = min((loss for loss in losses if math.isfinite(loss)), default=None), "loss"
    key = held_out_loss(run.state.log_history)
    held_out = evaluated = curve_of(run.state.log_history, key)
    is_best_kept = run.best.keeps_weights and run.best.value is not None
    if is_best_kept and run.status in (TaskStatus.SUCCEEDED, TaskStatus.STOPPED_EARLY):
        held_out = tuple(point for point in held_out if point[0] == run.best.step) or held_out
    if run.best.metric is not None and run.best.value is not None:
        best, best_metric = run.best.value, run.best.metric
    elif evaluated:
        best, best_metric = min(loss for _, loss in evaluated), key
    return ReportRow(
        run.name,
        (status or run.status).value,
        run.reason,
        run.step,
        run.num_steps,
        run.last_loss if math.isfinite(run.last_loss) else None,
        best,
        best_metric,
        held_out[-1][1] if held_out else None,
        seconds,
        run.num_tokens,
        place,
    )


class RunReport(str):
    """The report of a run: its text, which notebooks show as a table.

    One line per task says how it ended, its steps, its losses, its time, its tokens, and the folder of its adapter. If
    several processes have trained, one line per process follows.

    Args:
        rows: the tasks of the run, in the order of the lines.
        records: what each process has done, by rank.
        notes: lines for the end, such as how fast the run was and commands to run next.
        is_interrupted: whether no process trains the run: running tasks are shown as interrupted.

    Attributes:
        rows: the tasks of the run.
        is_interrupted: whether no process trains the run.
    """

    rows: tuple[ReportRow, ...]
    is_interrupted: bool
    records: tuple[RankRecord, ...]
    _notes: tuple[str, ...]

    def __new__(
        cls,
        rows: Iterable[ReportRow],
        records: Sequence[RankRecord] = (),
        notes: Sequence[str] = (),
        is_interrupted: bool = False,
    ) -> RunReport:
        """Write the text."""
        rows = tuple(rows)
        lines = _table(_cells(rows, is_interrupted))
        lines += [f"{row.name}: {printable(row.reason)}" for row in rows if row.reason]
        lines += [*_process_lines(records), *([""] if notes else []), *notes]
        made = super().__new__(cls, "\n".join(lines))
        made.rows, made.is_interrupted = rows, is_interrupted
        made.records, made._notes = tuple(records), tuple(notes)
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the parts, from which another process makes the report."""
        return RunReport, (self.rows, self.records, self._notes, self.is_interrupted)

    def fitted(self, width: int) -> str:
        """Return the text for a window of `width` characters; only commands and very long words may be wider."""
        if max(map(len, self.split("\n"))) <= width:
            return str(self)
        cells = _cells(self.rows, self.is_interrupted)
        table = _table(cells)
        num_rows = len(table)
        if max(map(len, table)) > width:
            # Without paths, which are listed once below, without columns that have no room, and with short names.
            widths = {head: max(len(row[head]) for row in cells) for head in cells[0] if head != "adapter"}
            least = min(_LEAST_NAME, widths.pop("task"))
            room = max(least, drop_columns(widths, _FIRST_TO_GO, width, least))
            table = _table(
                [{"task": shortened(row["task"], room), **{head: row[head] for head in widths}} for row in cells]
            )
            folders = dict.fromkeys(row.place.parent for row in self.rows if row.place is not None)
            table += [f"adapters are in {folder}/TASK" for folder in folders]
            unsaved = [row.name for row in self.rows if row.place is None]
            table += [f"not saved: {', '.join(unsaved)}"] if unsaved else []
        below = [line if line.startswith(_COMMAND) else wrapped(line, width) for line in self.split("\n")[num_rows:]]
        return "\n".join([wrapped("\n".join(table), width), *below])

    def _repr_html_(self) -> str:
        """Return the report as a table, and its lines as text."""
        html = []
        reasons = ["", *(row.reason for row in self.rows)]
        for cells, reason in zip(_cells(self.rows, self.is_interrupted), reasons, strict=True):
            tag = "td" if html else "th"
            row = "".join(
                f'<{tag} style="{_STYLES.get(head, "text-align:right;white-space:nowrap")}">{escape(cell)}</{tag}>'
                for head, cell in cells.items()
            )
            html.append(f"<tr>{row}</tr>")
            if reason:
                cell = f'<td style="text-align:left" colspan="{len(cells)}">{escape(reason)}</td>'
                html.append(f'<tr class="reason">{cell}</tr>')
        below = "\n".join([*_process_lines(self.records), "", *self._notes]).strip("\n")
        lines = f"<pre style='white-space:pre-wrap'>{escape(below)}</pre>" if below else ""
        return f"<div style='overflow-x:auto'><table>{''.join(html)}</table></div>{lines}"


def status_word(row: ReportRow, is_interrupted: bool) -> str:
    """Return the status to show: a running task of a run that no process trains is "interrupted"."""
    return "interrupted" if is_interrupted and row.status == "running" else row.status


def _cells(rows: Sequence[ReportRow], is_interrupted: bool) -> list[dict[str, str]]:
    """Return the cells of each task by their heads, below the heads; with shares of the time if several have one."""
    shows_shares = sum(row.time_share is not None for row in rows) > 1
    cells = [
        {
            "task": row.name,
            "status": status_word(row, is_interrupted),
            "steps": f"{row.step}/{row.num_steps}",
            "loss": number_text(row.loss),
            "best": f"{_METRIC_WORDS.get(row.best_metric, row.best_metric.removeprefix('eval_'))} "
            f"{number_text(row.best)}",
            "eval": number_text(row.eval_loss),
            "time": time_text(row.seconds),
            **({"of time": share_text(row.time_share)} if shows_shares else {}),
            "tokens": f"{row.num_tokens:,}",
            "adapter": str(row.place or "not saved"),
        }
        for row in rows
    ]
    return [{head: head for head in cells[0]}, *cells] if cells else []


def _table(cells: Sequence[Mapping[str, str]]) -> list[str]:
    left = [column for column, head in enumerate(cells[0] if cells else ()) if head in _TO_THE_LEFT]
    return aligned([list(row.values()) for row in cells], left)


def _process_lines(records: Sequence[RankRecord]) -> list[str]:
    """Return a line for each process; nothing if there is only one."""
    if len(records) < 2:
        return []
    rows = [
        f"{record.rank:>4}  {record.tokens:>12,}  {record.seconds:>9.1f}  {record.waited_seconds:>9.1f}  "
        f"{record.peak_bytes / 2**20:>8,.0f}  {record.part}"
        for record in records
    ]
    return ["", f"{'rank':>4}  {'tokens':>12}  {'seconds':>9}  {'waiting':>9}  {'peak MiB':>8}  part", *rows]


def next_lines(
    root: Path,
    rows: Sequence[ReportRow],
    report: Path | None,
    best: str = "",
    resume: str = "",
) -> list[str]:
    """Return commands to run next, each below a remark.

    Args:
        root: folder of the run.
        rows: its tasks.
        report: the page of the run; `None` if none was written.
        best: the task to merge, such as the winner of a sweep; "" for the first one.
        resume: the command of a shell that resumes the run; "" if the user's own program trains.
    """
    saved = [row for row in rows if row.place is not None and row.status != "failed"]
    if not saved:
        return []
    folder, names = shlex.quote(str(root)), [row.name for row in saved]
    name, merged = (best, "the best one") if best in names else (names[0], "one")
    commands = [
        (f"peft-mux export {folder} --vllm", "serve all adapters"),
        (f"peft-mux export {folder} --merge {name} --output merged", f"merge {merged} into the backbone"),
    ]
    place = next(row.place for row in saved if row.name == name)
    commands.append((f'PeftModel.from_pretrained(backbone, "{place}")', "load one with plain PEFT"))
    if any(row.status in ("running", "paused", "waiting") for row in rows):
        paused = [row.name for row in rows if row.status == "paused"]
        unpause = [f"peft-mux resume {folder} {' '.join(paused)} --next"] if paused else []
        if resume:
            commands.insert(0, (" && ".join([*unpause, resume]), "resume the run"))
        else:
            commands.insert(0, ("trainer.train(resume_from_checkpoint=True)", "or: peft-mux train FILE --resume"))
            commands[:0] = [(command, "run this first to resume the paused tasks") for command in unpause]
    if report is not None:
        commands.append((str(report), "curves, times, memory: open it in a browser"))
    lines = [line for command, remark in commands for line in (f"{_COMMAND}# {remark}", f"{_COMMAND}{command}")]
    return [f"next   {lines[0].lstrip()}", *lines[1:]]
