"""The contenders that peft_mux is measured against, and the form in which each of them answers.

A contender is a function `(model_factory, workload, record_losses) -> Run`. It builds its own model, trains
every task of the workload for all its steps, and times the training alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from benchmarks.workloads import Workload

ModelFactory = Callable[[], Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Run:
    """What one run of a contender did.

    Attributes:
        train_s: seconds of training, from the call that starts it to its return.
        num_processed_tokens: tokens that went through the backbone in `steps_s`, padding included.
        losses: loss of each task at each of its steps, before the update; empty unless it was asked for.
        steps_s: seconds of all steps but the first of each task, which pays for what a run does once (memory
            that is touched for the first time, optimizer state, the start of `train()`); of all steps where
            there is only one.
    """

    train_s: float
    num_processed_tokens: int
    steps_s: float
    losses: dict[str, list[float]] = field(default_factory=dict)


def timed(per_step: Sequence[T]) -> Sequence[T]:
    """Return what belongs to the timed steps: all but the first, or all where there is only one."""
    return per_step[1:] if len(per_step) > 1 else per_step


class Contender(Protocol):
    """Trains every task of a workload."""

    def __call__(self, model_factory: ModelFactory, workload: Workload, record_losses: bool = False) -> Run:
        """Build a model, train, and say what was done."""
        ...


_PLACES = {
    "hf": ("benchmarks.baselines.hf_trainer", "run_hf_trainer"),
    "padded": ("benchmarks.baselines.padded_joint", "run_padded_joint"),
    "mux": ("benchmarks.mux", "run_mux"),
    "floor": ("benchmarks.baselines.floor", "run_floor"),
}
CONTENDERS = tuple(_PLACES)


def contender(name: str) -> Contender:
    """Return a contender, importing it only now: a process that measures memory holds no other."""
    module, function = _PLACES[name]
    return getattr(import_module(module), function)
