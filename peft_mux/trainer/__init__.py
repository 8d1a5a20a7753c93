"""`MultiTaskTrainer`, and the parts that it holds."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peft_mux.trainer.trainer import MultiTaskTrainer

__all__ = ["MultiTaskTrainer"]


def __getattr__(name: str) -> Any:
    """Import the trainer when it is first used, so that its parts can be imported without it."""
    if name != "MultiTaskTrainer":
        raise AttributeError(f"module 'peft_mux.trainer' has no attribute {name!r}")
    return importlib.import_module("peft_mux.trainer.trainer").MultiTaskTrainer
