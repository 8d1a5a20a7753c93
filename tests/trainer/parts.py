"""A run without a trainer, and stand-ins for the parts of one, for the tests of single parts."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import TrainerControl, TrainerState
from transformers.trainer_callback import CallbackHandler

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.engine.layout import Place
from peft_mux.engine.tasks.setup import make_task_runs, resolve_tasks
from peft_mux.engine.tasks.task_run import TaskRun, TaskTable
from peft_mux.engine.work import PassClock
from peft_mux.planning.learning import TimeCorrection
from peft_mux.reporting.callbacks import RunCallbacks, TaskCallbacks
from peft_mux.reporting.screen import Progress
from peft_mux.task import TaskStatus
from peft_mux.trainer import run as run_module
from peft_mux.trainer.run import Run
from tests.invariants.mux_lab import small_task, tiny_llama


class Calls(list[Any]):
    """What parts were asked to do, in order."""

    def note(self, *what: Any) -> None:
        self.append(what[0] if len(what) == 1 else what)


class Screen(Progress):
    """Keeps the lines that a run shows."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def log(self, line: str) -> None:
        self.lines.append(line)


def make_run(folder: Path, names: Sequence[str] = ("a", "b"), **arguments: Any) -> Run:
    """Return a run of small tasks that nobody trains."""
    options = {"save_strategy": "no", "logging_strategy": "no", "report_to": "none", **arguments}
    args = MultiTaskTrainingArguments(output_dir=str(folder), use_cpu=True, **options)
    tasks = resolve_tasks([small_task(name, data_seed=seed) for seed, name in enumerate(names)], args)
    table = TaskTable(make_task_runs(tasks, args, None, tiny_llama().config))
    handler = CallbackHandler([], None, None, None, None)
    run = run_module.make_run(RunCallbacks(handler, args, TrainerState(), TrainerControl()), table)
    run.log.open(run.log.metrics, Screen())
    for own in table:
        run.log.add_callbacks(own.name, TaskCallbacks(own, args, None, None))
    return run


def lines(run: Run) -> list[str]:
    screen: Any = run.log.progress
    return screen.lines


def start_all(run: Run) -> None:
    for own in run.table:
        own.status = TaskStatus.RUNNING
    run.table.collect()


class FakePlacement:
    """Loads, releases and starts by name alone."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self.source = SimpleNamespace(model="a/folder")
        self.is_loaded, self.lock = True, threading.RLock()
        self.part = SimpleNamespace(num_stages=1, tp_size=1, place=Place(0, 0, 0))
        self.outline: Any = "outline"
        self.executor = SimpleNamespace(
            clock=PassClock(torch.device("cpu")), follow=lambda plan: self.calls.note("follow")
        )

    def start(self, run: TaskRun) -> None:
        self.calls.note("start", run.name)
        run.status = TaskStatus.RUNNING

    def load(self, plan_stages: Any) -> None:
        del plan_stages
        self.calls.note("load")


class FakePlans:
    """Predicts nothing."""

    def __init__(self) -> None:
        self.planner = SimpleNamespace(correction=TimeCorrection(), profile=None)

    def plan_stages(self) -> Any:
        raise AssertionError("there are no stages here")
