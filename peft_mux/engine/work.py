"""What passes through the engine in a step: `StepWork` to compute, its `StepResult`, and the `StepExecutor` between."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from peft_mux.data.batch import MuxBatch
from peft_mux.engine.pass_clock import PassClock
from peft_mux.engine.step_sums import StepSums
from peft_mux.scheduler.plan import Plan


@dataclass(frozen=True, slots=True)
class StepWork:
    """The global batch of every task that takes a step now, as micro-batches.

    Attributes:
        tasks: names of the tasks, in stream order.
        micro_batches: micro-batches of this process, to be run in this order; the gradients of a task add up over them.
        num_tokens: tokens of each task's global batch, by name of the task.
        failures: why the data of a task could not be read, by name of the task; these tasks take no step.
        sync_order: the tasks in the order in which the plan is done with them, the same on every process.
    """

    tasks: tuple[str, ...]
    micro_batches: tuple[MuxBatch, ...]
    num_tokens: dict[str, int]
    failures: dict[str, str] = field(default_factory=dict)
    sync_order: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What the multiplexed passes of a step gave; gradients lie in the parameters.

    Attributes:
        losses: mean loss of each task over its global batch, as device scalars (not yet waited for).
        num_tokens: tokens of each task's global batch, by name of the task.
        num_stream_tokens: tokens that went through the backbone of this process, padding included.
        failures: why the data of a task could not be read, passed on from the work.
        norms: gradient norm of each task over all processes, where this one holds only a part of the adapters;
            `None` where it holds all of them.
        statistics: what is logged beside the loss of a task, `[K]` over its global batch, as device tensors in the
            order of its loss's `statistic_names`; of tasks whose loss has some.
        loss_failures: why the loss function of a task's own has failed, by name of the task.
    """

    losses: dict[str, torch.Tensor]
    num_tokens: dict[str, int]
    num_stream_tokens: int
    failures: dict[str, str] = field(default_factory=dict)
    norms: dict[str, torch.Tensor] | None = None
    statistics: dict[str, torch.Tensor] = field(default_factory=dict)
    loss_failures: dict[str, str] = field(default_factory=dict)


class StepExecutor(Protocol):
    """Runs the work of a step on the part of the model that lies in this process."""

    @property
    def mux_model(self) -> Any:
        """The `MultiTaskPeftModel` of this process, whole or a part of it."""
        ...

    @property
    def device(self) -> torch.device:
        """Device of the model."""
        ...

    @property
    def clock(self) -> PassClock:
        """What times the passes of a step here."""
        ...

    def follow(self, plan: Plan) -> None:
        """Follow another plan from the next step on."""
        ...

    def close(self) -> None:
        """Close the connections that nobody else uses; all processes call this at one time."""
        ...

    def run(self, work: StepWork) -> StepResult:
        """Compute the losses over all processes, and the gradients of what lies here."""
        ...

    def forward_losses(self, micro_batches: Sequence[MuxBatch]) -> dict[str, torch.Tensor]:
        """Return the loss of each task in a forward pass, summed over the micro-batches; nothing is changed."""
        ...

    def forward_sums(self, micro_batches: Sequence[MuxBatch]) -> StepSums:
        """Return losses and statistics of a forward pass, summed over the micro-batches; nothing is changed."""
        ...

    def sequence_logits(self, micro_batch: MuxBatch) -> list[torch.Tensor] | None:
        """Return the logits of every sequence; `None` on processes that only help others to compute them."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """Return what every process has given, by rank, where they hold parts of the model; else this one's alone."""
        ...

    def non_finite_tasks(self, micro_batches: Sequence[MuxBatch]) -> list[str]:
        """Return the tasks whose loss is not finite in a forward pass; nothing is changed."""
        ...

    def precision(self) -> AbstractContextManager[object]:
        """Return the autocast context of the run."""
        ...
