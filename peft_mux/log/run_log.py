"""`RunLog`: where the numbers and events of a run go.

A record reaches up to four places: the task's state (`log_history`), the task's own callbacks (plain keys), the
callbacks of the run and its integrations (`task/metric` keys), and `metrics.jsonl`. A line goes to the screen.

It also reports which tokens carry loss and which rows are cut or left out, as a run may train for hours on four rows of
twenty-four: when a task begins, when a stream leaves out its first row, and at the end.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from types import MappingProxyType
from typing import Any
from weakref import WeakSet

from transformers import TrainerControl, TrainerState

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.data.tokenize import ROW_COUNTS, DataReport
from peft_mux.engine.allocator import peak_bytes
from peft_mux.engine.tasks.active_task import ActiveTask, TaskTable, run_interval
from peft_mux.log.callbacks import Observer, TaskCallbacks
from peft_mux.log.lines import Progress, counted, time_text, wrapped
from peft_mux.log.metrics_file import MetricsLog
from peft_mux.log.recorders import RunTimes
from peft_mux.modeling.router_loss import STATISTIC
from peft_mux.scheduler.units import rate_text
from peft_mux.task import TaskStatus
from peft_mux.user_code import log_warning

_MOST_REPORTS = 6
"""Remarks of more datasets than this are not listed, as they would push everything else off the screen."""
_MOST_LOSSES = 12
"""Losses of more tasks than this are not listed in a line, nor metrics of training rows in a line each."""
_logger = logging.getLogger(__name__)


class RunLog:
    """Writes what happens in a run.

    Args:
        table: all tasks of the run.
        state: the state of the run; its `global_step` counts steps of the run.
        emit: hands `task/metric` numbers to the callbacks of the run.
        is_shown: whether this process is the one that prints.
        is_quiet: whether only warnings are printed, next to what moves (`log_level` "warning" or above).

    Attributes:
        metrics: the file `metrics.jsonl`; nothing is written until training begins.
        progress: the screen; silent until training begins.
        make_progress: returns the screen of a training; by default one of lines alone.
        callbacks: the callbacks of each task that was started, by the name of the task.
        is_shown: whether this process is the one that prints.
        times: seconds of the steps, of each task, and of the tasks' own code.
        observers: called at what happens in the run, in this order.
    """

    def __init__(
        self,
        table: TaskTable,
        state: TrainerState,
        emit: Callable[[dict[str, float]], None],
        *,
        is_shown: bool = True,
        is_quiet: bool = False,
    ) -> None:
        self.table = table
        self.state = state
        self.metrics = MetricsLog(None)
        self.progress = Progress(is_silent=True)
        self.make_progress: Callable[[], Progress] = lambda: Progress(is_silent=not is_shown)
        self.callbacks: dict[str, TaskCallbacks] = {}
        self.is_shown, self.is_quiet = is_shown, is_quiet
        self.times = RunTimes()
        self.observers: list[Observer] = []
        self._emit = emit
        self._counted = (time.perf_counter(), -1, 0)
        self._step_s: float | None = None
        # By loader, because another task may have the same name; weakly, because tasks leave with their rows.
        self._begun_rows: WeakSet[Any] = WeakSet()
        self._warned_rows: WeakSet[Any] = WeakSet()

    def open(self, metrics: MetricsLog) -> None:
        """Write to a file and a screen from now on."""
        self.metrics, self.progress = metrics, self.make_progress()
        metrics.warn = self.warn

    def add_callbacks(self, task: str, callbacks: TaskCallbacks) -> None:
        """Pass a task's numbers to its own callbacks from now on."""
        self.callbacks[task] = callbacks
        callbacks.listener, callbacks.observers = self.note_user_code, self.observers

    def drop_callbacks(self, task: str) -> None:
        """Stop calling the callbacks of a task that has left."""
        self.callbacks.pop(task, None)
        self.record_user_code([task])
        self.times.forget_user_code(task)

    def note_user_code(self, task: str, what: str, seconds: float) -> None:
        """Count a call of a task's own code (as its `Listener`), and warn if the other tasks wait long for it."""
        total_s = self.times.add_user_code(task, what, seconds)
        if total_s is not None:
            self.event("delay", task=task, what=what, seconds=seconds, total_s=total_s)
            self.warn(f"{task}: its {what} made the other tasks wait for {seconds:.1f} s ({total_s:.1f} s in all)")

    def record_user_code(self, tasks: Iterable[str] | None = None) -> None:
        """Record the seconds of the own code of tasks (by default of all), if they are 1 or more for a task."""
        for task, spent_s in self.times.user_code_s().items():
            if tasks is None or task in tasks:
                seconds = {f"{kind}_s": seconds for kind, seconds in spent_s.items()}
                self.event("delay_total", task=task, total_s=sum(spent_s.values()), **seconds)

    def use_model(self, model: Any) -> None:
        """Hand another model to the callbacks of all tasks from now on; `None` while there is none."""
        for callbacks in self.callbacks.values():
            callbacks.handler.model = model

    def begin(self) -> None:
        """Show the tasks, which are about to take steps, from now on."""
        for observer in self.observers:
            observer.on_begin()
        self.times.begin(self.table)
        self.progress.start(self.table)

    def advance(self) -> None:
        """Show where the tasks are after a step."""
        self.times.advance(self.table)
        self.progress.advance(self.table)

    def say(self, line: str) -> None:
        """Print a line above the progress, in several lines if it is wider than the window; nothing if quiet."""
        if not self.is_quiet:
            self.progress.log(wrapped(line, self.progress.width))

    def warn(self, line: str) -> None:
        """Print a line that must not be missed, through `logging` if there is no progress to print it above."""
        if not self.is_shown:
            return
        if self.progress.is_silent:
            log_warning(_logger, line)
        else:
            self.progress.log(line)

    def numbers(
        self,
        task: ActiveTask,
        event: str,
        values: Mapping[str, float],
        times: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        """Keep numbers of one task: in its state, in `metrics.jsonl`, and for its own callbacks.

        Callbacks alone get the `times`: what is kept has the same bits after a resume.
        """
        entry: dict[str, Any] = {"step": task.step, **({} if task.epoch is None else {"epoch": task.epoch}), **values}
        task.state.log_history.append(entry)
        record = {"event": event, "run_step": self.state.global_step, "task": task.name, "num_tokens": task.num_tokens}
        self.metrics.write({**record, **entry})
        self.callbacks[task.name].call("on_log", logs={**values, **times})

    def losses(self, tasks: Iterable[ActiveTask] | None = None) -> None:
        """Log the mean loss of tasks (by default all) since their last log, and the speed and memory of the run."""
        logs: dict[str, float] = {}
        losses: dict[str, float] = {}
        lines = []
        for task in self.table if tasks is None else tasks:
            names = task.resolved.objective.statistic_names(task.resolved.loss_args)
            loss, statistics = task.loss_mean.read((*names, STATISTIC) if task.router_coefficient else names)
            if loss is None:
                continue
            values = {"loss": loss, "grad_norm": task.last_gradient_norm, "learning_rate": task.last_learning_rate}
            values |= statistics
            self.numbers(task, "train", values)
            losses[task.name] = loss
            lines += [_line_of(task, statistics)] if statistics else []
            logs |= _prefixed(task.name, values)
        if not logs:
            return
        words = [f"step {self.state.global_step}", *(f"{name} {loss:.4f}" for name, loss in losses.items())]
        if len(losses) > _MOST_LOSSES:
            low, high = min(losses, key=losses.__getitem__), max(losses, key=losses.__getitem__)
            mean = sum(losses.values()) / len(losses)
            words[1:] = [
                f"{len(losses)} tasks, mean {mean:.4f}, from {low} {losses[low]:.4f} to {high} {losses[high]:.4f}"
            ]
        now, num_tokens = time.perf_counter(), sum(task.num_tokens for task in self.table)
        (since, before, step), self._counted = self._counted, (now, num_tokens, self.state.global_step)
        # Removed tasks have taken their tokens with them, and a first log has nothing to compare with.
        if num_tokens > before > -1:
            logs["run/tokens_per_second"] = speed = (num_tokens - before) / (now - since)
            left = max((task.num_steps - task.step for task in self.table.running), default=0)
            if left and (num_steps := self.state.global_step - step):
                step_s = (now - since) / num_steps
                # Smoothed: a few slow steps say little about the next ones.
                self._step_s = step_s if self._step_s is None else 0.7 * self._step_s + 0.3 * step_s
                words.append(f"({rate_text(speed)} tokens/s, {time_text(left * self._step_s)} left)")
        logs["run/memory_gib"] = peak_bytes() / 2**30
        if not self.progress.shows_losses:
            self.say("  ".join(words))
        for line in lines if len(lines) <= _MOST_LOSSES else ():
            self.say(line)
        # Once for all tasks, so that integrations get one record per step.
        self._emit(logs)

    def losses_if_due(self, args: MultiTaskTrainingArguments, control: TrainerControl) -> None:
        """Log the losses of all tasks if the arguments or a callback ask for it after this step."""
        step = self.state.global_step
        every = run_interval(args.logging_steps, self.table) if args.logging_strategy == "steps" else 0
        is_due = every > 0 and step % every == 0
        is_due |= args.logging_strategy != "no" and args.logging_first_step and step == 1
        if control.should_log or is_due:
            control.should_log = False
            self.losses()
        else:
            by_epoch = args.logging_strategy == "epoch"
            due = [(task, self.callbacks[task.name].control.should_log) for task in self.table.running]
            self.losses([task for task, asks in due if asks or (by_epoch and task.is_at_epoch_end)])

    def evaluation(self, task: ActiveTask, metrics: dict[str, float], times: Mapping[str, float]) -> dict[str, float]:
        """Log what an evaluation found, and its `times` for callbacks alone; return metrics by `task/metric` keys."""
        self.numbers(task, "eval", metrics, times)
        logs = _prefixed(task.name, metrics)
        shown = ("eval_loss", "eval_perplexity") if self.progress.shows_losses else ()
        if left := {name: value for name, value in metrics.items() if name not in shown}:
            self.say(_line_of(task, left))
        self._emit(logs | _prefixed(task.name, times))
        return logs

    def status(self, task: ActiveTask) -> None:
        """Log the status that a task has now."""
        self.event("status", task=task.name, step=task.step, status=task.status.value, reason=task.reason)
        say = self.warn if task.status is TaskStatus.FAILED else self.say
        say(f"{task.name}: {task.status.value}{f' ({task.reason})' if task.reason else ''}")
        if task.status.is_final and task.name in self.callbacks:
            self.end_of_task(task)

    def end_of_task(self, task: ActiveTask) -> None:
        """Give callbacks the last log of Trainer: mean loss and rates of the steps of a task in this training."""
        seconds, num_steps = self.times.seconds_now(task), task.train_loss.count
        if num_steps and task.status is not TaskStatus.FAILED:
            logs = {"train_runtime": seconds, "train_loss": task.train_loss.total / num_steps}
            if seconds:
                num_rows = num_steps * task.hyper.train_batch_size
                logs |= {"train_samples_per_second": num_rows / seconds, "train_steps_per_second": num_steps / seconds}
            self.callbacks[task.name].call("on_log", logs=logs)

    def event(self, event: str, **facts: Any) -> None:
        """Write a record of the run to `metrics.jsonl`."""
        self.metrics.write({"event": event, "run_step": self.state.global_step, **facts})

    # ------------------------------------------------------------------ rows that are cut or left out

    def begin_rows(self, *tasks: ActiveTask) -> None:
        """Record and print what starting tasks train on, and which rows were cut or left out; sums for many tasks."""
        reports, lines, trained = [], [], []
        for task in tasks:
            if task.loader in self._begun_rows:
                continue
            self._begun_rows.add(task.loader)
            by_split = {"train_dataset": task.loader.report}
            by_split |= {rows.report.split: rows.report for rows in task.eval_data.values()}
            for split, report in by_split.items():
                self._write_rows(task, split, report)
            reports += [report for report in by_split.values() if report.remarks]
            lines += [task.sharing_remark] if task.sharing_remark else []
            rows = task.loader.report
            # Of a stream, the rows of the first step are known.
            seen = f", in its first {counted(rows.num_rows, 'row')}" if task.loader.steps_per_epoch is None else ""
            trained += [(rows, f"{task.name}: {rows.targets_text}{seen}")] if rows.trained_on else []
            if task.loader.report.remarks:
                # A `UserWarning` has reported it when the task was made.
                self._warned_rows.add(task.loader)
        remarks = [remark for report in reports for remark in report.remarks]
        if len(reports) > _MOST_REPORTS:
            counts = {what: sum(getattr(report, name) for report in reports) for name, (what, _) in ROW_COUNTS.items()}
            words = [f"{count:,} {what.format(limit='max_length')}" for what, count in counts.items() if count]
            worst = max(reports, key=lambda report: 1 - report.num_kept / max(report.num_rows, 1))
            remarks = [
                f"rows     of {sum(report.num_rows for report in reports):,} in {len(reports)} datasets "
                f"{', '.join(words)}; details: trainer.plan().notes, peft-mux validate",
                f"         worst: {worst.remarks[0]}",
            ]
        loss_lines = [line for _, line in trained]
        if len(trained) > _MOST_REPORTS:
            carrying = sum(rows.num_target_tokens for rows, _ in trained)
            tokens = sum(rows.num_tokens for rows, _ in trained)
            loss_lines = [f"loss on {carrying:,} of {tokens:,} tokens of {len(trained)} tasks; of each: metrics.jsonl"]
        for line in loss_lines + remarks + lines:
            self.say(line)

    def step_rows(self, tasks: Iterable[ActiveTask]) -> None:
        """Warn of each stream that has left out or cut its first row."""
        for task in tasks:
            is_stream = task.loader.steps_per_epoch is None
            if is_stream and task.loader not in self._warned_rows and task.loader.report.remarks:
                self._warned_rows.add(task.loader)
                self._write_rows(task, "train_dataset", task.loader.report)
                self.warn(task.loader.report.warning)

    def end_rows(self, tasks: Iterable[ActiveTask]) -> None:
        """Record and print how many rows of streams were cut or left out by now."""
        for task in tasks:
            if task.loader.steps_per_epoch is None:
                self._write_rows(task, "train_dataset", task.loader.report)
                for remark in task.loader.report.remarks:
                    self.say(remark)

    def _write_rows(self, task: ActiveTask, split: str, report: DataReport) -> None:
        numbers = asdict(report)
        del numbers["where"]
        facts = {"data_format": str(report.data_format), "loss_kind": task.loss_kind, "settings": task.swept_as}
        self.event("data", task=task.name, split=split, **{**numbers, **facts})


def _line_of(task: ActiveTask, values: Mapping[str, float]) -> str:
    # The step of the task, by which logs and evaluations are due.
    return "  ".join((f"{task.name} step {task.step}", *(f"{name} {value:.4f}" for name, value in values.items())))


def _prefixed(task: str, values: Mapping[str, float]) -> dict[str, float]:
    return {f"{task}/{key}": value for key, value in values.items()}
