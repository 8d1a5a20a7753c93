"""`TaskObjectives`: which loss each task of a model is trained towards, and the losses of a pass.

Shape letters: T tokens, N tasks, D hidden features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from peft_mux.data.batch import MuxBatch
from peft_mux.errors import ConfigError
from peft_mux.modeling.objectives.head import HeadPass, OutputHead, head_of
from peft_mux.modeling.objectives.objective import OBJECTIVES, Objective, objective_for, per_task


class TaskObjectives:
    """The losses of the tasks on one backbone, all of which read its one head.

    Args:
        backbone: transformers model that all tasks share.

    Attributes:
        head: what the backbone ends in.
    """

    def __init__(self, backbone: Any) -> None:
        """Begin with the first loss of the backbone's head for every task."""
        self.head: OutputHead = head_of(backbone)
        self._default = objective_for(self.head.kind).name
        # Names, not objectives: those stay the same where a model is copied or sent to another process.
        self._by_task: dict[str, str] = {}

    def assign(self, task: str, objective: Objective) -> None:
        """Train a task towards another loss than the first of the head.

        Raises:
            ConfigError: if it is a loss of another head, or needs a reference model.
        """
        where = f"tasks.{task}.loss_type: got {objective.loss_type!r}"
        if objective.head.kind != self.head.kind:
            raise ConfigError(
                f"{where}, a loss of {objective.head.kind.name} tasks; allowed: those of {self.head.kind.name} tasks."
            )
        if objective.needs_reference:
            raise ConfigError(f"{where}, which needs a reference model; allowed: losses of the trained model alone.")
        self._by_task[task] = objective.name

    def forget(self, task: str) -> None:
        """Drop what was assigned to a task; another task of this name begins with the first loss of the head."""
        self._by_task.pop(task, None)

    def of(self, task: str) -> Objective:
        """Return the loss of a task."""
        return OBJECTIVES[self._by_task.get(task, self._default)]

    def of_all(self, tasks: Sequence[str]) -> list[Objective]:
        """Return the different losses of some tasks, in the order in which they come first."""
        return [OBJECTIVES[name] for name in dict.fromkeys(self._by_task.get(task, self._default) for task in tasks)]

    def terms(self, hidden_TD: torch.Tensor, batch: MuxBatch, head: HeadPass) -> torch.Tensor:
        """Return the loss terms of a micro-batch whose tasks have one loss, sorted by task.

        Args:
            hidden_TD: the last hidden states `[T, D]`.
            batch: micro-batch that the hidden states are of.
            head: what the output head is computed with.
        """
        (objective,) = self.of_all(batch.task_names)
        return objective.terms(hidden_TD, batch, head)

    def losses(self, hidden_TD: torch.Tensor, batch: MuxBatch, head: HeadPass) -> torch.Tensor:
        """Return the losses `[N]` of a micro-batch: each task's part of the mean over its global batch.

        Args:
            hidden_TD: the last hidden states `[T, D]`.
            batch: micro-batch that the hidden states are of.
            head: what the output head is computed with.
        """
        objectives = self.of_all(batch.task_names)
        if len(objectives) == 1:
            return _losses_of(objectives[0], hidden_TD, batch, head)
        losses: dict[str, torch.Tensor] = {}
        for objective in objectives:
            # Each loss sees rows of its own tasks only: a zero gradient to another's rows is NaN where a derivative is.
            own = [index for index, name in enumerate(batch.task_names) if self.of(name) is objective]
            part = batch.of_tasks(own)
            offsets = batch.task_offsets
            hidden_PD = torch.cat([hidden_TD[offsets[index] : offsets[index + 1]] for index in own])
            with head.stream.reading(part, head.adapters):
                losses_N = _losses_of(objective, hidden_PD, part, head)
            losses.update(zip(part.task_names, losses_N.unbind(), strict=True))
        return torch.stack([losses[name] for name in batch.task_names])


def _losses_of(objective: Objective, hidden_TD: torch.Tensor, batch: MuxBatch, head: HeadPass) -> torch.Tensor:
    return per_task(objective.terms(hidden_TD, batch, head), objective.counts(batch), batch.loss_weights)
