"""Keys in W&B, TensorBoard, Trackio and their like: `task/metric` and `run/metric`, as they are.

Their callbacks in transformers put `train/` before every key that does not begin with `eval_`, which files the
held-out loss of a task under `train/sql/eval_loss`. All of them ask one function for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from transformers.integrations import integration_utils


class NamedLogs(dict[str, float]):
    """Numbers whose keys say by themselves what they are of."""


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
