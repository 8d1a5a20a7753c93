"""What is measured while training: running means per task, and `metrics.jsonl`, one flat object a record."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

METRICS_NAME = "metrics.jsonl"


class MetricsLog:
    """Appends records to `metrics.jsonl` of a run folder.

    Every record has `event` (`train`, `eval`, `run`, `status`) and `run_step`; a task's records have `task` and `step`.
    Non-finite numbers are written as strings, as JSON has none.

    Args:
        folder: the folder of the run; `None` writes nothing.
    """

    def __init__(self, folder: Path | None) -> None:
        """Remember where to write."""
        self.path = None if folder is None else folder / METRICS_NAME

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record."""
        if self.path is None:
            return
        line = json.dumps({key: _json_number(value) for key, value in record.items()}, allow_nan=False)
        # Opened for each record, so that no buffer is lost with the process.
        with self.path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")

    def truncate_after(self, run_step: int) -> None:
        """Drop the records of steps that a resumed run takes again, and a torn last line."""
        if self.path is None or not self.path.exists():
            return
        kept = []
        for line in self.path.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            # A line that a crash cut short.
            except json.JSONDecodeError:
                continue
            if record.get("run_step", 0) <= run_step:
                kept.append(line + "\n")
        temporary = self.path.with_suffix(".tmp")
        temporary.write_text("".join(kept), encoding="utf-8")
        # Renamed over the old one, so that a crash leaves one of the two whole.
        temporary.replace(self.path)


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Return the records of a metrics file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def _json_number(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
