"""`RowNotes`: what became of the rows of each task: told when it begins, when a stream first leaves some out, last."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
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

    def begin(self, *runs: TaskRun) -> None:
        """Record and print what became of the rows of tasks that begin, once a task; of many the numbers together."""
        reports, sharing = [], []
        for run in runs:
            if run.loader in self._begun:
                continue
            self._begun.add(run.loader)
            own = {"train_dataset": run.loader.report}
            own |= {} if run.eval_data is None else {"eval_dataset": run.eval_data.report}
            for split, report in own.items():
                self._record("data", task=run.name, split=split, **_numbers(report))
            reports += [report for report in own.values() if report.remarks]
            sharing += [run.sharing_remark] if run.sharing_remark else []
            if run.loader.report.remarks:
                # A `UserWarning` has told of it when the task was made.
                self._warned.add(run.loader)
        for line in _lines(reports) + sharing:
            self._say(line)

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


def _lines(reports: Sequence[DataReport]) -> list[str]:
    """Return the remarks of datasets; of so many that they would push all else off the screen, their sum."""
    if len(reports) <= _MOST_LINES:
        return [remark for report in reports for remark in report.remarks]
    counts = [
        (sum(report.num_truncated for report in reports), "cut"),
        (sum(report.num_dropped_long for report in reports), "left out as too long"),
        (sum(report.num_without_targets for report in reports), "left out without targets"),
    ]
    words = [f"{count:,} {what}" for count, what in counts if count]
    worst = max(reports, key=lambda report: 1 - report.num_kept / max(report.num_rows, 1))
    return [
        f"rows     of {sum(report.num_rows for report in reports):,} in {len(reports)} datasets {', '.join(words)}; "
        "each: trainer.plan().notes, peft-mux validate",
        f"         most of all {worst.remarks[0]}",
    ]


_MOST_LINES = 6


def _numbers(report: DataReport) -> dict[str, Any]:
    numbers = asdict(report)
    del numbers["where"]
    return {**numbers, "data_format": str(report.data_format)}
