"""The time budget and the report of `benchmarks.gpu`: sections one after another, saved after every row."""

from __future__ import annotations

import json
import os
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = tuple[str, Any]
"""What a section yields: the name of a result, and plain values."""


class Deadline:
    """A time limit; asked between measurements, so that what runs is finished."""

    def __init__(self, seconds: float) -> None:
        """Count from now."""
        self._end_s = time.monotonic() + seconds

    def left_s(self) -> float:
        """Return the seconds that are left, negative once it has passed."""
        return self._end_s - time.monotonic()

    def has(self, seconds: float = 0.0) -> bool:
        """Whether more than `seconds` are left."""
        return self.left_s() > seconds


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the benchmark.

    Attributes:
        name: name of the section in the report.
        seconds: its share of the budget, in seconds; what others leave over comes on top.
        run: yields rows; ends early, with a row "note", where its deadline is near.
    """

    name: str
    seconds: float
    run: Callable[[Deadline], Iterator[Row]]


class Report:
    """Collects rows and writes all of them after each one, so that a run that is cut off loses nothing.

    Args:
        path: path of the JSON file, which is written whole or not at all.
        head: plain values that stand at its beginning.
    """

    def __init__(self, path: Path, head: dict[str, Any]) -> None:
        """Write the head to the file."""
        self.path = path
        self.values: dict[str, Any] = {**head, "sections": {}}
        path.parent.mkdir(parents=True, exist_ok=True)
        self.save()

    def save(self) -> None:
        """Write everything, by way of a second file."""
        draft = self.path.with_suffix(".part")
        draft.write_text(json.dumps(self.values, indent=1), encoding="utf-8")
        os.replace(draft, self.path)

    def run(self, sections: list[Section], total_s: float) -> None:
        """Run the sections in order; one that fails is reported, and the next one begins.

        Args:
            sections: the sections, whose seconds should add up to less than `total_s`.
            total_s: seconds after which no further section begins.
        """
        whole = Deadline(total_s)
        for index, section in enumerate(sections):
            later_s = sum(other.seconds for other in sections[index + 1 :])
            allowed_s = max(min(section.seconds, whole.left_s()), whole.left_s() - later_s)
            entry: dict[str, Any] = {"status": "running", "allowed_s": allowed_s, "rows": {}}
            self.values["sections"][section.name] = entry
            print(f"\n== {section.name} (at most {allowed_s:.0f} s)", flush=True)
            if allowed_s <= 0:
                entry["status"] = "skipped: the time budget is spent"
            else:
                self._run(section, entry, Deadline(allowed_s))
            print(f"   {entry['status']}", flush=True)
            self.save()

    def _run(self, section: Section, entry: dict[str, Any], deadline: Deadline) -> None:
        start_s = time.monotonic()
        try:
            for name, value in section.run(deadline):
                entry["rows"][name] = value
                entry["seconds"] = time.monotonic() - start_s
                self.save()
                print(f"   {name}: {_short(value)}", flush=True)
            entry["status"] = "done"
        except Exception as error:  # a section that fails must not cost the others
            entry["status"] = f"failed: {type(error).__name__}: {str(error)[:500]}"
            entry["traceback"] = traceback.format_exc()[-4000:]
        entry["seconds"] = time.monotonic() - start_s

    def faults(self) -> list[str]:
        """Return what failed, was skipped, or was found to be wrong, each as one line."""
        found = []
        for name, entry in self.values["sections"].items():
            if entry["status"] != "done":
                found.append(f"{name}: {entry['status']}")
            for row, value in entry["rows"].items():
                if isinstance(value, dict) and value.get("is_right") is False:
                    found.append(f"{name}: {row} is wrong: {_short(value)}")
        return found


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_short(item)}" for key, item in value.items() if not isinstance(item, dict | list))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
