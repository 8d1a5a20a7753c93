"""`TaskRun`: the state of one task while it trains; `TaskTable`: all of them, and what a step does to each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import TrainerState

from peft_mux.generation.prompts import PromptRow
from peft_mux.hyper_parameters import HyperParameters, steps_of
from peft_mux.modeling.objectives.task_objective import args_of, objective_of
from peft_mux.task import Task, TaskStatus
from peft_mux.tasks.best_metric import BestMetric
from peft_mux.tasks.isolation import LastGood
from peft_mux.tasks.loss_mean import LossMean, StatisticsMean
from peft_mux.tasks.optimizer import TaskOptimizer


@dataclass(slots=True)
class TaskRun:
    """One task in a run.

    Attributes:
        task: what its owner asked for.
        hyper: the settings of the task, complete.
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

    task: Task
    hyper: HyperParameters
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
        return self.task.name

    def read_statistics(self) -> dict[str, float]:
        """Return the means of what is logged beside the loss since this was last asked for, by name."""
        args = args_of(self.task, self.hyper.label_smoothing_factor)
        return self.statistics_mean.read(objective_of(self.task).statistic_names(args))

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
