"""The table at the end of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

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


def report_table(
    runs: Iterable[TaskRun],
    place: Callable[[TaskRun], Path | None],
    records: Sequence[RankRecord] = (),
    times: str = "",
) -> str:
    """Return one line a task: how it ended, its steps, its last losses, and where its adapter lies.

    Where several processes have trained, one line a process follows: its tokens, its seconds, how many it waited, its
    memory, and which part of the model it held.

    Args:
        runs: the tasks of the run, in the order of the lines.
        place: returns the folder with a task's adapter as it is now; `None` where there is none.
        records: what each process has done, by rank.
        times: what was learnt of times, in a line; "" where nothing was.
    """
    runs = list(runs)
    width = max(len("task"), *(len(run.name) for run in runs))
    lines = [f"{'task':<{width}}  {'status':<13}  {'steps':>11}  {'loss':>8}  {'held out':>8}  adapter"]
    for run in runs:
        evaluations = [entry["eval_loss"] for entry in run.state.log_history if "eval_loss" in entry]
        held_out = f"{evaluations[-1]:.4f}" if evaluations else "-"
        steps = f"{run.step}/{run.num_steps}"
        where = place(run) or "not saved"
        reason = f"  ({run.reason})" if run.reason else ""
        lines.append(
            f"{run.name:<{width}}  {run.status.value:<13}  {steps:>11}  {run.last_loss:>8.4f}  {held_out:>8}  "
            f"{where}{reason}"
        )
    lines += _process_lines(records) if len(records) > 1 else []
    return "\n".join([*lines, *(["", times] if times else [])])


def _process_lines(records: Sequence[RankRecord]) -> list[str]:
    rows = [
        f"{one.rank:>4}  {one.tokens:>12,}  {one.seconds:>9.1f}  {one.waited_seconds:>13.1f}  "
        f"{one.peak_bytes / 2**20:>8,.0f}  {one.part}"
        for one in records
    ]
    return ["", f"{'rank':>4}  {'tokens':>12}  {'seconds':>9}  {'of it waiting':>13}  {'peak MiB':>8}  part", *rows]
