"""A clock that tests move, and stand-ins for tasks whose progress is shown."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


class Clock:
    """A clock that tests move."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def shown_task(name: str = "a", **facts: Any) -> Any:
    """Return a stand-in for a task that runs."""
    facts = {"swept_as": "", "loss_kind": "sft", **facts}
    given = {"step": 0, "num_steps": 100, "status": "running", "reason": "", "last_loss": float("nan"), "num_tokens": 0}
    return SimpleNamespace(
        name=name, **{"state": SimpleNamespace(log_history=[]), "eval_data": {"eval": {}}, **given, **facts}
    )
