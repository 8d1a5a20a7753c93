"""`ActiveTask`: one task while it trains. `TaskTable`: all tasks of a run, which step together and fail alone.

`ResolvedTask` is a `Task` with all values that follow from its own and the run's settings, computed once.
"""

from __future__ import annotations

import logging
import math
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from peft import PeftConfig
from transformers import TrainerState

from peft_mux.data.formats import RowForm
from peft_mux.engine.tasks.optimizer import (
    LastFiniteWeights,
    TaskOptimizer,
    count_joint_steps,
    gradient_norms,
    non_finite_reason,
)
from peft_mux.engine.work import StepResult
from peft_mux.errors import ConfigError, is_real, shown
from peft_mux.kernels import adamw
from peft_mux.modeling.backbone.modules import HeadKind
from peft_mux.modeling.objectives.objective import LossArgs, Objective
from peft_mux.modeling.router_loss import default_coefficient
from peft_mux.task import HyperParameters, Task, TaskStatus, greater_is_better, steps_of
from peft_mux.user_code import UserCodeError, guard_user_code, log_warning

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ResolvedTask:
    """A task whose settings are complete and whose loss is known.

    Attributes:
        task: the task as given by the user.
        hyper: its hyperparameters, completed by the arguments of the run.
        objective: the loss with which it is trained.
        loss_args: the arguments of the loss.
        num_labels: number of classes of the task's own head; `None` if it has none, or its rows have not been read yet.
    """

    task: Task
    hyper: HyperParameters
    objective: Objective
    loss_args: LossArgs
    num_labels: int | None = None

    @property
    def name(self) -> str:
        """Name of the task."""
        return self.task.name

    @property
    def peft_config(self) -> PeftConfig:
        """Configuration of its adapter."""
        return self.task.peft_config

    @property
    def head_kind(self) -> HeadKind:
        """The type of output head that its loss reads."""
        return self.objective.head.kind

    @property
    def row_form(self) -> RowForm:
        """The form of the rows that its loss reads."""
        return self.objective.rows(self.loss_args)

    @property
    def needs_reference(self) -> bool:
        """Whether its loss compares with log-probabilities of a frozen model (`has_adapter_reference` says which)."""
        return self.loss_args.needs_reference

    def router_coefficient(self, config: Any) -> float:
        """Return the coefficient of the balancing loss of routers: its own, or what TRL takes by default; 0 for none.

        Args:
            config: the configuration of the backbone.
        """
        coefficient = self.hyper.router_aux_loss_coef
        if coefficient is not None:
            return coefficient
        # With smoothed labels TRL leaves it out.
        is_added = self.objective.balances_routers and not self.loss_args.label_smoothing_factor
        return default_coefficient(config) if is_added else 0.0

    @property
    def has_adapter_reference(self) -> bool:
        """Whether the reference of its loss is its initial adapter."""
        return self.needs_reference and self.task.init_adapter is not None and self.task.reference != "backbone"


class BestMetric:
    """Tracks the metric of a task's `early_stopping` or `metric_for_best_model`.

    Args:
        task: the task.
        hyper: its complete settings.

    Attributes:
        metric: key of the metric in the evaluation results; `None` if no metric is tracked.
        keeps_weights: whether the task ends with the adapter of the best evaluation.
        value: best value so far; `None` before the first evaluation with a finite one.
        step: step of the task at which the best value was reached.
        bad_evaluations: number of evaluations since then without an improvement.
    """

    def __init__(self, task: Task, hyper: HyperParameters) -> None:
        self.task, rule = task, task.early_stopping
        self._name = hyper.metric_for_best_model if rule is None else rule.metric
        name = self._name
        self.metric = name if name is None or name.startswith("eval_") else f"eval_{name}"
        given = hyper.greater_is_better if rule is None else rule.maximise
        self._maximises = greater_is_better(name or "") if given is None else given
        self._min_delta = 0.0 if rule is None else rule.min_delta
        self.keeps_weights = rule is not None or hyper.load_best_model_at_end
        self.value: float | None = None
        self.step = 0
        self.bad_evaluations = 0

    def update(self, metrics: dict[str, float], step: int) -> bool:
        """Record an evaluation; return whether it is the best so far.

        Raises:
            ConfigError: if the evaluation does not contain the metric.
        """
        if self.metric is None:
            return False
        if self.metric not in metrics:
            where = "metric_for_best_model" if self.task.early_stopping is None else "early_stopping.metric"
            raise ConfigError(
                f'tasks.{self.task.name}.{where} must be one of {", ".join(metrics)}, got "{self._name}", which '
                "the evaluation does not produce. Let compute_metrics return it, or name one of these."
            )
        value = metrics[self.metric]
        gain = 0.0 if self.value is None else (value - self.value) * (1 if self._maximises else -1)
        # The first finite value is the best so far. A value that is not finite is not an improvement.
        if math.isfinite(value) and (self.value is None or gain > self._min_delta):
            self.value, self.step, self.bad_evaluations = value, step, 0
            return True
        self.bad_evaluations += 1
        return False

    def state(self) -> dict[str, Any]:
        """Return the state as JSON."""
        return {"value": self.value, "step": self.step, "bad_evaluations": self.bad_evaluations}

    def load(self, state: dict[str, Any]) -> None:
        """Restore a state that `state` returned."""
        self.value, self.step, self.bad_evaluations = state["value"], state["step"], state["bad_evaluations"]


class LossMean:
    """Means of a task's loss and of its statistics since they were last read.

    Statistics stay on the device until then. NaN means that the step had no samples of a statistic (for example rewards
    of good answers if all are bad); it is ignored.

    Attributes:
        total: sum of the losses.
        count: number of the losses.
    """

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0
        self._statistics_2K: torch.Tensor | None = None

    def add(self, loss: float, statistics_K: torch.Tensor | None = None) -> None:
        """Add the loss of one step, and its statistics `[K]` if the loss of the task has some."""
        self.total, self.count = self.total + loss, self.count + 1
        if statistics_K is not None:
            step_2K = torch.stack([statistics_K.double().nan_to_num(nan=0.0), (~statistics_K.isnan()).double()])
            self._statistics_2K = step_2K if self._statistics_2K is None else self._statistics_2K + step_2K

    def read(self, names: Sequence[str] = ()) -> tuple[float | None, dict[str, float]]:
        """Return the mean loss (`None` if there is none) and the mean of each statistic by name, and reset.

        Statistics without samples are omitted.
        """
        loss = self.total / self.count if self.count else None
        statistics: dict[str, float] = {}
        if self._statistics_2K is not None:
            sums, counts = self._statistics_2K.tolist()
            statistics = {name: total / num for name, total, num in zip(names, sums, counts, strict=True) if num}
        self.total, self.count, self._statistics_2K = 0.0, 0, None
        return loss, statistics


@dataclass(slots=True)
class ActiveTask:
    """One task in a run.

    Attributes:
        resolved: the task with its settings complete.
        loader: yields the global batch of any step.
        eval_data: tokenised held-out rows by the prefix of their metrics: `eval`, or `eval_<name>` for each of several
            data sets; empty without held-out rows.
        num_steps: optimizer steps that the task will take.
        state: the `TrainerState`, for callbacks and the log history.
        best: the metric that early stopping tracks.
        status: whether the task is waiting, running, paused or finished, and how it finished.
        reason: why the task failed, stopped, is waiting or was removed.
        step: number of optimizer steps taken.
        optimizer: the optimizer of the task; `None` before it starts and after it has ended (the memory is freed).
        last_good: the weights of the last finite loss and gradients; `None` if `optimizer` is.
        loss_mean: mean of its loss and statistics since the last log.
        train_loss: mean of its loss since the training began here.
        last_loss: loss of the last step.
        last_gradient_norm: gradient norm of the last step, before clipping.
        last_learning_rate: learning rate of the last step.
        num_tokens: tokens that the task was trained on so far.
        best_weights: weights of the best evaluation, on the CPU; empty if none is kept.
        eval_prompts: prompts of held-out rows (`PromptRow`) that each evaluation completes; none without
            `eval_generate`.
        sharing_remark: why its rows do not share the tokens that they begin with, if the user should know; else "".
        held_out_options: how further held-out rows become tokens.
        own_eval_steps: steps after which it is evaluated whatever its settings say, as a sweep requires.
        router_coefficient: coefficient of the balancing loss of routers, 0 for none.
        swept: settings that a sweep ranks it by, which must not change when it is resumed.
        swept_as: these and their values in few characters; "" if it is of no sweep.
        reported: the last status that `TaskTable.collect` has returned it with; `None` before that.
    """

    resolved: ResolvedTask
    loader: Any
    eval_data: dict[str, Any]
    num_steps: int
    state: TrainerState
    best: BestMetric
    status: TaskStatus = TaskStatus.WAITING
    reason: str = ""
    step: int = 0
    optimizer: TaskOptimizer | None = None
    last_good: LastFiniteWeights | None = None
    loss_mean: LossMean = field(default_factory=LossMean)
    train_loss: LossMean = field(default_factory=LossMean)
    last_loss: float = float("nan")
    last_gradient_norm: float = float("nan")
    last_learning_rate: float = float("nan")
    num_tokens: int = 0
    best_weights: dict[str, torch.Tensor] = field(default_factory=dict)
    eval_prompts: tuple[Any, ...] = ()
    held_out_options: Any = None
    sharing_remark: str = ""
    own_eval_steps: frozenset[int] = frozenset()
    router_coefficient: float = 0.0
    swept: frozenset[str] = frozenset()
    swept_as: str = ""
    reported: TaskStatus | None = None

    @property
    def name(self) -> str:
        """Name of the task."""
        return self.resolved.task.name

    @property
    def loss_kind(self) -> str:
        """Its objective and the variant of it; losses of two kinds cannot be compared."""
        return f"{self.resolved.objective.name} {self.task.loss_type or ''}".rstrip()

    @property
    def task(self) -> Task:
        """The task as given by the user."""
        return self.resolved.task

    @property
    def hyper(self) -> HyperParameters:
        """The complete hyperparameters of the task."""
        return self.resolved.hyper

    @property
    def epoch(self) -> float | None:
        """Number of epochs so far; `None` for streams."""
        per_epoch = self.loader.steps_per_epoch
        return None if per_epoch is None else self.step / per_epoch

    @property
    def steps_per_epoch(self) -> int:
        """Number of steps of an epoch; all steps if the rows are a stream."""
        return self.loader.steps_per_epoch or self.num_steps

    @property
    def is_at_epoch_end(self) -> bool:
        """Whether an epoch has ended with the step just taken."""
        return self.step > 0 and self.step % self.steps_per_epoch == 0

    @property
    def eval_every(self) -> int:
        """Number of steps between evaluations; 0 for none."""
        if not self.eval_data or self.hyper.eval_steps == 0:
            return 0
        eval_steps = self.hyper.eval_steps
        return self.steps_per_epoch if eval_steps == -1 else steps_of(eval_steps, self.num_steps)

    @property
    def save_every(self) -> int:
        """Number of steps between checkpoints of this task alone; 0 for none."""
        return steps_of(self.hyper.save_steps, self.num_steps)

    @property
    def is_evaluation_due(self) -> bool:
        """Whether to evaluate after the step just taken."""
        if self.eval_data and self.step in self.own_eval_steps:
            return True
        every = self.eval_every
        # As in Trainer, the last step is evaluated too.
        if not every or (self.step % every and self.step < self.num_steps):
            return False
        waited = self.step / self.steps_per_epoch if self.hyper.eval_steps == -1 else self.step
        return waited >= self.hyper.eval_delay

    def end(self, status: TaskStatus, reason: str = "") -> None:
        """Leave the run: keep the weights, free optimizer state and copies."""
        if self.optimizer is not None:
            self.optimizer.release()
        self.status, self.reason = status, reason
        # Free the memory immediately, so that a waiting task can start.
        self.optimizer, self.last_good = None, None

    def quarantine(self, reason: str) -> None:
        """Mark the task as failed and restore its last good adapter."""
        if self.last_good is not None:
            self.last_good.restore()
        self.end(TaskStatus.FAILED, reason)


@dataclass(frozen=True, slots=True)
class UpdateOutcome:
    """The outcome of a task's optimizer step, to be passed to `TaskTable.count`.

    Attributes:
        loss: loss of the step.
        norm: gradient norm, before clipping.
        learning_rate: learning rate of the step.
        reason: why the task must not step, if loss or norm is not finite; else "".
        error: the error that its optimizer or an optimizer hook raised; "" if there is none.
        rate_failure: why its schedule has no valid learning rate for another step; "" if it has one.
    """

    loss: float
    norm: float
    learning_rate: float
    reason: str = ""
    error: str = ""
    rate_failure: str = ""

    @property
    def is_stepped(self) -> bool:
        """Whether the task has taken the step."""
        return not self.reason and not self.error


class TaskTable:
    """All tasks of a run, in registration order, which is their stream order and affects rounding.

    Attributes:
        runs: the tasks by name; a task that is registered again replaces the old one.
    """

    def __init__(self, runs: Iterable[ActiveTask] = ()) -> None:
        """Start with some tasks; the first `collect` returns all of them."""
        self.runs: dict[str, ActiveTask] = {run.name: run for run in runs}

    def __iter__(self) -> Iterator[ActiveTask]:
        """Iterate over the tasks."""
        # Over a copy, because other threads may iterate while the training thread adds tasks.
        return iter(list(self.runs.values()))

    def __getitem__(self, name: str) -> ActiveTask:
        """Return a task by name."""
        return self.runs[name]

    def __contains__(self, name: object) -> bool:
        """Whether there is a task with this name."""
        return name in self.runs

    @property
    def running(self) -> list[ActiveTask]:
        """Running tasks."""
        return [run for run in self if run.status is TaskStatus.RUNNING]

    @property
    def plannable(self) -> list[ActiveTask]:
        """Tasks that are running or waiting: neither finished nor paused."""
        return [run for run in self if not run.status.is_final and run.status is not TaskStatus.PAUSED]

    def apply(self, result: StepResult) -> None:
        """Step every task whose loss and gradients are finite; quarantine the others before they step.

        Synchronises with the device once for all tasks.
        """
        if result.norms is None:
            norms = gradient_norms([self._started(name)[0] for name in result.losses])
        else:
            norms = [result.norms[name] for name in result.losses]
        self.count(result, self.update(result.losses, norms))

    def update(self, losses: Mapping[str, torch.Tensor], norms: Sequence[torch.Tensor]) -> dict[str, UpdateOutcome]:
        """Step the optimizer of every task whose loss and gradients are finite, without counting or ending tasks.

        Args:
            losses: losses of the tasks that are to step, by name.
            norms: their gradient norms, in the same order.

        Returns:
            The outcome of each task's step, by name.
        """
        if not losses:
            return {}
        device = next(iter(losses.values())).device
        verdicts_2N = torch.stack([value.to(device, torch.float32) for value in (*losses.values(), *norms)]).view(2, -1)
        started = {name: self._started(name) for name in losses}
        joined: set[str] = set()
        joint_update = adamw.joint_update(device)
        if joint_update is None:
            verdicts = verdicts_2N.tolist()
        else:
            # It reads the verdicts on the device and skips tasks that are not finite, before the host knows.
            pages = {
                name: optimizer.page_updates(task, last_good)
                for task, (name, (optimizer, last_good)) in enumerate(started.items())
            }
            verdicts = joint_update([page for updates in pages.values() for page in updates], verdicts_2N)
            joined = {name for name, updates in pages.items() if updates}
        outcomes = {
            name: UpdateOutcome(loss, norm, started[name][0].learning_rate, non_finite_reason(loss, norm) or "")
            for name, loss, norm in zip(losses, *verdicts, strict=True)
        }
        stepped = [name for name, outcome in outcomes.items() if outcome.is_stepped]
        count_joint_steps([started[name][0] for name in stepped if name in joined])
        for (name, outcome), norm in zip(outcomes.items(), norms, strict=True):
            if not outcome.is_stepped:
                continue
            optimizer, last_good = started[name]
            error = ""
            try:
                with guard_user_code(name, "optimizer", watches_model=bool(self[name].task.callbacks)):
                    if name in joined:
                        optimizer.advance_schedule()
                    elif not optimizer.steps_here:
                        last_good.keep()
                        optimizer.skip_step()
                    else:
                        # Before the step: these weights gave a finite loss, and the step may make them NaN.
                        last_good.keep()
                        optimizer.step(norm)
            except UserCodeError as raised:
                log_warning(_logger, f'the optimizer of task "{name}" failed', raised.__cause__)
                error = str(raised)
            outcomes[name] = replace(outcome, error=error, rate_failure=optimizer.failure)
        return outcomes

    def count(self, result: StepResult, outcomes: Mapping[str, UpdateOutcome]) -> None:
        """Count a step of `update`, and quarantine tasks that could not take it or cannot take another one.

        Args:
            result: the step.
            outcomes: the outcome of each task's step.
        """
        for name, outcome in outcomes.items():
            run = self[name]
            run.last_loss, run.last_gradient_norm = outcome.loss, outcome.norm
            run.last_learning_rate = outcome.learning_rate
            if outcome.reason:
                run.quarantine(f"{outcome.reason} at step {run.step}")
            elif outcome.error:
                run.quarantine(f"the optimizer failed at step {run.step}: {outcome.error}")
            else:
                run.step += 1
                run.num_tokens += result.num_tokens[name]
                run.loss_mean.add(run.last_loss, result.statistics.get(name))
                run.train_loss.add(run.last_loss)
                run.state.global_step, run.state.epoch = run.step, run.epoch
                if outcome.rate_failure and run.step < run.num_steps:
                    run.quarantine(f"{outcome.rate_failure} at step {run.step}")
        # After the verdicts: if a custom loss has failed, the loss is NaN, and this gives the reason.
        for name, reason in {**result.failures, **result.loss_failures}.items():
            self[name].quarantine(reason)

    def _started(self, name: str) -> tuple[TaskOptimizer, LastFiniteWeights]:
        run = self[name]
        assert run.optimizer is not None, "a running task has an optimizer"
        assert run.last_good is not None, "a running task has a copy of its last good weights"
        return run.optimizer, run.last_good

    def collect(self) -> list[ActiveTask]:
        """End the tasks that have taken all their steps; return tasks whose status has changed since the last call."""
        for run in self.running:
            if run.step >= run.num_steps:
                run.end(TaskStatus.SUCCEEDED)
        changed = [run for run in self if run.reported is not run.status]
        for run in changed:
            run.reported = run.status
        return changed


def new_state(hyper: HyperParameters, args: Any, num_steps: int, steps_per_epoch: int | None) -> TrainerState:
    """Return the state of a task before its first step, with the numbers that Trainer shows its callbacks."""
    saving = hyper.save_steps or args.save_steps
    given = {"logging_steps": args.logging_steps, "eval_steps": hyper.eval_steps, "save_steps": saving}
    intervals: dict[str, Any] = {name: steps_of(value, num_steps) for name, value in given.items() if value > 0}
    return TrainerState(
        max_steps=num_steps,
        num_train_epochs=math.ceil(num_steps / steps_per_epoch) if steps_per_epoch else sys.maxsize,
        **intervals,
    )


def run_interval(interval: float, runs: Iterable[ActiveTask]) -> int:
    """Convert an interval of the run into steps, 0 for never; a fraction refers to the steps of the longest task.

    Args:
        interval: number of steps, or a fraction.
        runs: the tasks of the run.

    Raises:
        ConfigError: if a callback of the run has set it to something else than a number.
    """
    if not is_real(interval):
        raise ConfigError(
            f"logging_steps and save_steps must be finite numbers, got {shown(interval)}: a callback has changed the "
            "arguments of the run. Set control.should_log or control.should_save instead."
        )
    return max(0, steps_of(interval, max((run.num_steps for run in runs), default=1)))
