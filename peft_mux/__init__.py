"""Train many PEFT adapters at once on one frozen Hugging Face backbone, each as if it were alone."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

import peft_mux.errors
import peft_mux.late_imports

if TYPE_CHECKING:
    from peft_mux.arguments import MultiTaskTrainingArguments
    from peft_mux.data.batch import MuxBatch
    from peft_mux.data.collator import ChunkPackingCollator
    from peft_mux.data.sources import load_rows
    from peft_mux.errors import (
        CheckpointError,
        ConfigError,
        DataError,
        MemoryBudgetError,
        PeftMuxError,
        PlanError,
        ProcessError,
        UnsupportedModelError,
    )
    from peft_mux.hyper_parameters import EarlyStopping
    from peft_mux.modeling.adapters.bottleneck.peft_tuner import BottleneckConfig
    from peft_mux.modeling.adapters.diff_pruning.peft_tuner import DiffPruningConfig
    from peft_mux.modeling.generation.decoding import generate
    from peft_mux.modeling.generation.options import Completion, GenerateOptions, GenerationRequest, SamplingOptions
    from peft_mux.modeling.model import MultiTaskPeftModel
    from peft_mux.scheduler.plan import Plan
    from peft_mux.task import MultiTaskTrainerCallback, Task, TaskStatus
    from peft_mux.trainer.sweep import SweepResult, sweep
    from peft_mux.trainer.trainer import MultiTaskTrainer

__version__ = peft_mux.errors.installed_version("peft-mux") or "0.0.0"  # a checkout that is not installed

# So that PEFT knows our methods wherever it is imported, and this costs nothing where it is not.
peft_mux.late_imports.after_import("peft", "peft_mux.modeling.adapters")

_HOMES = {
    "BottleneckConfig": "modeling.adapters.bottleneck.peft_tuner",
    "CheckpointError": "errors",
    "ChunkPackingCollator": "data.collator",
    "Completion": "modeling.generation.options",
    "ConfigError": "errors",
    "DataError": "errors",
    "DiffPruningConfig": "modeling.adapters.diff_pruning.peft_tuner",
    "EarlyStopping": "hyper_parameters",
    "GenerateOptions": "modeling.generation.options",
    "GenerationRequest": "modeling.generation.options",
    "MemoryBudgetError": "errors",
    "MultiTaskPeftModel": "modeling.model",
    "MultiTaskTrainer": "trainer.trainer",
    "MultiTaskTrainerCallback": "task",
    "MultiTaskTrainingArguments": "arguments",
    "MuxBatch": "data.batch",
    "PeftMuxError": "errors",
    "Plan": "scheduler.plan",
    "PlanError": "errors",
    "ProcessError": "errors",
    "SamplingOptions": "modeling.generation.options",
    "SweepResult": "trainer.sweep",
    "Task": "task",
    "TaskStatus": "task",
    "UnsupportedModelError": "errors",
    "generate": "modeling.generation.decoding",
    "load_rows": "data.sources",
    "sweep": "trainer.sweep",
}

__all__ = [
    "BottleneckConfig",
    "CheckpointError",
    "ChunkPackingCollator",
    "Completion",
    "ConfigError",
    "DataError",
    "DiffPruningConfig",
    "EarlyStopping",
    "GenerateOptions",
    "GenerationRequest",
    "MemoryBudgetError",
    "MultiTaskPeftModel",
    "MultiTaskTrainer",
    "MultiTaskTrainerCallback",
    "MultiTaskTrainingArguments",
    "MuxBatch",
    "PeftMuxError",
    "Plan",
    "PlanError",
    "ProcessError",
    "SamplingOptions",
    "SweepResult",
    "Task",
    "TaskStatus",
    "UnsupportedModelError",
    "__version__",
    "generate",
    "load_rows",
    "sweep",
]


def __dir__() -> list[str]:
    """List the public names, used already or not."""
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `import peft_mux` costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'peft_mux' has no attribute {name!r}")
    return getattr(importlib.import_module(f"peft_mux.{_HOMES[name]}"), name)
