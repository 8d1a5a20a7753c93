"""`Objective`: what a loss needs to be trained towards, and all of them by name.

A new one is a class in a file of this folder, registered there, and imported in `__init__.py`::

    class MyLoss:
        name, loss_type = "my-loss", "my_loss"  # a task asks for it with Task(loss_type="my_loss")
        head, row_form = LANGUAGE_HEAD, LANGUAGE_ROWS
        ...

    register_objective(MyLoss())

A task's loss is the sum of its terms divided by their number in the task's *global* batch, so no split into
micro-batches changes its gradient (promise 1 of the design).

Shape letters: T tokens, M loss terms, N tasks, D hidden features.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any, Protocol

import torch

from peft_mux.data.batch import MuxBatch
from peft_mux.data.formats import RowForm
from peft_mux.errors import ConfigError, closest
from peft_mux.modeling.backbone.head_kinds import HeadKind, head_kind_for
from peft_mux.modeling.objectives.head import HeadPass, OutputHead


class TrainedTask(Protocol):
    """What a task says of the loss that it is trained towards."""

    @property
    def loss_type(self) -> Any:
        """Name of the loss among those of the task's kind of head."""
        ...

    @property
    def peft_config(self) -> Any:
        """Configuration of the adapter, whose `task_type` tells the kind of head."""
        ...


class Objective(Protocol):
    """One loss; an entry of `OBJECTIVES`."""

    @property
    def name(self) -> str:
        """Name of the entry."""
        ...

    @property
    def loss_type(self) -> str:
        """The `Task.loss_type` that asks for it; losses of different heads may share one."""
        ...

    @property
    def head(self) -> OutputHead:
        """The output head that it reads."""
        ...

    @property
    def row_form(self) -> RowForm:
        """The form of the rows that it reads."""
        ...

    @property
    def metric_names(self) -> tuple[str, ...]:
        """Names of the metrics that `metrics` returns."""
        ...

    @property
    def needs_reference(self) -> bool:
        """Whether its terms also need the hidden states of the backbone without adapters."""
        ...

    @property
    def eager_reason(self) -> str | None:
        """Why a pass with it cannot be captured as a CUDA graph, as a clause; `None` where it can.

        Then its terms are one for each of `MuxBatch.target_rows`, and what it launches depends on their number alone.
        """
        ...

    def terms(self, hidden_TD: torch.Tensor, batch: MuxBatch, head: HeadPass) -> torch.Tensor:
        """Return the loss terms `[M]` of a micro-batch, sorted by task; each depends on rows of its own task only.

        Args:
            hidden_TD: the last hidden states `[T, D]`.
            batch: the micro-batch, its tensors on the device of the hidden states.
            head: what the output head is computed with.
        """
        ...

    def counts(self, batch: MuxBatch) -> list[int]:
        """Return the number of terms of each of the N tasks in a micro-batch.

        Over all micro-batches of a global batch they add up to `TaskBatch.num_targets`, the divisor of the loss.
        """
        ...

    def metrics(self, loss: float) -> dict[str, float]:
        """Return the metrics of an evaluation whose mean over all terms is `loss`."""
        ...


OBJECTIVES: dict[str, Objective] = {}
"""Every loss by its name, in the order in which they were registered."""


def register_objective(objective: Objective) -> None:
    """Add a loss to `OBJECTIVES`.

    Raises:
        ValueError: if its name, or its `loss_type` for the same head, is taken.
    """
    if objective.name in OBJECTIVES:
        raise ValueError(f'the objective "{objective.name}" is registered already; allowed: a name of its own.')
    if objective.loss_type in loss_types(objective.head.kind):
        raise ValueError(f'loss_type "{objective.loss_type}" is taken for {objective.head.kind.name} tasks.')
    OBJECTIVES[objective.name] = objective


def unregister_objective(name: str) -> None:
    """Take a loss out of `OBJECTIVES`; models must no longer hold tasks with it."""
    del OBJECTIVES[name]


def loss_types(kind: HeadKind) -> list[str]:
    """Return every `Task.loss_type` that there is for a kind of head."""
    return [objective.loss_type for objective in OBJECTIVES.values() if objective.head.kind == kind]


def metric_names(loss_type: str | None = None) -> list[str]:
    """Return the metrics that an evaluation may give with a `Task.loss_type`, for any kind of head; all for `None`."""
    found = [objective for objective in OBJECTIVES.values() if loss_type in (None, objective.loss_type)]
    return list(dict.fromkeys(name for objective in found for name in objective.metric_names))


def objective_for(kind: HeadKind, loss_type: str | None = None) -> Objective:
    """Return the loss of a kind of head.

    Args:
        kind: the kind of head that it reads.
        loss_type: the `Task.loss_type` that asks for it; `None` for the first that was registered.

    Raises:
        ConfigError: if there is none.
    """
    for objective in OBJECTIVES.values():
        if objective.head.kind == kind and loss_type in (None, objective.loss_type):
            return objective
    known = loss_types(kind)
    hint = closest(str(loss_type), known)
    raise ConfigError(
        f"loss_type: got {loss_type!r} for {kind.name} tasks; allowed: {', '.join(known)}. {hint}".rstrip()
    )


def objective_of(task: TrainedTask) -> Objective:
    """Return the loss that a task is trained towards.

    It follows from `Task.loss_type` and the `task_type` of the adapter, and is the only place that tells a classifier
    from a language model by what the task says.
    """
    loss_type: Any = task.loss_type
    kind = head_kind_for(getattr(task.peft_config, "task_type", None))
    return objective_for(kind, getattr(loss_type, "value", loss_type))


def target_counts(batch: MuxBatch) -> list[int]:
    """Return the number of target tokens of each task: the counts of losses that take one term of each."""
    return [end - start for start, end in pairwise(batch.target_offsets)]


def sequence_counts(batch: MuxBatch) -> list[int]:
    """Return the number of sequences of each task: the counts of losses that take one term of each."""
    return [end - start for start, end in pairwise(batch.sequence_offsets)]


def per_task(losses: torch.Tensor, counts: list[int], weights: tuple[float, ...]) -> torch.Tensor:
    """Return the weighted sum of each task's own losses.

    Args:
        losses: `[M]`, sorted by task.
        counts: number of losses of each task.
        weights: 1 / number of loss terms in each task's global batch.

    Returns:
        Sums `[N]`, one a task. What is not finite in one leaves the entries and gradients of all others untouched.
    """
    # Split, not masked or scattered: 0 * NaN is NaN, so a sum over all rows would carry one task's NaN to the others.
    parts = losses.split(counts)
    return torch.stack([part.sum() * weight for part, weight in zip(parts, weights, strict=True)])
