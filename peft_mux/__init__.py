"""Train many PEFT adapters at once on one frozen Hugging Face backbone, each as if it were alone."""

from __future__ import annotations

import importlib
import importlib.abc
import sys
from importlib.machinery import ModuleSpec
from typing import TYPE_CHECKING, Any

import peft_mux.errors

if TYPE_CHECKING:
    from peft_mux.adapters.bottleneck import BottleneckConfig
    from peft_mux.adapters.diff_pruning import DiffPruningConfig
    from peft_mux.arguments import MultiTaskTrainingArguments
    from peft_mux.calls import AdamSettings, Call, CallFailure, CallResult, Calls, Example, Frozen, Sampling
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
        TaskFailedError,
        UnsupportedModelError,
    )
    from peft_mux.generation.decoding import generate
    from peft_mux.generation.requests_and_completions import Completion, GenerationRequest
    from peft_mux.modeling.model import MultiTaskPeftModel
    from peft_mux.modeling.sampling import GenerateOptions, SamplingOptions
    from peft_mux.scheduler.plan_views import Plan
    from peft_mux.sweeps import SweepResult, sweep
    from peft_mux.task import EarlyStopping, MultiTaskTrainerCallback, Task, TaskStatus
    from peft_mux.trainer.trainer import MultiTaskTrainer

__version__ = peft_mux.errors.installed_version("peft-mux") or "0.0.0"  # a checkout that is not installed

_NAMES = {
    "arguments": "MultiTaskTrainingArguments",
    "calls": "AdamSettings Call CallFailure CallResult Calls Example Frozen Sampling",
    "data.batch": "MuxBatch",
    "data.collator": "ChunkPackingCollator",
    "data.sources": "load_rows",
    "errors": (
        "CheckpointError ConfigError DataError MemoryBudgetError PeftMuxError PlanError ProcessError "
        "TaskFailedError UnsupportedModelError"
    ),
    "adapters.bottleneck": "BottleneckConfig",
    "adapters.diff_pruning": "DiffPruningConfig",
    "generation.decoding": "generate",
    "modeling.sampling": "GenerateOptions SamplingOptions",
    "generation.requests_and_completions": "Completion GenerationRequest",
    "modeling.model": "MultiTaskPeftModel",
    "scheduler.plan_views": "Plan",
    "task": "EarlyStopping MultiTaskTrainerCallback Task TaskStatus",
    "sweeps": "SweepResult sweep",
    "trainer.trainer": "MultiTaskTrainer",
}
"""The public names of each module."""
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "AdamSettings",
    "BottleneckConfig",
    "Call",
    "CallFailure",
    "CallResult",
    "Calls",
    "CheckpointError",
    "ChunkPackingCollator",
    "Completion",
    "ConfigError",
    "DataError",
    "DiffPruningConfig",
    "EarlyStopping",
    "Example",
    "Frozen",
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
    "Sampling",
    "SamplingOptions",
    "SweepResult",
    "Task",
    "TaskFailedError",
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
    """Import a public name when it is first used, so that `import peft_mux` takes no time."""
    if name not in _HOMES:
        raise AttributeError(f"module 'peft_mux' has no attribute {name!r}")
    return getattr(importlib.import_module(f"peft_mux.{_HOMES[name]}"), name)


class _PeftFinder(importlib.abc.MetaPathFinder):
    """Imports our adapter types right after PEFT, whenever that is: PEFT must know them before it reads their files."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return how PEFT is loaded, followed by our types; `None` for any other module."""
        if fullname != "peft" or self not in sys.meta_path:
            return None
        others = sys.meta_path[sys.meta_path.index(self) + 1 :]
        spec = next(filter(None, (finder.find_spec(fullname, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_register(module: Any) -> None:
                load(module)
                importlib.import_module("peft_mux.modeling.adapters")

            spec.loader.exec_module = load_and_register
        return spec


if sys.modules.get("peft") is not None:  # `None` stands for a module that was declared absent
    importlib.import_module("peft_mux.modeling.adapters")
else:
    sys.meta_path.insert(0, _PeftFinder())
