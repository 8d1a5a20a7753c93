"""`BestMetric`: the best evaluation of a task so far, by which it is stopped, and whose adapter it ends with."""

# MERGED: The mean loss of a task, and the means of what is logged beside it, since they were last read.
# MERGED: `TaskRun`: the state of one task while it trains; `TaskTable`: all of them, and what a step does to each.
# MERGED: Which tasks compute what their rows begin with alike once, and why others do not.
# MERGED: All tasks of a run: they step together, and each fails alone.
# MERGED: Windows: steps that are taken without a look at the run between them (`peft_mux.engine.pipeline.executor`).

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from transformers import TrainerState

from peft_mux.arguments import MultiTaskTrainingArguments
from peft_mux.data.packing.prefixes import begin_alike
from peft_mux.engine.tasks.optimizer import (
    LastGood,
    TaskOptimizer,
    gradient_norms,
    joint_steps_taken,
    non_finite_reason,
)
from peft_mux.engine.tasks.resolved import ResolvedTask
from peft_mux.engine.work import StepResult
from peft_mux.errors import ConfigError
from peft_mux.kernels import adamw as multi_adamw
from peft_mux.modeling.generation.prompts import PromptRow
from peft_mux.modeling.model import reason_of_adapter
from peft_mux.scheduler.pipeline.simulator import MOST_STEPS
from peft_mux.task import HyperParameters, Task, TaskStatus, greater_is_better, steps_of
from peft_mux.user_code import UserCodeError, guard_user_code


class BestMetric:
    """Follows the metric that a task's `early_stopping` or its `metric_for_best_model` names.

    Args:
        task: the task.
        hyper: its complete settings; `None` where `early_stopping` alone counts.

    Attributes:
        metric: key of the metric among those of an evaluation; `None` where none is followed.
        keeps_weights: whether the task ends with the adapter of the best evaluation.
        value: best value so far, or `None` before the first evaluation that gave a finite one.
        step: step of the task at which the best value was reached.
        bad_evaluations: number of evaluations since then without an improvement.
    """

    def __init__(self, task: Task, hyper: HyperParameters | None = None) -> None:
        """Start without any evaluation."""
        self.task, rule = task, task.early_stopping
        name = rule.metric if rule is not None else None if hyper is None else hyper.metric_for_best_model
        self.metric = name if name is None or name.startswith("eval_") else f"eval_{name}"
        given = rule.maximise if rule is not None else None if hyper is None else hyper.greater_is_better
        self._maximises = greater_is_better(name or "") if given is None else given
        self._min_delta = 0.0 if rule is None else rule.min_delta
        self._name = name
        self._field = "metric_for_best_model" if rule is None else "early_stopping.metric"
        self.keeps_weights = rule is not None or (hyper is not None and hyper.load_best_model_at_end)
        self.value: float | None = None
        self.step = 0
        self.bad_evaluations = 0

    def update(self, metrics: dict[str, float], step: int) -> bool:
        """Take an evaluation in; return whether it is the best so far.

        Raises:
            ConfigError: if the metric is not among those that the task produces.
        """
        if self.metric is None:
            return False
        if self.metric not in metrics:
            raise ConfigError(
                f'tasks.{self.task.name}.{self._field}: got "{self._name}", which the evaluation does not '
                f"produce; allowed: {', '.join(metrics)}. Let compute_metrics return it, or name one of these."
            )
        value = metrics[self.metric]
        if not math.isfinite(value):  # never the best, and no improvement
            self.bad_evaluations += 1
            return False
        gain = 0.0 if self.value is None else (value - self.value) * (1 if self._maximises else -1)
        # The first number is the best whatever it is; `min_delta` compares only later ones.
        if self.value is None or gain > self._min_delta:
            self.value, self.step, self.bad_evaluations = value, step, 0
            return True
        self.bad_evaluations += 1
        return False

    @property
    def is_exhausted(self) -> bool:
        """Whether the task's patience has run out."""
        return self.task.early_stopping is not None and self.bad_evaluations >= self.task.early_stopping.patience

    def state(self) -> dict[str, Any]:
        """Return the state as JSON."""
        return {"value": self.value, "step": self.step, "bad_evaluations": self.bad_evaluations}

    def load(self, state: dict[str, Any]) -> None:
        """Take up a state that `state` returned."""
        self.value, self.step, self.bad_evaluations = state["value"], state["step"], state["bad_evaluations"]


class LossMean:
    """Mean of a task's losses since it was last read."""

    def __init__(self) -> None:
        """Start empty."""
        self.total = 0.0
        self.count = 0

    def add(self, loss: float) -> None:
        """Take one step's loss in."""
        self.total += loss
        self.count += 1

    def read(self) -> float | None:
        """Return the mean and start anew; `None` when nothing was added."""
        if self.count == 0:
            return None
        mean = self.total / self.count
        self.total, self.count = 0.0, 0
        return mean


class StatisticsMean:
    """Means of a task's statistics since they were last read; they stay on the device until then.

    One that is not a number was of nothing in that step (rewards of good answers where all are bad) and does not count.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._totals: torch.Tensor | None = None

    def add(self, statistics_K: torch.Tensor) -> None:
        """Take the statistics `[K]` of one step in."""
        own = torch.stack([statistics_K.double().nan_to_num(nan=0.0), (~statistics_K.isnan()).double()])
        self._totals = own if self._totals is None else self._totals + own

    def read(self, names: Sequence[str]) -> dict[str, float]:
        """Return the means by name and start anew; nothing of what was of nothing in all steps."""
        if self._totals is None:
            return {}
        sums, counts = self._totals.tolist()
        self._totals = None
        return {name: total / count for name, total, count in zip(names, sums, counts, strict=True) if count}


@dataclass(slots=True)
class TaskRun:
    """One task in a run.

    Attributes:
        resolved: the task with its settings complete.
        loader: yields the global batch of any step.
        eval_data: tokenised held-out rows, or `None`.
        num_steps: optimizer steps that the task shall take.
        status: whether the task waits, runs, is paused or has ended, and how.
        reason: why the task failed, stopped or was removed.
        step: number of optimizer steps taken.
        optimizer: the optimizer of the task; `None` before it starts and after it ended (the memory is freed).
        last_good: the weights of the last finite loss and gradients; `None` before the task starts and after it ended.
        state: the state that Trainer would keep, for callbacks and the log history.
        best: the metric that early stopping follows.
        loss_mean: mean loss since the last log.
        statistics_mean: means of what is logged beside the loss since the last log.
        last_loss: loss of the last step.
        last_gradient_norm: gradient norm of the last step, before clipping.
        num_tokens: tokens that the task was trained on so far.
        best_weights: weights of the best evaluation, on the CPU; empty without early stopping.
        eval_prompts: prompts of held-out rows that each evaluation completes; none without `eval_generate`.
        sharing_remark: why its rows do not share the tokens that they begin with, where that is to be told; else "".
        own_eval_steps: steps after which it is evaluated whatever its settings say, as a sweep asks for.
        swept: settings that a sweep ranks it by, which may not change where it is resumed.
    """

    resolved: ResolvedTask
    loader: Any
    eval_data: Any
    num_steps: int
    state: TrainerState
    best: BestMetric
    status: TaskStatus = TaskStatus.WAITING
    reason: str = ""
    step: int = 0
    optimizer: TaskOptimizer | None = None
    last_good: LastGood | None = None
    loss_mean: LossMean = field(default_factory=LossMean)
    statistics_mean: StatisticsMean = field(default_factory=StatisticsMean)
    last_loss: float = float("nan")
    last_gradient_norm: float = float("nan")
    num_tokens: int = 0
    best_weights: dict[str, torch.Tensor] = field(default_factory=dict)
    eval_prompts: tuple[PromptRow, ...] = ()
    sharing_remark: str = ""
    own_eval_steps: frozenset[int] = frozenset()
    swept: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """Name of the task."""
        return self.resolved.task.name

    @property
    def task(self) -> Task:
        """The task as its user has written it."""
        return self.resolved.task

    @property
    def hyper(self) -> HyperParameters:
        """The hyper-parameters of the task, complete."""
        return self.resolved.hyper

    def read_statistics(self) -> dict[str, float]:
        """Return the means of what is logged beside the loss since this was last asked for, by name."""
        return self.statistics_mean.read(self.resolved.objective.statistic_names(self.resolved.loss_args))

    @property
    def epoch(self) -> float | None:
        """Passes over its rows so far; `None` for streams."""
        per_epoch = self.loader.steps_per_epoch
        return None if per_epoch is None else self.step / per_epoch

    @property
    def steps_per_epoch(self) -> int:
        """Steps after which an epoch ends; all of them where the rows are a stream."""
        return self.loader.steps_per_epoch or self.num_steps

    @property
    def is_at_epoch_end(self) -> bool:
        """Whether an epoch has ended with the step just taken."""
        return self.step > 0 and self.step % self.steps_per_epoch == 0

    @property
    def eval_every(self) -> int:
        """Steps from one evaluation to the next; 0 for none."""
        if self.eval_data is None or self.hyper.eval_steps == 0:
            return 0
        own = self.hyper.eval_steps
        return self.steps_per_epoch if own == -1 else steps_of(own, self.num_steps)

    @property
    def save_every(self) -> int:
        """Steps from one checkpoint of this task alone to the next; 0 for none."""
        return steps_of(self.hyper.save_steps, self.num_steps)

    @property
    def is_evaluation_due(self) -> bool:
        """Whether the step just taken calls for an evaluation."""
        if self.eval_data is not None and self.step in self.own_eval_steps:
            return True
        every = self.eval_every
        if not every or self.step % every:
            return False
        waited = self.step / self.steps_per_epoch if self.hyper.eval_steps == -1 else self.step
        return waited >= self.hyper.eval_delay

    @torch.no_grad()
    def keep_best(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Remember the present weights as the best so far."""
        # On the CPU, where they cost no device memory; cloned, since `cpu()` gives the parameter itself there.
        self.best_weights = {name: parameter.detach().cpu().clone() for name, parameter in parameters.items()}

    @torch.no_grad()
    def restore_best(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Go back to the weights of the best evaluation."""
        for name, weight in self.best_weights.items():
            parameters[name].copy_(weight)

    def start_over(self) -> None:
        """Forget all that the task has done, except for its weights: it is about to be put back to a saved state."""
        self.end(TaskStatus.WAITING)
        self.step, self.num_tokens, self.best_weights = 0, 0, {}
        self.best, self.loss_mean, self.statistics_mean = (
            BestMetric(self.task, self.hyper),
            LossMean(),
            StatisticsMean(),
        )
        self.last_loss = self.last_gradient_norm = float("nan")
        self.state = TrainerState(max_steps=self.num_steps)

    def end(self, status: TaskStatus, reason: str = "") -> None:
        """Leave the run: keep the weights, free optimizer state and copies."""
        if self.optimizer is not None:
            self.optimizer.release()
        self.status, self.reason = status, reason
        # The memory goes at once: a task that waited may start in its place.
        self.optimizer, self.last_good = None, None

    def quarantine(self, reason: str) -> None:
        """Fail the task with its last good adapter in place; nothing of the failure was stepped on."""
        if self.last_good is not None:
            # Before the end, which frees the copy.
            self.last_good.restore()
        self.end(TaskStatus.FAILED, reason)


_SAMPLE_ROWS = 64


def decide_sharing(runs: Iterable[TaskRun], args: MultiTaskTrainingArguments, backbone_reason: str | None) -> None:
    """Let tasks share the tokens that their rows begin with, where that is exact; note why others do not.

    It is noted where it was asked for, and else where rows of the task do begin alike.

    Args:
        runs: the tasks.
        args: the arguments of the run.
        backbone_reason: why no task on the backbone may share (`peft_mux.modeling.model`), or `None`.
    """
    for run in runs:
        reason = backbone_reason or reason_of_adapter(run.task.peft_config)
        if reason is None and run.hyper.neftune_noise_alpha:
            reason = f"its neftune_noise_alpha={run.hyper.neftune_noise_alpha:g} is drawn for each row"
        if reason is None and args.pad_to_chunks:
            reason = "pad_to_chunks=True asks for streams of equal shapes"
        run.loader.shares_prefixes = reason is None and args.share_prefixes is not False
        if reason is None or args.share_prefixes is False:
            continue
        if args.share_prefixes is True or _begin_alike(run):
            run.sharing_remark = f"{run.name}: tokens that rows begin with alike are computed for each row, as {reason}"


def _begin_alike(run: TaskRun) -> bool:
    """Return whether some of the first rows begin alike."""
    return begin_alike(
        row.input_ids[start:end] for row in run.loader.sample(_SAMPLE_ROWS) for start, end in row.sequence_bounds
    )


_logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TaskEvent:
    """A change in the life of a task, for logs, callbacks and files."""

    task: str
    status: TaskStatus
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a task's step; to be counted by `TaskTable.count`.

    Attributes:
        loss: loss of the step.
        norm: gradient norm, before clipping.
        reason: why the task must not step, as loss or norm is not finite; "" where both are.
        error: what its optimizer, or a hook of it, raised; "" where it stepped, or did not get so far.
        rate_failure: why its schedule gives no rate for another step; "" where it does.
    """

    loss: float
    norm: float
    reason: str = ""
    error: str = ""
    rate_failure: str = ""

    @property
    def is_stepped(self) -> bool:
        """Whether the task has taken the step."""
        return not self.reason and not self.error


class TaskTable:
    """All tasks of a run, by name, in the order in which they came.

    Args:
        runs: the tasks that there are at first.
    """

    def __init__(self, runs: Iterable[TaskRun] = ()) -> None:
        """Start with the given tasks, of which no change was told yet."""
        self._runs: dict[str, TaskRun] = {run.name: run for run in runs}
        self._seen: dict[str, TaskStatus] = {}

    def __iter__(self) -> Iterator[TaskRun]:
        """Iterate over the tasks."""
        # A list, as other threads look at the tasks while one that trains adds some.
        return iter(list(self._runs.values()))

    def __getitem__(self, name: str) -> TaskRun:
        """Return a task by name."""
        return self._runs[name]

    def __contains__(self, name: object) -> bool:
        """Whether there is a task of this name."""
        return name in self._runs

    def add(self, run: TaskRun) -> None:
        """Take a task in."""
        self._runs[run.name] = run

    def drop(self, name: str) -> None:
        """Take a task out."""
        del self._runs[name]
        # A task that comes again under its name is a new one to those who are told.
        self._seen.pop(name, None)

    def reorder(self, names: list[str]) -> None:
        """Bring the tasks into the given order, others after them: the order of the stream is part of its rounding."""
        order = [name for name in names if name in self._runs] + [name for name in self._runs if name not in names]
        self._runs = {name: self._runs[name] for name in order}

    @property
    def running(self) -> list[TaskRun]:
        """Tasks that take steps now."""
        return [run for run in self if run.status is TaskStatus.RUNNING]

    @property
    def plannable(self) -> list[TaskRun]:
        """Tasks that could take steps, now or when there is room: neither ended nor paused."""
        return [run for run in self if not run.status.is_final and run.status is not TaskStatus.PAUSED]

    def apply(self, result: StepResult) -> None:
        """Step every task whose loss and gradients are finite; quarantine the others before they step.

        The device is waited for once, for all tasks together.
        """
        names = list(result.losses)
        if result.norms is None:
            norms = gradient_norms([self._optimizer(name) for name in names])
        else:
            norms = [result.norms[name] for name in names]
        self.count(result, self.update(result.losses, norms))

    def update(self, losses: Mapping[str, torch.Tensor], norms: list[torch.Tensor]) -> dict[str, Outcome]:
        """Step the optimizer of every task whose loss and gradients are finite; count nothing, and end no task.

        Args:
            losses: losses of the tasks that are to step, by name.
            norms: their gradient norms, in the same order.

        Returns:
            What came of the step of each task, by name.
        """
        # A joint update reads the verdicts on the device and leaves out tasks that are not finite, before the host
        # knows.
        verdicts, updated = self._update_jointly(losses, norms)
        found = {
            name: Outcome(loss, norm, non_finite_reason(loss, norm) or "")
            for name, loss, norm in zip(losses, *verdicts, strict=True)
        }
        # After the verdicts: a task that was left out has taken no step.
        joint_steps_taken([self._optimizer(name) for name, one in found.items() if one.is_stepped and name in updated])
        for (name, one), norm in zip(found.items(), norms, strict=True):
            if one.is_stepped:
                error = self._step(name, norm, is_updated=name in updated)
                found[name] = replace(one, error=error, rate_failure=self._optimizer(name).failure)
        return found

    def count(self, result: StepResult, outcomes: Mapping[str, Outcome]) -> None:
        """Count a step that `update` has taken, and quarantine the tasks that could not take it or take no other.

        Args:
            result: the step.
            outcomes: what came of it for each task.
        """
        for name, one in outcomes.items():
            run = self[name]
            run.last_loss, run.last_gradient_norm = one.loss, one.norm
            if one.reason:
                run.quarantine(f"{one.reason} at step {run.step}")
            elif one.error:
                run.quarantine(f"the optimizer failed at step {run.step}: {one.error}")
            else:
                _count_step(run, result.num_tokens[name])
                if name in result.statistics:
                    run.statistics_mean.add(result.statistics[name])
                # A task whose schedule gives no rate for the step that it would take next.
                if one.rate_failure and run.step < run.num_steps:
                    run.quarantine(f"{one.rate_failure} at step {run.step}")
        # After the verdicts: a loss that has failed is NaN, and this says why.
        for name, reason in {**result.failures, **result.loss_failures}.items():
            self[name].quarantine(reason)

    def _update_jointly(
        self, losses: Mapping[str, torch.Tensor], norms: list[torch.Tensor]
    ) -> tuple[list[list[float]], set[str]]:
        """Update the tasks that can be updated together, where the device has such an operation.

        Returns:
            All losses and all gradient norms, as numbers; and which tasks were updated unless they are not finite.
        """
        if not losses:
            return [[], []], set()
        device = next(iter(losses.values())).device
        verdicts = torch.stack([value.to(device, torch.float32) for value in (*losses.values(), *norms)]).view(2, -1)
        update = multi_adamw.joint_update(device)
        if update is None:
            return verdicts.tolist(), set()
        pages = {
            name: self._optimizer(name).page_updates(task, self._last_good(name)) for task, name in enumerate(losses)
        }
        values = update([page for own in pages.values() for page in own], verdicts)
        return values, {name for name, own in pages.items() if own}

    def _step(self, name: str, norm: torch.Tensor, *, is_updated: bool) -> str:
        """Take a task's step, or the rest of one that a joint update has taken.

        Returns:
            What its optimizer, a hook of it or its schedule raised; "" where that went well.
        """
        optimizer = self._optimizer(name)
        try:
            with guard_user_code(name, "optimizer"):
                if is_updated:
                    optimizer.joint_step_counted()
                else:
                    # Before the step: these weights gave a finite loss; what the step makes of them is not known yet.
                    self._last_good(name).keep()
                    optimizer.step(norm)
        except UserCodeError as error:
            _logger.warning('the optimizer of task "%s" failed', name, exc_info=True)
            return str(error) or type(error).__name__
        return ""

    def collect(self) -> list[TaskEvent]:
        """End the tasks that have taken all their steps; return every change since the last call."""
        for run in self.running:
            if run.step >= run.num_steps:
                run.end(TaskStatus.SUCCEEDED)
        events = []
        for run in self:
            if self._seen.get(run.name) is not run.status:
                self._seen[run.name] = run.status
                events.append(TaskEvent(run.name, run.status, run.reason))
        return events

    def note_told(self, name: str) -> None:
        """Take note that the present status of a task was told: `collect` does not return it as a change."""
        self._seen[name] = self[name].status

    def _optimizer(self, name: str) -> TaskOptimizer:
        optimizer = self[name].optimizer
        assert optimizer is not None, "a running task has an optimizer"
        return optimizer

    def _last_good(self, name: str) -> LastGood:
        last_good = self[name].last_good
        assert last_good is not None, "a running task has a last good copy"
        return last_good


def _count_step(run: TaskRun, num_tokens: int) -> None:
    run.step += 1
    run.num_tokens += num_tokens
    run.loss_mean.add(run.last_loss)
    run.state.global_step = run.step
    run.state.epoch = run.epoch


LONGEST_WINDOW_S = 10.0
"""Seconds that a window may take: stops, arrivals and departures that are asked for meanwhile wait for its end."""


def steps_until_due(
    runs: Iterable[TaskRun], args: MultiTaskTrainingArguments, global_step: int, *, last_step_s: float
) -> int:
    """Return after how many steps something is due: a log, an evaluation, a file, the end of a task, or a look around.

    Args:
        runs: the tasks that take the steps.
        args: the arguments of the run.
        global_step: steps that the run has taken.
        last_step_s: seconds that the last step took on the slowest process; 0 where that is not known yet.
    """
    # Known on all processes alike, as this number must be.
    patience = int(LONGEST_WINDOW_S / last_step_s) if last_step_s > 0 else 1
    found = [MOST_STEPS, patience]
    runs = list(runs)
    if args.logging_strategy != "no" and args.logging_first_step and global_step == 0:
        found.append(1)
    for strategy, interval in ((args.logging_strategy, args.logging_steps), (args.save_strategy, args.save_steps)):
        if strategy == "steps":
            found.append(_until(run_interval(interval, runs), global_step))
        elif strategy == "epoch":
            found += [_until(run.steps_per_epoch, run.step) for run in runs]
    for run in runs:
        found += [run.num_steps - run.step, _until(run.save_every, run.step), _until(run.eval_every, run.step)]
    return max(1, min(found))


def _until(every: int, step: int) -> int:
    """Return the steps until the next multiple; those of the longest window where there is none."""
    return every - step % every if every > 0 else MOST_STEPS


def run_interval(interval: float, runs: Iterable[TaskRun]) -> int:
    """Return an interval of the run in its steps; a share is one of the steps of the longest task.

    Args:
        interval: number of steps, or their share.
        runs: the tasks of the run.
    """
    return steps_of(interval, max((run.num_steps for run in runs), default=1))


class WindowSteps:
    """The steps of tasks within a window: taken when each bucket is done, counted when the window is over.

    Args:
        table: all tasks of the run.
        num_steps: steps of the window.
    """

    def __init__(self, table: TaskTable, num_steps: int) -> None:
        """Take no step yet."""
        self._table = table
        self._outcomes: Sequence[dict[str, Outcome]] = [{} for _ in range(num_steps)]
        self._dead: set[str] = set()

    def update(
        self, step: int, losses: Mapping[str, torch.Tensor], norms: Mapping[str, torch.Tensor]
    ) -> frozenset[str]:
        """Step the tasks of a bucket whose losses and gradients are finite.

        Args:
            step: number of the step in the window.
            losses: their losses, by name.
            norms: their gradient norms, by name.

        Returns:
            All tasks that take no further step in the window: their weights and states stay what they are.
        """
        alive = {name: loss for name, loss in losses.items() if name not in self._dead}
        found = self._table.update(alive, [norms[name] for name in alive])
        self._outcomes[step].update(found)
        self._dead |= {name for name, one in found.items() if not one.is_stepped or one.rate_failure}
        return frozenset(self._dead)

    def count(self, step: int, result: StepResult) -> None:
        """Count a step of the window, when all of it is over; the first one comes first.

        Args:
            step: number of the step in the window.
            result: what came of it.
        """
        # In stream order, whichever bucket was done first.
        found = self._outcomes[step]
        self._table.count(result, {name: found[name] for name in result.losses if name in found})
