"""`RunFiles`: what is left of a run beside its adapters: `report.html`, pictures of its losses."""

# MERGED: `Reporter`: logs and evaluations while a run goes on, and what it all came to.

from __future__ import annotations

import json
import platform
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

from transformers.trainer_utils import TrainOutput

from peft_mux.checkpoint.saver import numerics_of
from peft_mux.engine.tasks.task_run import TaskRun, run_interval
from peft_mux.errors import ConfigError
from peft_mux.reporting.banner import device_words
from peft_mux.reporting.metrics_file import METRICS_NAME, read_metrics
from peft_mux.reporting.page import MeasuredPass, MeasuredStep, RunFacts, page_html, plot_losses, task_curves
from peft_mux.reporting.pass_report import PassReport, pass_lines, summed_counts
from peft_mux.reporting.report import InTurn, RankRecord, RunReport, next_lines, report_row
from peft_mux.reporting.views import RunView, interrupted, view_of, view_of_records
from peft_mux.scheduler.plan import Plan
from peft_mux.storage import keeper_of, write_file
from peft_mux.task import TaskStatus
from peft_mux.trainer.evaluation import TaskEvaluator
from peft_mux.trainer.plan_follower import PlanFollower
from peft_mux.trainer.run import Run, write_task_files
from peft_mux.trainer.world import World
from peft_mux.user_code import describe_error

PAGE_NAME = "report.html"
PLOT_NAME = "losses.png"
_MOST_PANELS = 60


class RunFiles:
    """Writes what is left of a run; where that fails, says so and goes on.

    Args:
        run: the run.
        world: all processes of the run.
    """

    def __init__(self, run: Run, world: World) -> None:
        """Write nothing yet."""
        self._run, self._world = run, world

    @property
    def page(self) -> Path | None:
        """The page of the run; `None` where none was written."""
        path = self._run.root / PAGE_NAME
        return path if self._is_wanted and path.is_file() else None

    @property
    def _is_wanted(self) -> bool:
        return self._run.saver.is_writer and self._run.saver.folder is not None

    def write(self, report: RunReport, plan: Plan | None, steps: Sequence[MeasuredStep]) -> None:
        """Write the page and the picture of the losses, where anything of the run is saved.

        Args:
            report: the tasks at the end.
            plan: the plan that was followed for most steps.
            steps: its last step, as each process timed it.
        """
        if self._is_wanted:
            self._try(PAGE_NAME, lambda: self._write_page(report, plan, steps))
            self._try(PLOT_NAME, self._plot)

    def _try(self, name: str, write: Callable[[], None]) -> None:
        try:
            write()
        # Whatever draws and the disk say is no reason to lose what was trained.
        except Exception as error:
            self._run.log.warn(f"{self._run.root / name}: could not be written ({describe_error(error)})")

    def _plot(self) -> None:
        records = read_metrics(self._run.root / METRICS_NAME)
        curves = task_curves(records)
        # A single point is nothing to see, and hundreds of panels neither: the page has them all.
        if not any(len(curve) > 1 for own in curves.values() for curve in own.values()) or len(curves) > _MOST_PANELS:
            return
        try:
            plot_losses(records, self._run.root / PLOT_NAME)
        except ConfigError:  # no matplotlib, which is an extra
            return

    def _write_page(self, report: RunReport, plan: Plan | None, steps: Sequence[MeasuredStep]) -> None:
        run = self._run
        facts = RunFacts(
            title=f"peft_mux: {run.root.name}",
            report=report,
            view=RunView(tuple(map(view_of, run.table)), run.state.global_step),
            plan=plan,
            steps=steps,
            records=self._world.records,
            config=self._config(),
            versions=self._versions(),
            remark=self._remark(),
            is_host=run.args.device.type != "cuda",
        )
        write_file(run.root / PAGE_NAME, page_html(facts).encode())

    def _remark(self) -> str:
        number = self._run.interrupted_by
        return f"Interrupted by {signal.Signals(number).name}: it may go on." if number else ""

    def _config(self) -> Mapping[str, str]:
        run = self._run
        # Tokens that a user gave as arguments are for nobody else; `to_dict` masks them.
        sections: dict[str, Any] = {"arguments of the run": run.args.to_dict()}
        for own in run.table:
            config = own.task.peft_config.to_dict()
            sections[f"task {own.name}"] = {**asdict(own.hyper), "num_steps": own.num_steps, "peft_config": config}
        return {name: json.dumps(section, indent=2, default=str) for name, section in sections.items()}

    def _versions(self) -> Mapping[str, Any]:
        found = numerics_of(self._run.args)
        names = [name for name in found if name.endswith("version")] + ["attention", "world_size"]
        return {
            "Python": f"{platform.python_version()}, {platform.platform()}",
            "device": device_words(self._run.args.device),
            **{name.removesuffix(" version"): found[name] for name in names},
        }


def measured_steps(world: World, times: Any) -> tuple[MeasuredStep, ...]:
    """Return the last step under a plan as each process timed it; all processes call this.

    Args:
        world: all processes of the run.
        times: the passes of the step, as they were timed on this process.
    """
    own = tuple(
        MeasuredPass(tuple(dict.fromkeys(part.task for rows in one.passes for part in rows)), one.seconds)
        for one in times.passes
    )
    found = world.processes.gather(own)
    places = [world.layout.place(rank) for rank in range(len(found))]
    return tuple(
        MeasuredStep(rank, place.stage, place.replica, tuple(MeasuredPass(*one) for one in passes))
        for rank, (place, passes) in enumerate(zip(places, found, strict=True))
    )


_MANY = 12
"""Tasks from which on what is written at the end takes seconds, so that it is announced."""


class Reporter:
    """Logs and evaluates while a run goes on, and reports when it is over.

    Args:
        run: the run under way.
        world: all processes of the run, which tell what each has done.
        plans: the plan that is followed, with what it predicted and what was measured.
        evaluator: evaluates one task at a time.

    Attributes:
        pass_reports: planned against executed passes of each replica, from the last training; empty before it.
    """

    def __init__(self, run: Run, world: World, plans: PlanFollower, evaluator: TaskEvaluator) -> None:
        """Report nothing yet."""
        self.pass_reports: tuple[PassReport, ...] = ()
        self._run, self._world, self._plans, self._evaluator = run, world, plans, evaluator
        # By the loader, as another task may come under the same name; weakly, as tasks leave with their rows.
        self._evaluated: WeakSet[Any] = WeakSet()
        self._files = RunFiles(run, world)

    def log_if_due(self) -> None:
        """Log the losses of all tasks where the arguments or a callback ask for it after this step."""
        args, control, step = self._run.args, self._run.control, self._run.state.global_step
        if control.should_log or self._is_log_due(step):
            control.should_log = False
            self._run.log.losses()
        elif args.logging_strategy == "epoch":
            self._run.log.losses([run for run in self._run.table.running if run.is_at_epoch_end])

    def _is_log_due(self, step: int) -> bool:
        args = self._run.args
        if args.logging_strategy != "no" and args.logging_first_step and step == 1:
            return True
        return args.logging_strategy == "steps" and step % run_interval(args.logging_steps, self._run.table) == 0

    def evaluate_new(self) -> None:
        """Evaluate the tasks that are about to take their first step and ask for that (`eval_on_start`)."""
        new = [run for run in self._run.table.running if run.step == 0 and run.hyper.eval_on_start]
        new = [run for run in new if run.eval_data is not None and run.loader not in self._evaluated]
        answers = self._evaluator.generate(new)
        for run in new:
            self._evaluated.add(run.loader)
            if run.status is TaskStatus.RUNNING:
                self._run.callbacks.call("on_evaluate", self._evaluator.evaluate(run, answers.get(run.name)))

    def evaluate_if_due(self, names: Sequence[str]) -> None:
        """Evaluate the tasks whose turn it is, and stop those whose callbacks ask for it.

        Args:
            names: the tasks that have just stepped.
        """
        # Reset before callbacks are called, which may wish for the next one.
        everybody = self._run.control.should_evaluate
        self._run.control.should_evaluate = False
        due = {name for name in names if self._is_due(self._run.table[name], everybody=everybody)}
        # All tasks at once, before the first one is evaluated: their completions share batches.
        answers = self._evaluator.generate([self._run.table[name] for name in names if name in due])
        for name in names:
            run = self._run.table[name]
            # Asked again, as callbacks of the tasks before may have ended this one.
            if name in due and run.status is TaskStatus.RUNNING:
                self._run.callbacks.call("on_evaluate", self._evaluator.evaluate(run, answers.get(name)))
            if run.status is TaskStatus.RUNNING and self._run.log.callbacks[name].control.should_training_stop:
                run.end(TaskStatus.STOPPED_EARLY, "stopped by a callback of the task")

    @staticmethod
    def _is_due(run: TaskRun, *, everybody: bool) -> bool:
        is_evaluated = run.status is TaskStatus.RUNNING and run.eval_data is not None
        return is_evaluated and (run.is_evaluation_due or everybody)

    def finish(self, seconds: float, waited_s: float, num_tokens: int, num_steps: int) -> TrainOutput:
        """Log and return what training came to, and call `on_train_end`; all processes call this.

        Args:
            seconds: seconds that training took.
            waited_s: seconds of these that this process spent waiting for others.
            num_tokens: tokens that went through the backbone of this process, padding included.
            num_steps: steps of the run that were taken.

        Returns:
            Number of steps of the run so far, mean of the tasks' last losses, and metrics with `task/metric` keys.
        """
        records = self._world.gather_records(num_tokens, seconds, waited_s)
        self._tell_interruption()
        self._log_times()
        metrics = self._metrics(seconds, self._replica_tokens(records), num_steps)
        self._run.log.event("run", **metrics)
        self._log_dispatch_times()
        self._log_passes()
        self._run.log.rows.end(self._run.table)
        self._run.log.delays.record_totals()
        for record in records if len(records) > 1 else ():
            self._run.log.event("rank", **record._asdict())
        self._run.callbacks.call("on_train_end")
        for callbacks in self._run.log.callbacks.values():
            callbacks.call("on_train_end")
        self._write_end(num_steps)
        # NaN, the loss of a task that took no step, does not equal itself.
        finite = [run.last_loss for run in self._run.table if run.last_loss == run.last_loss]
        return TrainOutput(self._run.state.global_step, sum(finite) / max(len(finite), 1), metrics)

    def _write_end(self, num_steps: int) -> None:
        """Write what is left of the run, and print its report; all processes call this."""
        run = self._run
        steps = measured_steps(self._world, self._plans.followed.times)
        num_tasks = sum(1 for _ in run.table)
        if num_tasks >= _MANY and run.saver.folder is not None:
            run.log.say(f"writing cards and pictures of {num_tasks} tasks, and the page of the run")
        for own in run.table:
            if not own.status.is_final:  # those that have ended have theirs already
                write_task_files(run, own)
        if not run.log.is_shown:
            return
        in_turn = self._in_turn()
        # Where no step was taken, the page of those before has more to tell.
        if num_steps or self._files.page is None:
            self._files.write(self._report(in_turn), self._plans.followed.plan, steps)
        report = self._report(in_turn)  # with the page that has been written now
        run.log.say(f"\n{report.fitted(run.log.progress.width)}\n")

    def _tell_interruption(self) -> None:
        """Say that a signal has ended the training, and how to go on; all processes call this."""
        run = self._run
        # It need not have reached every process.
        run.interrupted_by = max(self._world.processes.gather(run.interrupted_by))
        if run.interrupted_by:
            name, step = signal.Signals(run.interrupted_by).name, run.state.global_step
            is_saved = run.saver.folder is not None and run.saver.is_current
            steps = {own.name: own.step for own in run.table}
            run.log.event("interrupted", signal=name, is_saved=is_saved, steps=steps)
            run.log.warn(f"interrupted by {name} after step {step}; {self._way_on()}")

    def _way_on(self) -> str:
        run = self._run
        if run.saver.folder is None:
            return 'nothing is saved (save_strategy="no"); train() of this trainer goes on from here'
        if not run.saver.is_current:
            return f"this step could not be saved in {run.root}, so that a new process goes on from the state before it"
        return f"saved in {run.root}; go on with train(resume_from_checkpoint=True), or peft-mux train FILE --resume"

    def _metrics(self, seconds: float, num_tokens: int, num_steps: int) -> dict[str, float]:
        metrics = {
            "train_runtime": seconds,
            "train_tokens_per_second": num_tokens / max(seconds, 1e-9),
            "train_steps_per_second": num_steps / max(seconds, 1e-9),
        }
        ratio = self._plans.planner.correction.time_ratio
        if ratio is not None:
            metrics["measured_over_planned_time"] = ratio
        if self._run.interrupted_by:
            metrics["interrupted_by"] = self._run.interrupted_by
        return metrics | {f"{run.name}/train_loss": run.last_loss for run in self._run.table}

    def _replica_tokens(self, records: Sequence[RankRecord]) -> int:
        """Return the tokens that went through all replicas; what one process of each has counted."""
        return sum(record.tokens for record in records if record.rank in self._world.layout.leaders)

    def _log_dispatch_times(self) -> None:
        """Say what dividing the rows among unlike replicas has cost, and how much of it was hidden."""
        clock = self._plans.dispatch_clock
        if clock is not None and clock.num_steps:
            self._run.log.event("dispatch", hidden_share=clock.hidden_share, **asdict(clock))
            self._run.log.say(str(clock))

    def _log_passes(self) -> None:
        """Say how far steps had the passes that were planned; all processes call this."""
        found = self._world.processes.gather(self._plans.pass_report)
        leaders = self._world.layout.leaders
        self.pass_reports = tuple(replace(found[rank], replica=place) for place, rank in enumerate(leaders))
        for report in self.pass_reports:
            if report.num_steps:
                self._run.log.event("passes", **asdict(report))
        for line in pass_lines(self.pass_reports):
            self._run.log.say(line)
        tokens = self._world.processes.gather(self._plans.token_counts)
        counts = summed_counts(tokens[rank] for rank in leaders)
        for name, (computed, asked) in counts.sharing.items():
            self._run.log.event("sharing", task=name, computed_tokens=computed, asked_tokens=asked)
        if counts.sharing:
            self._run.log.say(str(counts))

    def _log_times(self) -> None:
        """Record what each part of a step took over what the profile says; all processes call this."""
        self._plans.share_times()
        correction = self._plans.planner.correction
        if correction.num_passes:
            self._run.log.event("times", measured=correction.num_passes, **correction.agreed._asdict())

    def plot_losses(self, path: str | Path | None) -> Path:
        """Draw the losses of all tasks from `metrics.jsonl` into a PNG, by default `losses.png` in the run folder."""
        image = Path(path or self._run.root / PLOT_NAME)
        if not self._run.saver.is_writer:
            return image
        return plot_losses(read_metrics(self._run.root / "metrics.jsonl"), image)

    def view(self) -> RunView:
        """Return what is to be shown of the run now; before it trains here, what its folder has of it."""
        watch = getattr(self._run.log.progress, "watch", None)
        runs, path, is_trained = list(self._run.table), self._run.root / METRICS_NAME, self._run.is_in_train
        if watch is not None:
            view = watch.view(with_curves=True)
        elif not any(own.step for own in runs) and path.is_file():
            view = view_of_records(read_metrics(path), {own.name: own.num_steps for own in runs})
            is_trained = is_trained or bool(keeper_of(self._run.root))  # another process may
        else:
            view = RunView(tuple(map(view_of, runs)), self._run.state.global_step)
        return view if is_trained else interrupted(view)

    def report(self) -> RunReport:
        """Return a table of all tasks: how each ended, its losses, its time and tokens, and where its adapter lies."""
        return self._report(self._in_turn())

    def _report(self, in_turn: InTurn | None) -> RunReport:
        run, log = self._run, self._run.log
        rows = [report_row(own, run.saver.place(own), log.times.seconds(own.name)) for own in run.table]
        rows += [row for row in log.removed if row.name not in run.table]
        # Of all that were trained, those that have left since as well.
        rows = [row._replace(time_share=log.times.share(row.name)) for row in rows]
        notes = [
            str(self._plans.planner.correction),
            str(in_turn or ""),
            *next_lines(run.root, rows, self._files.page, run.best_task),
        ]
        return RunReport(rows, self._world.records, [note for note in notes if note], not run.is_in_train)

    def _in_turn(self) -> InTurn | None:
        """Return how long the steps took, and would have taken in turn; `None` where that cannot be told."""
        run, planner, measured_s = self._run, self._plans.planner, self._plans.seconds.settled_s
        ratio, profile = planner.correction.time_ratio, planner.profile
        # The rows of removed tasks are gone, and so is what their steps would have taken.
        if ratio is None or profile is None or not measured_s or run.log.removed:
            return None
        taken = {own.name: run.log.times.num_steps(own) for own in run.table}
        alone_s = self._plans.alone_s([own for own in run.table if taken[own.name]])
        predicted_s = ratio * sum(taken[name] * seconds for name, seconds in alone_s.items())
        return InTurn(measured_s, predicted_s, ratio, profile.source) if predicted_s else None
