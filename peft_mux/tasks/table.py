"""All tasks of a run: they step together, and each fails alone."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from peft_mux.engine.work import StepResult
from peft_mux.kernels.adamw import update as multi_adamw
from peft_mux.own_code import OwnCodeError, own_code
from peft_mux.task import TaskStatus
from peft_mux.tasks.isolation import LastGood, non_finite_reason
from peft_mux.tasks.optimizer import TaskOptimizer, gradient_norms, joint_steps_taken
from peft_mux.tasks.task_run import TaskRun

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
            with own_code(name, "optimizer"):
                if is_updated:
                    optimizer.joint_step_counted()
                else:
                    # Before the step: these weights gave a finite loss; what the step makes of them is not known yet.
                    self._last_good(name).keep()
                    optimizer.step(norm)
        except OwnCodeError as error:
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
