"""The part of `MultiTaskTrainer` that tells how a run goes: logs, evaluations, and what it all came to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers.trainer_utils import TrainOutput

from peft_mux.metrics import read_metrics
from peft_mux.task import TaskStatus
from peft_mux.trainer_inputs import refuse_trainer_arguments
from peft_mux.ui.report import report_table

if TYPE_CHECKING:
    from peft_mux.arguments import MultiTaskTrainingArguments
    from peft_mux.engine.dispatcher import Dispatcher
    from peft_mux.engine.replica_dispatch import DispatchClock
    from peft_mux.planning import Planner
    from peft_mux.run_log import RunLog
    from peft_mux.saving import Saver
    from peft_mux.task_evaluation import TaskEvaluator
    from peft_mux.task_run import TaskRun, TaskTable
    from peft_mux.team import RankRecord, Team


class ReportedRun:
    """Logs and evaluates while a run goes on, and reports when it is over."""

    args: MultiTaskTrainingArguments
    table: TaskTable
    state: Any
    control: Any
    callback_handler: Any
    _clock: DispatchClock | None
    _dispatcher: Dispatcher | None
    _evaluator: TaskEvaluator | None
    _log: RunLog
    _saver: Saver
    _team: Team
    _materialise: Callable[[], None]
    _root: Path
    _planner_of_model: Callable[[], Planner]
    _run_of: Callable[[str], TaskRun]
    _save: Callable[[], None]

    def _finish(self, seconds: float, num_tokens: int, num_steps: int) -> TrainOutput:
        if not self._saver.is_current:
            self._save()
        records = self._team.finish(num_tokens, seconds)
        metrics: dict[str, float] = {
            "train_runtime": seconds,
            "train_tokens_per_second": self._tokens_of(records) / max(seconds, 1e-9),
        }
        metrics["train_steps_per_second"] = num_steps / max(seconds, 1e-9)
        ratio = self._planner_of_model().time_ratio
        if ratio is not None:
            metrics["measured_over_planned_time"] = ratio
        for run in self.table:
            metrics[f"{run.name}/train_loss"] = run.last_loss
        self._log.event("run", **metrics)
        self._tell_of_dispatch()
        for record in records if len(records) > 1 else ():
            self._log.event("rank", **record._asdict())
        self.control = self.callback_handler.on_train_end(self.args, self.state, self.control)
        for callbacks in self._log.callbacks.values():
            callbacks.call("on_train_end")
        finite = [run.last_loss for run in self.table if run.last_loss == run.last_loss]
        return TrainOutput(self.state.global_step, sum(finite) / max(len(finite), 1), metrics)

    def _tokens_of(self, records: Sequence[RankRecord]) -> int:
        """Return the tokens that went through all replicas; what one process of each has counted."""
        return sum(record.tokens for record in records if record.rank in self._team.layout.leaders)

    def _tell_of_dispatch(self) -> None:
        """Say what dividing the rows among unlike replicas has cost, and how much of it was hidden."""
        clock = self._clock if self._dispatcher is None else self._dispatcher.shares.clock
        if clock is not None and clock.num_steps:
            self._log.event("dispatch", hidden_share=clock.hidden_share, **asdict(clock))
            self._log.say(str(clock))

    def _log_if_due(self) -> None:
        step = self.state.global_step
        due = self.args.logging_strategy != "no" and (
            step % self.args.logging_steps == 0 or (self.args.logging_first_step and step == 1)
        )
        if due or self.control.should_log:
            self.control.should_log = False
            self._log.losses()

    def _emit(self, logs: dict[str, float]) -> None:
        """Hand `task/metric` numbers to the run's callbacks and integrations."""
        self.state.log_history.append({**logs, "step": self.state.global_step})
        self.control = self.callback_handler.on_log(self.args, self.state, self.control, logs)

    def _evaluate_if_due(self, names: list[str]) -> None:
        """Evaluate the tasks whose turn it is, and stop those whose callbacks ask for it.

        Args:
            names: of the tasks that have just stepped.
        """
        assert self._evaluator is not None, "only called while training"
        everybody = self.control.should_evaluate
        self.control.should_evaluate = False
        for name in names:
            run = self.table[name]
            if run.status is TaskStatus.RUNNING and run.eval_data is not None and (run.is_evaluation_due or everybody):
                logs = self._evaluator.evaluate(run)
                self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, logs)
            if run.status is TaskStatus.RUNNING and self._log.callbacks[name].control.should_training_stop:
                run.end(TaskStatus.STOPPED_EARLY, "stopped by a callback of the task")

    def evaluate(self, task: str | None = None, **unsupported: Any) -> dict[str, float]:  # type: ignore[override]
        """Evaluate one task, or all that have held-out rows.

        Args:
            task: name; by default all.
            **unsupported: Trainer's other arguments are refused.

        Returns:
            Metrics with `task/metric` keys.
        """
        refuse_trainer_arguments(unsupported)
        self._materialise()
        assert self._evaluator is not None, "made with the executor"
        names = [task] if task is not None else [run.name for run in self.table if run.eval_data is not None]
        results: dict[str, float] = {}
        for name in names:
            metrics = self._evaluator.metrics(self._run_of(name))
            results.update({f"{name}/{key}": value for key, value in metrics.items()})
        return results

    def plot_losses(self, path: str | Path | None = None) -> Path:
        """Draw the losses of all tasks from `metrics.jsonl` into a PNG (by default `losses.png` in `output_dir`)."""
        from peft_mux.ui.plots import plot_losses

        root = self._root
        image = Path(path or root / "losses.png")
        return plot_losses(read_metrics(root / "metrics.jsonl"), image) if self._saver.is_writer else image

    def report(self) -> str:
        """Return a table of all tasks: how each ended, its last losses, and where its adapter lies."""
        return report_table(self.table, None if self._saver.folder is None else self._root, self._team.records)
