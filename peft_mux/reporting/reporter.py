"""`Reporter`: the first lines of a run, the cards of its tasks, and at its end a report, `report.html` and a plot."""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from transformers.trainer_utils import TrainOutput

from peft_mux.checkpoint.saver import environment_of, numerics_of, task_config
from peft_mux.engine.allocator import peak_bytes
from peft_mux.engine.tasks.active_task import ActiveTask
from peft_mux.errors import ConfigError
from peft_mux.log.callbacks import Observer
from peft_mux.log.metrics_file import METRICS_NAME, read_metrics
from peft_mux.log.recorders import PassReport, pass_lines, shared_tokens
from peft_mux.planning.plan_follower import PlanFollower
from peft_mux.reporting.hub import write_task_files
from peft_mux.reporting.page import page_html, plot_losses
from peft_mux.reporting.run_report import RankRecord, ReportRow, RunReport, banner_lines, next_lines, report_row
from peft_mux.reporting.views import RunView, interrupted, metrics_of, view_of, view_of_records
from peft_mux.scheduler.plan_views import MeasuredStep
from peft_mux.storage import keeper_of, write_file
from peft_mux.task import TaskStatus
from peft_mux.trainer.placement import Placement
from peft_mux.trainer.run import Run
from peft_mux.user_code import describe_error

PAGE_NAME = "report.html"
PLOT_NAME = "losses.png"
_MOST_PANELS = 60
_MANY = 12
"""Number of tasks from which on writing at the end takes seconds, so that it is announced."""


class Reporter(Observer):
    """Reports what a run is about to do and what it has done.

    Args:
        run: the present run.
        placement: the model of this process.
        plans: the plan that is followed, with what it predicted and what was measured.

    Attributes:
        best_task: the task that the last lines suggest to merge; "" for the first one.
        resume_command: the command of a shell that resumes the run; "" if the user's own program trains.
        interrupted_by: number of the signal that ended the last training; 0 for none.
        records: what each process did in the last training, by rank; empty before it.
        pass_reports: planned and executed passes of each replica, from the last training; empty before it.
    """

    def __init__(self, run: Run, placement: Placement, plans: PlanFollower) -> None:
        self.best_task = self.resume_command = ""
        self.interrupted_by = 0
        self.records: tuple[RankRecord, ...] = ()
        self.pass_reports: tuple[PassReport, ...] = ()
        self._run, self._placement, self._plans, self._measured = run, placement, plans, plans.measured
        self._removed: list[ReportRow] = []

    # ------------------------------------------------------------------ while it trains

    def on_begin(self) -> None:
        """Print what is about to be trained, on what, and how."""
        run, plan = self._run, self._plans.current
        if not run.log.is_shown or plan is None:
            return
        lines = banner_lines(
            run.args,
            self._placement.outline,
            self._placement.source,
            list(run.table),
            plan,
            attention=numerics_of(run.args)["attention"],
            processes="" if run.processes.is_alone else f"{run.layout.world_size} processes, replicas {run.layout}",
            root=run.root,
        )
        for line in lines:
            run.log.say(line)

    def on_task_end(self, task: ActiveTask) -> None:
        """Write the card of a task."""
        self.write_task_files(task)

    def on_task_remove(self, task: ActiveTask, folder: Path | None) -> None:
        """Keep a line for the report of a task that leaves."""
        seconds = self._run.log.times.seconds(task.name)
        self._removed.append(report_row(task, folder, seconds, TaskStatus.REMOVED))

    def on_saved(self, tasks: Sequence[ActiveTask]) -> None:
        """Write the cards of tasks whose adapters may go to the Hub."""
        if self._run.args.push_to_hub:
            for task in tasks:
                self.write_task_files(task)

    def write_task_files(self, task: ActiveTask, folder: Path | None = None) -> None:
        """Write the card, the plot and the tokenizer of a task's saved adapter; failures are logged, not raised.

        Args:
            task: the task.
            folder: folder of its adapter; by default the one in the run folder.
        """
        run = self._run
        folder = folder or run.saver.place(task)
        if folder is None or not run.saver.is_writer:
            return
        try:
            num_tasks = len(list(run.table)) + len(self._removed)
            handler = run.callbacks.handler
            write_task_files(folder, task, num_tasks, handler.processing_class, handler.model)
        except Exception as error:  # the adapter is safe, so this must not end the run
            run.log.warn(f"{folder}: its card could not be written ({describe_error(error)})")

    # ------------------------------------------------------------------ the end of a run

    def finish(self, seconds: float, waited_s: float, num_tokens: int, num_steps: int, added_bytes: int) -> TrainOutput:
        """Log and return the results of training, and call `on_train_end`; all processes call this.

        Args:
            seconds: seconds that training took.
            waited_s: seconds of these that this process spent waiting for others.
            num_tokens: tokens that went through the backbone of this process, padding included.
            num_steps: steps of the run that were taken.
            added_bytes: host memory that this process took while it trained.

        Returns:
            Number of steps of the run so far, mean of the tasks' mean losses, and metrics with `task/metric` keys.
        """
        run, processes, leaders = self._run, self._run.processes, self._run.layout.leaders
        place = run.layout.place(processes.rank)
        replica = run.layout.replicas[place.replica]
        part = [f"replica {place.replica + 1} of {run.layout.num_replicas}"]
        part += [f"stage {place.stage + 1} of {replica.pp}"] if replica.pp > 1 else []
        part += [f"shard {place.tp_rank + 1} of {replica.tp}"] if replica.tp > 1 else []
        peak = peak_bytes(run.args.device)
        weights = [*run.callbacks.handler.model.parameters(), *run.callbacks.handler.model.buffers()]
        held = peak if run.args.device.type == "cuda" else sum(task.nbytes for task in weights) + added_bytes
        record = RankRecord(processes.rank, num_tokens, seconds, waited_s, peak, ", ".join(part), held)
        self.records = tuple(RankRecord(*record) for record in processes.gather(record))
        # The signal need not have reached every process.
        self.interrupted_by = max(processes.gather(self.interrupted_by))
        if self.interrupted_by:
            name = signal.Signals(self.interrupted_by).name
            is_saved = run.saver.folder is not None and run.saver.is_current
            if run.saver.folder is None:
                way_on = 'nothing is saved (save_strategy="no"); train() of this trainer continues from here'
            elif is_saved:
                how = "resume with train(resume_from_checkpoint=True), or peft-mux train FILE --resume"
                way_on = f"saved in {run.root}; {how}"
            else:
                way_on = (
                    f"this step could not be saved in {run.root}, so a new process resumes from the state before it"
                )
            steps = {task.name: task.step for task in run.table}
            run.log.event("interrupted", signal=name, is_saved=is_saved, steps=steps)
            run.log.warn(f"interrupted by {name} after step {run.state.global_step}; {way_on}")

        self._measured.exchange()
        correction = self._plans.planner.correction
        if correction.num_passes:
            run.log.event("times", measured=correction.num_passes, **correction.agreed._asdict())

        # One process of each replica counts the tokens of all.
        total_tokens = sum(record.tokens for record in self.records if record.rank in leaders)
        metrics: dict[str, float] = {
            "train_runtime": seconds,
            "train_tokens_per_second": total_tokens / max(seconds, 1e-9),
            "train_steps_per_second": num_steps / max(seconds, 1e-9),
        }
        if correction.time_ratio is not None:
            metrics["measured_over_planned_time"] = correction.time_ratio
        if self.interrupted_by:
            metrics["interrupted_by"] = self.interrupted_by
        if num_failed := sum(task.status is TaskStatus.FAILED for task in run.table):
            metrics["failed_tasks"] = num_failed
        sums = {task.name: task.train_loss for task in run.table}
        means = {name: loss.total / loss.count if loss.count else float("nan") for name, loss in sums.items()}
        metrics |= {f"{name}/train_loss": mean for name, mean in means.items()}
        run.log.event("run", **metrics)

        self._measured.report_slow_replica()
        clock = self._measured.dispatch_clock
        if clock is not None and clock.num_steps:
            run.log.event("dispatch", hidden_share=clock.hidden_share, **asdict(clock))
            run.log.say(str(clock))
        reports = processes.gather(self._measured.pass_report)
        self.pass_reports = tuple(replace(reports[leader], replica=number) for number, leader in enumerate(leaders))
        for report in self.pass_reports:
            if report.num_steps:
                facts = asdict(report)
                del facts["asked_tokens"], facts["computed_tokens"]
                run.log.event("passes", **facts)
        for line in pass_lines(self.pass_reports):
            run.log.say(line)
        shared = shared_tokens(self.pass_reports)
        parts = []
        for name, (computed, asked) in shared.items():
            run.log.event("sharing", task=name, computed_tokens=computed, asked_tokens=asked)
            share = f"{100 * computed / asked:.0f} %"
            parts.append(f"{name} computed {computed:,} of {asked:,} tokens ({share})")
        if parts:
            run.log.say(f"prefix sharing: {', '.join(parts)}")
        run.log.end_rows(run.table)
        run.log.record_user_code()
        for record in self.records if len(self.records) > 1 else ():
            run.log.event("rank", **record._asdict())
        run.callbacks.log({name if "/" in name else f"run/{name}": value for name, value in metrics.items()})
        run.callbacks.call("on_train_end")
        for task in run.table:
            if task.name in run.log.callbacks and not task.status.is_final:
                run.log.end_of_task(task)
        for callbacks in run.log.callbacks.values():
            callbacks.call("on_train_end")
        self._write_end(num_steps)
        finite = [mean for mean in means.values() if mean == mean]  # NaN for tasks that took no step
        mean_loss = math.nan if num_failed or not finite else sum(finite) / len(finite)
        return TrainOutput(run.state.global_step, mean_loss, metrics)

    def _write_end(self, num_steps: int) -> None:
        """Write the files of the run and of its tasks, and print its report; all processes call this."""
        run, followed = self._run, self._run.log.times.followed
        passes = () if followed is None else followed[1].passes
        passes_here = tuple(
            (tuple(dict.fromkeys(part.task for rows in timed.passes for part in rows)), timed.seconds)
            for timed in passes
        )
        gathered = run.processes.gather(passes_here)
        steps = tuple(MeasuredStep(rank, run.layout.place(rank).stage, task) for rank, task in enumerate(gathered))
        num_tasks = sum(1 for _ in run.table)
        if num_tasks >= _MANY and run.saver.folder is not None:
            run.log.say(f"writing cards and pictures of {num_tasks} tasks, and the page of the run")
        for task in run.table:
            if not task.status.is_final:  # those that have ended have theirs already
                self.write_task_files(task)
        if not run.log.is_shown:
            return
        in_turn = self._in_turn()
        # If no step was taken, the page of the earlier steps is kept.
        if run.saver.is_writer and run.saver.folder is not None and (num_steps or self._page is None):
            try:
                self._write_page(in_turn, steps)
            except Exception as error:  # the page must not lose what was trained
                run.log.warn(f"{run.root / PAGE_NAME}: could not be written ({describe_error(error)})")
            try:
                view = view_of_records(read_metrics(run.root / METRICS_NAME), {})
                # A single point shows nothing, nor do hundreds of panels: the page has them all.
                has_lines = any(max(len(task.losses), len(task.eval_losses)) > 1 for task in view.tasks)
                if has_lines and len(view.with_losses) <= _MOST_PANELS:
                    with suppress(ConfigError):  # no matplotlib, which is an extra
                        plot_losses(view, run.root / PLOT_NAME)
            except Exception as error:
                run.log.warn(f"{run.root / PLOT_NAME}: could not be written ({describe_error(error)})")
        report = self._report(in_turn)  # with the page that has been written now
        if not run.log.is_quiet:
            run.log.progress.log(f"\n{report.fitted(run.log.progress.width)}\n")

    @property
    def _page(self) -> Path | None:
        """The page of the run; `None` if none was written."""
        path = self._run.root / PAGE_NAME
        is_written = self._run.saver.is_writer and self._run.saver.folder is not None and path.is_file()
        return path if is_written else None

    def _write_page(self, in_turn: str, steps: Sequence[MeasuredStep]) -> None:
        run, followed = self._run, self._run.log.times.followed
        # `to_dict` masks tokens that a user gave as arguments.
        config = {"arguments of the run": run.args.to_dict()}
        config |= {f"task {task.name}": task_config(task) for task in run.table}
        environment = environment_of(run.args)
        remark = ""
        if self.interrupted_by:
            remark = f"Interrupted by {signal.Signals(self.interrupted_by).name}: it can be resumed."
        tasks = [replace(view_of(task), metrics=metrics_of(task.state.log_history)) for task in run.table]
        html = page_html(
            f"peft_mux: {run.root.name}",
            self._report(in_turn),
            RunView(tuple(tasks), run.state.global_step),
            None if followed is None else followed[0],
            steps,
            config={name: json.dumps(section, indent=2, default=str) for name, section in config.items()},
            versions={**environment.pop("versions"), **{name: task for name, task in environment.items() if task}},
            remark=remark,
        )
        write_file(run.root / PAGE_NAME, html.encode())

    # ------------------------------------------------------------------ the run as it is now

    def plot_losses(self, path: str | Path | None) -> Path:
        """Draw the losses of all tasks from `metrics.jsonl` into a PNG, by default `losses.png` in the run folder."""
        image = Path(path or self._run.root / PLOT_NAME)
        if not self._run.saver.is_writer:
            return image
        return plot_losses(view_of_records(read_metrics(self._run.root / METRICS_NAME), {}), image)

    def view(self) -> RunView:
        """Return the present view of the run; before it trains here, the view of its folder."""
        run, path = self._run, self._run.root / METRICS_NAME
        watch = getattr(run.log.progress, "watch", None)
        runs, is_trained = list(run.table), run.is_in_train
        if watch is not None:
            view = watch.view(with_curves=True)
        elif not any(task.step for task in runs) and path.is_file():
            view = view_of_records(read_metrics(path), {task.name: task.num_steps for task in runs})
            is_trained = is_trained or bool(keeper_of(run.root))  # another process may
        else:
            view = RunView(tuple(map(view_of, runs)), run.state.global_step)
        return view if is_trained else interrupted(view)

    def report(self) -> RunReport:
        """Return a table of all tasks: how each ended, its losses, its time and tokens, and its adapter's folder."""
        return self._report(self._in_turn())

    def _report(self, in_turn: str) -> RunReport:
        run, log = self._run, self._run.log
        rows = [report_row(task, run.saver.place(task), log.times.seconds(task.name)) for task in run.table]
        rows += [row for row in self._removed if row.name not in run.table]
        # Shares are of all tasks that were trained, those that have left since included.
        rows = [row._replace(time_share=log.times.share(row.name)) for row in rows]
        paused = [] if run.is_in_train else [row.name for row in rows if row.status == "paused"]
        notes = [
            str(self._plans.planner.correction),
            in_turn,
            f"paused {', '.join(paused)}: the run has ended, with steps left" if paused else "",
            *next_lines(run.root, rows, self._page, self.best_task, self.resume_command),
        ]
        return RunReport(rows, self.records, [note for note in notes if note], not run.is_in_train)

    def _in_turn(self) -> str:
        """Return in a line how long the steps took, and would have taken task by task; "" if that is not known."""
        run, planner, times = self._run, self._plans.planner, self._run.log.times
        ratio, profile, measured_s = planner.correction.time_ratio, planner.profile, times.settled_s
        # The rows of removed tasks are gone, so the time of their steps alone cannot be predicted.
        if ratio is None or profile is None or not measured_s or self._removed:
            return ""
        if profile.source != "measured":
            return ""  # an order of magnitude says nothing about a gain
        taken = {task.name: times.num_steps(task) for task in run.table}
        alone_s = self._plans.alone_s([task for task in run.table if taken[task.name]])
        predicted_s = ratio * sum(taken[name] * seconds for name, seconds in alone_s.items())
        if not predicted_s:
            return ""
        return (
            f"speed  steps together {measured_s:,.1f} s, measured; in turn {predicted_s:,.1f} s, predicted "
            f"(measured profile, times {ratio:.2f}): {predicted_s / measured_s:.2f}x"
        )
