"""A run without a trainer, and stand-ins for the parts of one, for the tests of each part alone."""

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
from peft_mux.checkpoint.hub import HubPushes
from peft_mux.checkpoint.saver import Saver
from peft_mux.engine.layout import Place
from peft_mux.engine.tasks.resolved import resolve_tasks
from peft_mux.engine.tasks.setup import make_task_runs
from peft_mux.engine.tasks.task_run import TaskRun, TaskTable
from peft_mux.engine.work import PassClock, StepResult, StepWork
from peft_mux.planning.learning import TimeCorrection
from peft_mux.reporting.callbacks import RunCallbacks, TaskCallbacks
from peft_mux.reporting.pass_report import PassReport, StepSeconds, TokenCounts
from peft_mux.reporting.run_log import RunLog
from peft_mux.reporting.screen import Progress
from peft_mux.task import Task, TaskStatus
from peft_mux.trainer.plan_follower import FollowedPlan
from peft_mux.trainer.run import Run, output_folder
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
        self.is_stopped = False

    def log(self, line: str) -> None:
        self.lines.append(line)

    def stop(self) -> None:
        self.is_stopped = True


def make_run(
    folder: Path, names: Sequence[str] = ("a", "b"), *, callbacks: Sequence[Any] = (), **arguments: Any
) -> Run:
    """Return a run of small tasks that nobody trains."""
    options = {"save_strategy": "no", "logging_strategy": "no", "report_to": "none", **arguments}
    args = MultiTaskTrainingArguments(output_dir=str(folder), use_cpu=True, **options)
    tasks = [small_task(name, data_seed=seed) for seed, name in enumerate(names)]
    return make_run_of(tasks, args, callbacks)


def make_run_of(tasks: Sequence[Task], args: MultiTaskTrainingArguments, callbacks: Sequence[Any] = ()) -> Run:
    table = TaskTable(make_task_runs(resolve_tasks(tasks, args), args, None, tiny_llama().config))
    state, control = TrainerState(), TrainerControl()
    handler = CallbackHandler(list(callbacks), None, None, None, None)
    run_callbacks = RunCallbacks(handler, args, state, control)
    log = RunLog(table, state, run_callbacks.log)
    log.open(log.metrics, Screen())
    hub = HubPushes(args, output_folder(args), log.warn)
    run = Run(args, table, state, control, run_callbacks, log, Saver(table, args, log), hub)
    for own in table:
        log.add_callbacks(own.name, TaskCallbacks(own, args, None, None))
    return run


def lines(run: Run) -> list[str]:
    screen: Any = run.log.progress
    return screen.lines


def start_all(run: Run) -> None:
    for own in run.table:
        own.status = TaskStatus.RUNNING
    run.table.collect()


class FakePlacement:
    """Takes tasks in and drops them, by name alone; refuses those that it is told to refuse."""

    def __init__(self, calls: Calls, refuses: Exception | None = None) -> None:
        self.calls, self.refuses = calls, refuses
        self.source = SimpleNamespace(tokenizer=None, config=tiny_llama().config, model="a/folder")
        self.is_placed, self.lock = True, threading.RLock()
        self.part = SimpleNamespace(num_stages=1, tp_size=1, place=Place(0, 0, 0))
        self.outline: Any = "outline"
        self.model = SimpleNamespace(
            backbone=None,
            task_parameters=lambda name: {"weight": name},
            objectives=SimpleNamespace(take_failures=dict),
        )
        self.placed = SimpleNamespace(model=self.model, executor=FakeExecutor(calls))

    def check(self, tasks: Sequence[Task]) -> None:
        self.calls.note("check", *(task.name for task in tasks))

    def register(self, runs: Sequence[TaskRun]) -> None:
        if self.refuses is not None:
            raise self.refuses
        self.calls.note("register", *(run.name for run in runs))

    def remove(self, name: str) -> None:
        self.calls.note("remove", name)

    def start(self, run: TaskRun) -> None:
        self.calls.note("start", run.name)
        run.status = TaskStatus.RUNNING

    def note_own_losses(self) -> None:
        pass

    def subscribe(self, listener: Any) -> None:
        self.calls.note("subscribe")
        listener()

    def materialise(self, plan_stages: Any) -> Any:
        del plan_stages
        self.calls.note("materialise")
        return self.placed


class FakeExecutor:
    """Gives every task that has work a loss, and says what it was asked."""

    def __init__(self, calls: Calls) -> None:
        self.calls = calls
        self.non_finite: list[str] = []
        self.clock = PassClock(torch.device("cpu"))

    def run(self, work: StepWork) -> StepResult:
        self.calls.note("run", *work.tasks)
        losses = {name: torch.tensor(1.0) for name in work.tasks}
        return StepResult(losses, dict.fromkeys(work.tasks, 10), num_stream_tokens=25)

    def follow(self, plan: Any) -> None:
        del plan
        self.calls.note("follow")

    def non_finite_tasks(self, micro_batches: Any) -> list[str]:
        del micro_batches
        return self.non_finite


class FakePlans:
    """Gives every running task work, and counts how often it was made anew."""

    def __init__(self, run: Run, calls: Calls) -> None:
        self.run, self.calls = run, calls
        self.planner = SimpleNamespace(correction=TimeCorrection(), profile=None)
        self.dispatch_clock, self.max_tokens, self.last_step_s, self.last_passes_s = None, 64, 0.0, 0.0
        self.pass_report = PassReport()
        self.token_counts = TokenCounts()
        self.current, self.seconds, self.own_pipeline, self.followed = None, StepSeconds(), {}, FollowedPlan()

    def replan(self) -> Any:
        self.calls.note("replan")
        return SimpleNamespace(to_json=lambda: "{}")

    def plan_stages(self) -> Any:
        raise AssertionError("there are no stages here")

    def next_work(self) -> StepWork:
        self.calls.note("next_work")
        names = tuple(own.name for own in self.run.table.running)
        return StepWork(names, (), dict.fromkeys(names, 10))

    def record_step_time(self, result: StepResult, seconds: float) -> None:
        assert seconds >= 0
        self.calls.note("took", sum(result.num_tokens.values()))

    def observe_step_time(self, seconds: float, process_s: Sequence[float] = ()) -> None:
        del process_s
        self.calls.note("learn", seconds)

    def replan_if_faster(self) -> bool:
        return False

    def share_times(self) -> None:
        self.calls.note("share times")

    def restore_times(self, saved: Any) -> None:
        self.calls.note("restore times", sorted(saved))

    def drop_read_ahead(self, name: str) -> None:
        self.calls.note("forget", name)
