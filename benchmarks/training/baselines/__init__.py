"""The contenders that peft_mux is measured against, and the form in which each of them answers.

A contender is a function `(model_factory, workload, record_losses) -> Run`. It builds its own model, trains
every task of the workload for all its steps, and times the training alone.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

from benchmarks.training.timing import Run

ModelFactory = Callable[[], Any]


Contender = Callable[..., Run]
"""Trains every task of a workload."""

_PLACES = {
    "hf": ("benchmarks.training.baselines.hf_trainer", "run_hf_trainer"),
    "padded": ("benchmarks.training.baselines.padded_joint", "run_padded_joint"),
    "mux": ("benchmarks.training.mux", "run_mux"),
    "floor": ("benchmarks.training.baselines.floor", "run_floor"),
}
CONTENDERS = tuple(_PLACES)


def contender(name: str) -> Contender:
    """Return a contender, importing it only now: a process that measures memory holds no other."""
    module, function = _PLACES[name]
    return getattr(import_module(module), function)
