"""`RunLog`: where the numbers and events of a run go.

One record reaches up to four places: the task's state (`log_history`), the task's own callbacks (plain keys), the run's
callbacks and integrations (`task/metric` keys), `metrics.jsonl`; and a line goes to the screen.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import TrainerState

from peft_mux.reporting.callbacks import TaskCallbacks
from peft_mux.reporting.delays import Delays
from peft_mux.reporting.metrics_file import MetricsLog
from peft_mux.reporting.report import ReportRow, report_row
from peft_mux.reporting.row_notes import RowNotes
from peft_mux.reporting.screen.memory import peak_bytes
from peft_mux.reporting.screen.progress import Progress, SilentProgress
from peft_mux.reporting.task_times import TaskTimes
from peft_mux.reporting.words import rate_text, time_text
from peft_mux.task import TaskStatus
from peft_mux.tasks.table import TaskEvent, TaskTable
from peft_mux.tasks.task_run import TaskRun

_logger = logging.getLogger(__name__)

_MOST_LOSSES = 12
"""Losses of more tasks than this are not listed in a line."""


class RunLog:
    """Writes what happens in a run.

    Args:
        table: all tasks of the run.
        state: the state of the run; its `global_step` counts steps of the run.
        emit: hands `task/metric` numbers to the callbacks of the run.
        is_shown: whether this process is the one that prints.

    Attributes:
        metrics: the file `metrics.jsonl`; nothing is written until training begins.
        progress: the screen; silent until training begins.
        callbacks: the callbacks of each task that was started, by the name of the task.
        is_shown: whether this process is the one that prints.
        delays: for how long each task's own code made the others wait.
        rows: what became of the rows of each task.
        times: for how long each task has taken steps.
        removed: the lines of removed tasks in the report.
    """

    def __init__(
        self,
        table: TaskTable,
        state: TrainerState,
        emit: Callable[[dict[str, float]], None],
        *,
        is_shown: bool = True,
    ) -> None:
        """Start with nowhere to write to."""
        self.table = table
        self.state = state
        self.metrics = MetricsLog(None)
        self.progress: Progress = SilentProgress()
        self.callbacks: dict[str, TaskCallbacks] = {}
        self.is_shown = is_shown
        self.delays = Delays(self.warn, self.event)
        self.rows = RowNotes(self.say, self.warn, self.event)
        self.times = TaskTimes()
        self.removed: list[ReportRow] = []
        self._emit = emit
        self._counted = (time.perf_counter(), -1, 0)
        self._steps_per_s = 0.0

    def open(self, metrics: MetricsLog, progress: Progress) -> None:
        """Write to a file and a screen from now on."""
        self.metrics, self.progress = metrics, progress
        metrics.warn = self.warn

    def add_callbacks(self, task: str, callbacks: TaskCallbacks) -> None:
        """Tell a task's own callbacks of its numbers from now on."""
        if task in self.callbacks:
            callbacks.trackers.take(self.callbacks[task].trackers)
        self.callbacks[task] = callbacks
        callbacks.listener = callbacks.trackers.listener = self.delays.note

    def drop_callbacks(self, task: str) -> None:
        """Tell a task's own callbacks nothing more: it has left."""
        left = self.callbacks.pop(task, None)
        if left is not None:
            left.trackers.end()
        self.delays.forget(task)

    def end_trackers(self) -> None:
        """End the runs of all tasks in loggers: what cuts the training off is raised."""
        for callbacks in self.callbacks.values():
            callbacks.trackers.end()

    def use_model(self, model: Any) -> None:
        """Hand another model to the callbacks of all tasks from now on; `None` while there is none."""
        for callbacks in self.callbacks.values():
            callbacks.use_model(model)

    def begin(self) -> None:
        """Show the tasks from now on, which are about to take steps."""
        self.times.begin(self.table)
        self.progress.start(self.table)

    def advance(self) -> None:
        """Show where the tasks are after a step."""
        self.times.advance(self.table)
        self.progress.advance(self.table)

    def note_removed(self, run: TaskRun, place: Path | None) -> None:
        """Keep a line for the report of a task that leaves.

        Args:
            run: the task.
            place: folder of its adapter; `None` where it was not saved.
        """
        self.removed.append(report_row(run, place, self.times.seconds(run.name), TaskStatus.REMOVED))

    def say(self, line: str) -> None:
        """Print a line beside the progress."""
        self.progress.log(line)

    def warn(self, line: str) -> None:
        """Print a line that nobody may miss: through `logging` where there is no progress to print it beside."""
        if not self.is_shown:
            return
        # Exactly that type: the plain progress derives from it and prints.
        if type(self.progress) is SilentProgress:
            _logger.warning(line)
        else:
            self.progress.log(line)

    def numbers(self, run: TaskRun, event: str, values: Mapping[str, float]) -> None:
        """Keep numbers of one task: in its state, in `metrics.jsonl`, and for its own callbacks."""
        entry: dict[str, Any] = {"step": run.step, **({} if run.epoch is None else {"epoch": run.epoch}), **values}
        run.state.log_history.append(entry)
        record = {"event": event, "run_step": self.state.global_step, "task": run.name, "num_tokens": run.num_tokens}
        self.metrics.write({**record, **entry})
        self.callbacks[run.name].call("on_log", logs=dict(values))

    def losses(self, runs: Iterable[TaskRun] | None = None) -> None:
        """Log the mean loss of tasks (by default all) since their last log."""
        logs: dict[str, float] = {}
        shown = []
        for run in self.table if runs is None else runs:
            loss = run.loss_mean.read()
            if loss is None:
                continue
            own = {"loss": loss, "grad_norm": run.last_gradient_norm}
            if run.optimizer is not None:
                own["learning_rate"] = run.optimizer.learning_rate
            own |= run.read_statistics()
            self.numbers(run, "train", own)
            shown.append(f"{run.name} {loss:.4f}")
            logs.update(_prefixed(run.name, own))
        if logs:
            own = self._run_numbers()
            if not self.progress.shows_losses:
                self.say(
                    "  ".join((f"step {self.state.global_step}", *_shortened(shown, logs), *self._pace_words(own)))
                )
            logs |= own
            # Once for all tasks, so that integrations get one record a step.
            self._emit(logs)

    def _run_numbers(self) -> dict[str, float]:
        """Return what is logged of the whole run: its speed since the last log, and its memory."""
        now, num_tokens = time.perf_counter(), sum(run.num_tokens for run in self.table)
        (since, before, step), self._counted = self._counted, (now, num_tokens, self.state.global_step)
        # Tasks that were removed have taken their tokens with them, and a first log has nothing to compare with.
        speed = {"run/tokens_per_second": (num_tokens - before) / (now - since)} if num_tokens > before > -1 else {}
        self._steps_per_s = (self.state.global_step - step) / (now - since) if speed else 0.0
        return {**speed, "run/memory_gib": peak_bytes() / 2**30}

    def _pace_words(self, numbers: Mapping[str, float]) -> list[str]:
        """Return how fast the run is and how long it goes on, for a line; nothing where steps have just begun."""
        speed = numbers.get("run/tokens_per_second")
        left = max((run.num_steps - run.step for run in self.table.running), default=0)
        if speed is None or not left or not self._steps_per_s:
            return []
        return [f"({rate_text(speed)} tokens/s, {time_text(left / self._steps_per_s)} left)"]

    def evaluation(self, run: TaskRun, metrics: dict[str, float]) -> dict[str, float]:
        """Log what an evaluation found; return it under `task/metric` keys."""
        self.numbers(run, "eval", metrics)
        logs = _prefixed(run.name, metrics)
        if not self.progress.shows_losses:
            # The step of the task, as evaluations are due by that.
            self.say("  ".join((f"{run.name} step {run.step}", *(f"{k} {v:.4f}" for k, v in metrics.items()))))
        self._emit(logs)
        return logs

    def status(self, event: TaskEvent, step: int) -> None:
        """Log a change in the life of a task."""
        self.event("status", task=event.task, step=step, status=event.status.value, reason=event.reason)
        tell = self.warn if event.status is TaskStatus.FAILED else self.say
        tell(f"{event.task}: {event.status.value}{f' ({event.reason})' if event.reason else ''}")
        if event.status.is_final and event.task in self.callbacks:
            self.callbacks[event.task].trackers.end()

    def event(self, event: str, **facts: Any) -> None:
        """Write a record of the run to `metrics.jsonl`."""
        self.metrics.write({"event": event, "run_step": self.state.global_step, **facts})


def _shortened(shown: list[str], logs: Mapping[str, float]) -> list[str]:
    """Return the losses of a line, or where they are many, the least and the greatest."""
    if len(shown) <= _MOST_LOSSES:
        return shown
    losses = {name.rpartition("/")[0]: value for name, value in logs.items() if name.endswith("/loss")}
    low, high = min(losses, key=losses.__getitem__), max(losses, key=losses.__getitem__)
    mean = sum(losses.values()) / len(losses)
    return [f"{len(losses)} tasks, mean {mean:.4f}, from {low} {losses[low]:.4f} to {high} {losses[high]:.4f}"]


def _prefixed(task: str, values: Mapping[str, float]) -> dict[str, float]:
    return {f"{task}/{key}": value for key, value in values.items()}
