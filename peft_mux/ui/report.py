"""The table at the end of a run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from peft_mux.task_run import TaskRun


def report_table(runs: Iterable[TaskRun], root: Path | None) -> str:
    """Return one line a task: how it ended, its steps, its last losses, and where its adapter lies.

    Args:
        runs: of all tasks.
        root: of the run folder; `None` where nothing is saved.
    """
    runs = list(runs)
    width = max(len("task"), *(len(run.name) for run in runs))
    lines = [f"{'task':<{width}}  {'status':<13}  {'steps':>11}  {'loss':>8}  {'held out':>8}  adapter"]
    for run in runs:
        evaluations = [entry["eval_loss"] for entry in run.state.log_history if "eval_loss" in entry]
        held_out = f"{evaluations[-1]:.4f}" if evaluations else "-"
        steps = f"{run.step}/{run.num_steps}"
        place = "not saved" if root is None else str(root / run.name)
        reason = f"  ({run.reason})" if run.reason else ""
        lines.append(
            f"{run.name:<{width}}  {run.status.value:<13}  {steps:>11}  {run.last_loss:>8.4f}  {held_out:>8}  "
            f"{place}{reason}"
        )
    return "\n".join(lines)
