"""The contenders that peft_mux is measured against, and the form in which each of them answers.

A contender is a function `(model_factory, workload, record_losses) -> Run`. It builds its own model, trains every task
of the workload for all its steps, and times the training alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

ModelFactory = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Run:
    """What one run of a contender did.

    Attributes:
        train_s: seconds of training, from the call that starts it to its return.
        num_processed_tokens: tokens that went through the backbone, padding included.
        losses: loss of each task at each of its steps, before the update; empty unless it was asked for.
        steps_s: the part of `train_s` between the start of the first and the end of the last step of each task, where
            the contender is a Trainer (the rest is the start and the end of `train()`); else equal to `train_s`.
    """

    train_s: float
    num_processed_tokens: int
    steps_s: float
    losses: dict[str, list[float]] = field(default_factory=dict)
