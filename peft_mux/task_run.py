"""`TaskRun`: the state of one task while it trains; `TaskTable`: all of them, and what a step does to each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from transformers import TrainerState

from peft_mux.arguments import HyperParameters
from peft_mux.engine.isolation import LastGood, non_finite_reason
from peft_mux.engine.work import StepResult
from peft_mux.evaluation import BestMetric
from peft_mux.kernels import multi_adamw
from peft_mux.metrics import LossMean
from peft_mux.optim import TaskOptimizer, gradient_norms, joint_steps_taken
from peft_mux.task import Task, TaskStatus


@dataclass(slots=True)
class TaskRun:
    """One task in a run.

    Attributes:
        task: what its owner asked for.
        hyper: its settings, complete.
        loader: yields the global batch of any step.
        eval_data: tokenised held-out rows, or `None`.
        num_steps: optimizer steps that it shall take.
        status: where it stands.
        reason: why it failed, stopped or was removed.
        step: optimizer steps taken.
        optimizer: its own; `None` before it starts and after it ended (the memory is freed).
        last_good: its last weights of finite loss and gradients; `None` likewise.
        state: as Trainer keeps it, for callbacks and the log history.
        best: the metric that early stopping follows.
        loss_mean: since the last log.
        last_loss: of the last step.
        last_gradient_norm: of the last step, before clipping.
        num_tokens: trained on so far.
        best_weights: of the best evaluation, on the CPU; empty without early stopping.
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
    last_loss: float = float("nan")
    last_gradient_norm: float = float("nan")
    num_tokens: int = 0
    best_weights: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Name of the task."""
        return self.task.name

    @property
    def epoch(self) -> float | None:
        """Passes over its rows so far; `None` for streams."""
        per_epoch = self.loader.steps_per_epoch
        return None if per_epoch is None else self.step / per_epoch

    @property
    def is_evaluation_due(self) -> bool:
        """Whether the step just taken calls for an evaluation."""
        if self.eval_data is None or self.hyper.eval_steps == 0:
            return False
        every = self.hyper.eval_steps
        if every == -1:
            every = self.loader.steps_per_epoch or self.num_steps
        return self.step % every == 0

    @torch.no_grad()
    def keep_best(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Remember the present weights as the best so far."""
        self.best_weights = {name: parameter.detach().cpu().clone() for name, parameter in parameters.items()}

    @torch.no_grad()
    def restore_best(self, parameters: Mapping[str, nn.Parameter]) -> None:
        """Go back to the weights of the best evaluation."""
        for name, weight in self.best_weights.items():
            parameters[name].copy_(weight)

    def end(self, status: TaskStatus, reason: str = "") -> None:
        """Leave the run: keep the weights, free optimizer state and copies."""
        if self.optimizer is not None:
            self.optimizer.release()
        self.status, self.reason = status, reason
        self.optimizer, self.last_good = None, None

    def quarantine(self, reason: str) -> None:
        """Fail the task with its last good adapter in place; nothing of the failure was stepped on."""
        if self.last_good is not None:
            self.last_good.restore()
        self.end(TaskStatus.FAILED, reason)


@dataclass(frozen=True, slots=True)
class TaskEvent:
    """A change in the life of a task, for logs, callbacks and files."""

    task: str
    status: TaskStatus
    reason: str = ""


class TaskTable:
    """All tasks of a run, by name, in the order in which they came."""

    def __init__(self) -> None:
        """Start empty."""
        self._runs: dict[str, TaskRun] = {}
        self._seen: dict[str, TaskStatus] = {}

    def __iter__(self) -> Iterator[TaskRun]:
        """Iterate over the tasks."""
        return iter(self._runs.values())

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
        self._seen.pop(name, None)

    def reorder(self, names: list[str]) -> None:
        """Bring the tasks into the given order, others after them: the order of the stream is part of its rounding."""
        order = [name for name in names if name in self._runs] + [name for name in self._runs if name not in names]
        self._runs = {name: self._runs[name] for name in order}

    @property
    def running(self) -> list[TaskRun]:
        """Tasks that take steps now."""
        return [run for run in self if run.status is TaskStatus.RUNNING]

    def apply(self, result: StepResult) -> None:
        """Step every task whose loss and gradients are finite; quarantine the others before they step.

        The device is waited for once, for all tasks together.
        """
        names = list(result.losses)
        if result.norms is None:
            norms = gradient_norms([self._optimizer(name) for name in names])
        else:
            norms = [result.norms[name] for name in names]
        verdicts, updated = self._update_jointly(result.losses, norms)
        passed = []
        for name, norm, loss, norm_value in zip(names, norms, *verdicts, strict=True):
            if not self._passes(self[name], loss, norm_value):
                continue
            passed.append(name)
            if name not in updated:
                self._last_good(name).keep()
                self._optimizer(name).step(norm)
            _count_step(self[name], result.num_tokens[name])
        joint_steps_taken([self._optimizer(name) for name in passed if name in updated])
        for name, reason in result.failures.items():
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

    def _passes(self, run: TaskRun, loss: float, norm: float) -> bool:
        """Take note of loss and norm; quarantine the task if they are not finite."""
        run.last_loss, run.last_gradient_norm = loss, norm
        reason = non_finite_reason(loss, norm)
        if reason is not None:
            run.quarantine(f"{reason} at step {run.step}")
        return reason is None

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
