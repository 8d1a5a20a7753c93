"""What `train --json` and `profile --json` print: one JSON object on standard output, all else on standard error."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import asdict
from typing import Any


def told_aside(*, is_json: bool) -> AbstractContextManager[Any]:
    """Send what is told on the way to standard error, where JSON is to stand alone on standard output."""
    return redirect_stdout(sys.stderr) if is_json else nullcontext()


def print_json(value: Any) -> None:
    """Print a value as JSON; numbers that are not finite, which JSON has not, as null."""
    print(json.dumps(_plain(value), indent=1))  # noqa: T201


def run_summary(trainer: Any, results: Sequence[Any]) -> dict[str, Any]:
    """Return what a run came to: its folder and steps, each task's line of the report, and the rankings of sweeps.

    Args:
        trainer: has trained.
        results: the result of each sweep.
    """
    rows = [row._asdict() for row in trainer.report().rows]
    return {
        "output_dir": trainer.args.output_dir,
        "step": trainer.state.global_step,
        "interrupted_by": trainer.interrupted_by or None,
        "tasks": {row.pop("name"): row for row in rows},
        "sweeps": [asdict(result) for result in results],
    }


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)
