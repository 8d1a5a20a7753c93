"""`RowNotes`: what became of the rows of each task: told when it begins, when a stream first leaves some out, last."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any
from weakref import WeakSet

from peft_mux.data.dataset import DataReport
from peft_mux.reporting.delays import Record
from peft_mux.tasks.task_run import TaskRun


class RowNotes:
    """Tells which rows are cut and left out: a run may train for hours on four rows of twenty-four.

    Args:
        say: prints a line beside the progress.
        warn: prints a line that nobody may miss.
        record: writes a record of the run.
    """

    def __init__(self, say: Callable[[str], None], warn: Callable[[str], None], record: Record) -> None:
        """Have told of no task yet."""
        self._say, self._warn, self._record = say, warn, record
        # By the loader, as another task may come under the same name; weakly, as tasks leave with their rows.
        self._begun: WeakSet[Any] = WeakSet()
        self._warned: WeakSet[Any] = WeakSet()

    def begin(self, run: TaskRun) -> None:
        """Record and print what became of the rows of a task that begins; once a task."""
        if run.loader in self._begun:
            return
        self._begun.add(run.loader)
        self._tell(run, "train_dataset", run.loader.report)
        if run.eval_data is not None:
            self._tell(run, "eval_dataset", run.eval_data.report)
        if run.sharing_remark:
            self._say(run.sharing_remark)
        if run.loader.report.remarks:
            # A `UserWarning` has told of it when the task was made.
            self._warned.add(run.loader)

    def step(self, runs: Iterable[TaskRun]) -> None:
        """Warn of each stream that has left out or cut its first row."""
        for run in runs:
            if run.loader.steps_per_epoch is None and run.loader not in self._warned and run.loader.report.remarks:
                self._warned.add(run.loader)
                self._record("data", task=run.name, split="train_dataset", **_numbers(run.loader.report))
                self._warn(run.loader.report.warning)

    def end(self, runs: Iterable[TaskRun]) -> None:
        """Record and print what became of the rows of streams, of which more have come since."""
        for run in runs:
            if run.loader.steps_per_epoch is None:
                self._tell(run, "train_dataset", run.loader.report)

    def _tell(self, run: TaskRun, split: str, report: DataReport) -> None:
        self._record("data", task=run.name, split=split, **_numbers(report))
        for remark in report.remarks:
            self._say(remark)


def _numbers(report: DataReport) -> dict[str, Any]:
    numbers = asdict(report)
    del numbers["where"]
    return {**numbers, "data_format": str(report.data_format)}
