"""A run without a trainer, and stand-ins for the parts of one, for the tests of single parts."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.engine.tasks.active_task import TaskTable
from peft_mux.engine.tasks.setup import make_active_tasks, resolve_tasks
from peft_mux.log.callbacks import RunCallbacks, TaskCallbacks
from peft_mux.log.lines import Progress
from peft_mux.scheduler.parallel_layout import ParallelLayout
from peft_mux.task import Task, TaskStatus
from peft_mux.trainer.run import Run
from tests.invariants import mux_lab as lab
from tests.invariants.mux_lab import tiny_llama
from tests.runs import small_tasks, task_of


class Screen(Progress):
    """Keeps the lines that a run shows."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def log(self, line: str) -> None:
        self.lines.append(line)


def make_run(folder: Path, names: Sequence[str] = ("a", "b"), **arguments: Any) -> Run:
    """Return a run of small tasks that are not trained."""
    options = {"save_strategy": "no", "logging_strategy": "no", "report_to": "none", **arguments}
    args = MultiTaskTrainingArguments(output_dir=str(folder), use_cpu=True, **options)
    tasks = resolve_tasks(small_tasks(*names), args)
    table = TaskTable(make_active_tasks(tasks, args, None, tiny_llama().config))
    handler = CallbackHandler([], None, None, None, None)
    run = Run(RunCallbacks(handler, args, TrainerState(), TrainerControl()), table, ParallelLayout.of(1))
    run.log.progress = Screen()
    for own in table:
        run.log.add_callbacks(own.name, TaskCallbacks(own, args, None, None))
    return run


def random_task(name: str, seed: int, rows: Any = None, **settings: Any) -> Task:
    """Return a task of rows of many lengths."""
    return task_of(name, rows or lab.rows(seed, 11, 4, 20), seed=seed, **{"max_steps": 5, **settings})


def rows_with_one_beginning() -> list[dict[str, list[int]]]:
    """Return rows that begin with the same 24 tokens."""
    start = lab.rows(5, 1, 24, 24)[0]["input_ids"]
    return [{"input_ids": start + row["input_ids"]} for row in lab.rows(6, 9, 3, 9)]


def start_all(run: Run) -> None:
    for own in run.table:
        own.status = TaskStatus.RUNNING
    run.table.collect()
