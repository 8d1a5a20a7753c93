"""`TaskObjectives`: which loss each task of a model is trained towards, and the losses of a pass.

Shape letters: T tokens, M targets, N tasks, D hidden features.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from peft_mux.data.batch import MuxBatch
from peft_mux.errors import ConfigError
from peft_mux.modeling.objectives.arguments import LossArgs
from peft_mux.modeling.objectives.head import HeadPass, OutputHead, head_of
from peft_mux.modeling.objectives.objective import OBJECTIVES, OWN, Objective, Statistics, default_args, objective_for
from peft_mux.modeling.objectives.outputs import TaskLoss, TaskOutputs
from peft_mux.own_code import OwnCodeError


class StreamLosses(NamedTuple):
    """The losses of a micro-batch.

    Attributes:
        losses_N: `[N]`, each task's part of the mean over its global batch.
        statistics: for each task its statistics `[K]`; `None` for tasks whose loss has none.
    """

    losses_N: torch.Tensor
    statistics: Statistics


class _Assigned(NamedTuple):
    # A name, not an objective: it stays the same where a model is copied or sent to another process.
    objective: str
    args: LossArgs


class TaskObjectives:
    """The losses of the tasks on one backbone, all of which read its one head.

    Args:
        backbone: transformers model that all tasks share.

    Attributes:
        head: what the backbone ends in.
        failures: by task, why its own loss function has failed since this was last asked for with `take_failures`.
        own_seconds: by task, for how long loss functions of tasks' own ran since this was last emptied.
    """

    def __init__(self, backbone: Any) -> None:
        """Begin with the first loss of the backbone's head for every task."""
        self.head: OutputHead = head_of(backbone)
        default = objective_for(self.head.kind)
        self._default = _Assigned(default.name, default_args(default))
        self._by_task: dict[str, _Assigned] = {}
        self.failures: dict[str, str] = {}
        self.own_seconds: Counter[str] = Counter()
        self._are_rows_made_up = False

    @contextmanager
    def of_made_up_rows(self) -> Iterator[None]:
        """Let every task have the default loss in the `with` block: rows that are made up are tokens alone."""
        before, self._are_rows_made_up = self._are_rows_made_up, True
        try:
            yield
        finally:
            self._are_rows_made_up = before

    def assign(self, task: str, objective: Objective, args: LossArgs | None = None) -> None:
        """Train a task towards another loss than the first of the head.

        Args:
            task: name of the task.
            objective: the loss.
            args: its arguments; by default what stands where nothing is set.

        Raises:
            ConfigError: if it is a loss of another head.
        """
        if objective.head.kind != self.head.kind:
            raise ConfigError(
                f"tasks.{task}.objective: got {objective.name!r}, a loss of {objective.head.kind.name} tasks; allowed: "
                f"those of {self.head.kind.name} tasks."
            )
        self._by_task[task] = _Assigned(objective.name, default_args(objective) if args is None else args)

    def forget(self, task: str) -> None:
        """Drop what was assigned to a task; another task of this name begins with the first loss of the head."""
        self._by_task.pop(task, None)
        self.failures.pop(task, None)
        self.own_seconds.pop(task, None)

    def adopt(self, task: str, others: TaskObjectives) -> None:
        """Train a task towards the loss that it has in another model."""
        self._by_task[task] = others._assigned(task)

    def of(self, task: str) -> Objective:
        """Return the loss of a task."""
        return OBJECTIVES[self._assigned(task).objective]

    def args_of(self, task: str) -> LossArgs:
        """Return the arguments of a task's loss."""
        return self._assigned(task).args

    def statistic_names(self, task: str) -> tuple[str, ...]:
        """Return the names of the statistics of a task's loss."""
        return self.of(task).statistic_names(self.args_of(task))

    def smoothed(self, tasks: Iterable[str]) -> frozenset[str]:
        """Return those of some tasks that smooth their labels."""
        return frozenset(task for task in tasks if self.args_of(task).label_smoothing_factor)

    def of_all(self, tasks: Sequence[str]) -> list[Objective]:
        """Return the different losses of some tasks, in the order in which they come first."""
        return [OBJECTIVES[name] for name in dict.fromkeys(self._assigned(task).objective for task in tasks)]

    def losses(self, hidden_TD: torch.Tensor, batch: MuxBatch, head: HeadPass) -> StreamLosses:
        """Return the losses of a micro-batch: each task's part of the mean over its global batch.

        Args:
            hidden_TD: the last hidden states `[T, D]`.
            batch: micro-batch that the hidden states are of.
            head: what the output head is computed with.
        """
        head = replace(head, smoothed=self.smoothed(batch.task_names))
        found = [self._loss(outputs) for outputs in self.head.outputs(hidden_TD, batch, head)]
        return StreamLosses(torch.stack([one.loss for one in found]), tuple(one.statistics for one in found))

    def take_failures(self) -> dict[str, str]:
        """Return why losses of tasks' own have failed, by task, and forget it."""
        failures, self.failures = self.failures, {}
        return failures

    def _loss(self, outputs: TaskOutputs) -> TaskLoss:
        """Return the loss of one task; NaN, which fails the task, where its own function has failed."""
        objective, args = self.of(outputs.task), self.args_of(outputs.task)
        if objective.name != OWN:
            return objective.loss(outputs, args)
        began = time.perf_counter()
        try:
            return objective.loss(outputs, args)
        except OwnCodeError as error:
            self.failures[outputs.task] = f"objective: {error}"
            # With a graph, as a pass of this task alone would have nothing to differentiate.
            return TaskLoss(outputs.anchor * float("nan"))
        finally:
            self.own_seconds[outputs.task] += time.perf_counter() - began  # type: ignore[assignment]

    def _assigned(self, task: str) -> _Assigned:
        return self._default if self._are_rows_made_up else self._by_task.get(task, self._default)
