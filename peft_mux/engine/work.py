"""The two values that pass through the engine in a step: what to compute, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from peft_mux.data.batch import MuxBatch


@dataclass(frozen=True, slots=True)
class StepWork:
    """The global batch of every task that takes a step now, as micro-batches.

    Attributes:
        tasks: names, in stream order.
        micro_batches: of this process, to be run in this order; the gradients of a task add up over them.
        num_tokens: tokens of each task's global batch.
        failures: tasks whose data could not be read, with the reason; they take no step.
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
        num_tokens: tokens of each task's global batch.
        num_stream_tokens: tokens that went through the backbone of this process, padding included.
        failures: passed on from the work.
    """

    losses: dict[str, torch.Tensor]
    num_tokens: dict[str, int]
    num_stream_tokens: int
    failures: dict[str, str] = field(default_factory=dict)
