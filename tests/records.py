"""What a run has written into its metrics file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def run_records(folder: Path, event: str | None = None) -> list[dict[str, Any]]:
    """Return the records of the run in a folder, by default those of all events."""
    lines = (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if event in (None, record["event"])]
