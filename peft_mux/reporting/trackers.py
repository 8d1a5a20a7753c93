"""Keys in W&B, TensorBoard, Trackio and their like: `task/metric` and `run/metric`, as they are; or a run a task.

Their callbacks in transformers put `train/` before every key that does not begin with `eval_`, which files the
held-out loss of a task under `train/sql/eval_loss`. All of them ask one function for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.integrations import integration_utils

from peft_mux.arguments import MultiTaskTrainingArguments


class NamedLogs(dict[str, float]):
    """Numbers whose keys say by themselves what they are of."""


@contextmanager
def without_one_for_all(args: MultiTaskTrainingArguments) -> Iterator[None]:
    """Let `report_to` be empty in the `with` block where each task has a run of its own: Trainer would make one."""
    before = args.report_to
    args.report_to = [] if args.report_per_task else before
    try:
        yield
    finally:
        args.report_to = before


def trackers_of(task: str, args: MultiTaskTrainingArguments) -> list[TrainerCallback]:
    """Return what keeps a task's own run in each logger; nothing where all tasks share one.

    Args:
        task: name of the task.
        args: the task's copy of the run's arguments, in which its folder and the name of its run are put.
    """
    if not args.report_per_task:
        return []
    root = Path(str(args.output_dir))
    args.output_dir, args.run_name = str(root / task), f"{args.run_name or root.name}/{task}"
    found = [integration_utils.INTEGRATION_TO_CALLBACK[name]() for name in args.report_to or ()]
    for callback in found:
        # Of TensorBoard, from its variable of the environment, which is one for all.
        if getattr(callback, "logging_dir", None):
            callback.logging_dir = str(Path(callback.logging_dir) / task)
    return found


@contextmanager
def keys_as_they_are() -> Iterator[None]:
    """Let the callbacks of transformers leave the keys of `NamedLogs` as they are, in the `with` block."""
    before: Callable[[Any], Any] = integration_utils.rewrite_logs

    def rewrite(logs: Any) -> Any:
        return dict(logs) if isinstance(logs, NamedLogs) else before(logs)

    integration_utils.rewrite_logs = rewrite
    try:
        yield
    finally:
        integration_utils.rewrite_logs = before
