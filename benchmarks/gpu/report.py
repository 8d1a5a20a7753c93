"""The time budget and the report of `benchmarks.gpu`: parts one after another, saved after every row."""

from __future__ import annotations

import argparse
import json
import os
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Row = tuple[str, Any]
"""What a part yields: the name of a result, and plain values. One with `is_right` is a check."""

Clock = Callable[[], float]


class Deadline:
    """A time limit; asked between measurements, so that what runs is finished."""

    def __init__(self, seconds: float, clock: Clock = time.monotonic) -> None:
        self._clock = clock
        self._end_s = clock() + seconds

    def left_s(self) -> float:
        """Return the seconds that are left, negative once it has passed."""
        return self._end_s - self._clock()

    def has(self, seconds: float = 0.0) -> bool:
        """Whether more than `seconds` are left."""
        return self.left_s() > seconds


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the benchmark.

    Attributes:
        name: name of the part in the report.
        estimated_s: seconds that it is computed to take.
        run: yields rows; ends early, with a row "note", where its deadline is near.
        is_check: whether it can fail, so that leaving it out is a fault.
        call: in which of the calls of a benchmark it runs, from 1.
    """

    name: str
    estimated_s: float
    run: Callable[[Deadline], Iterator[Row]]
    is_check: bool = False
    call: int = 1


@dataclass
class Report:
    """Collects rows and writes all of them after each one, so that a run that is cut off loses nothing.

    Attributes:
        path: path of the JSON file, which is written whole or not at all.
        head: plain values at its beginning.
        clock: returns seconds.
        after_failure: called after a part has failed, to free what it held; may say that no part can run any more.
    """

    path: Path
    head: dict[str, Any]
    clock: Clock = time.monotonic
    after_failure: Callable[[], str | None] = lambda: None
    values: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        """Write the head to the file."""
        self.values = {**self.head, "checks": {}, "skipped": [], "faults": [], "parts": {}}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.save()

    def save(self) -> None:
        """Write everything, by way of a second file."""
        self.values |= {"checks": self.checks(), "skipped": self.skipped(), "faults": self.faults()}
        draft = self.path.with_suffix(".part")
        draft.write_text(json.dumps(self.values, indent=1), encoding="utf-8")
        os.replace(draft, self.path)

    def run(self, parts: list[Part], total_s: float) -> None:
        """Run the parts in order, which is that of their value; one that fails is reported, and the next one begins.

        Each gets at least its estimate where that much is left, twice of it if need be, and what later ones do not
        claim; one whose estimate is more than what is left is skipped, and a shorter one after it may still run.

        Args:
            parts: the parts, the most telling first.
            total_s: seconds after which no measurement begins.
        """
        whole = Deadline(total_s, self.clock)
        lost: str | None = None
        for index, part in enumerate(parts):
            left_s, later_s = whole.left_s(), sum(other.estimated_s for other in parts[index + 1 :])
            entry: dict[str, Any] = {"status": "running", "estimated_s": part.estimated_s, "is_check": part.is_check}
            self.values["parts"][part.name] = entry | {"rows": {}}
            entry = self.values["parts"][part.name]
            if lost is not None:
                entry["status"] = f"skipped: {lost}"
            elif part.estimated_s > left_s:
                entry["status"] = f"skipped: needs {part.estimated_s:.0f} s, and {max(left_s, 0.0):.0f} s are left"
            else:
                entry["allowed_s"] = min(left_s, max(2 * part.estimated_s, left_s - later_s))
                print(f"\n== {part.name} (estimated {part.estimated_s:.0f} s)", flush=True)
                self._run(part, entry, Deadline(entry["allowed_s"], self.clock))
                if entry["status"] != "done":
                    lost = self.after_failure()
            print(f"   {part.name}: {entry['status']}", flush=True)
            self.save()

    def _run(self, part: Part, entry: dict[str, Any], deadline: Deadline) -> None:
        start_s = self.clock()
        self.save()  # a run that is cut off shows in which part
        try:
            for name, value in part.run(deadline):
                entry["rows"][name] = value
                entry["seconds"] = self.clock() - start_s
                self.save()
                print(f"   {name}: {_short(value)}", flush=True)
            entry["status"] = "done"
        except Exception as error:  # a part that fails must not cost the others
            entry["status"] = f"failed: {type(error).__name__}: {str(error)[:500]}"
            entry["traceback"] = traceback.format_exc()[-4000:]
        entry["seconds"] = self.clock() - start_s

    def checks(self) -> dict[str, str]:
        """Return "pass" or "fail" for each check that ran, by part and row."""
        return {
            f"{name}: {row}": "pass" if value["is_right"] else "fail"
            for name, entry in self.values["parts"].items()
            for row, value in entry["rows"].items()
            if isinstance(value, dict) and "is_right" in value
        }

    def skipped(self) -> list[str]:
        """Return what was left out, parts and rows, each as one line with the reason."""
        found = []
        for name, entry in self.values["parts"].items():
            if entry["status"].startswith("skipped"):
                found.append(f"{name}: {entry['status'].removeprefix('skipped: ')}")
            rows = [(row, value) for row, value in entry["rows"].items() if isinstance(value, dict)]
            found += [f"{name}: {row}: {value['skipped']}" for row, value in rows if "skipped" in value]
        return found

    def faults(self) -> list[str]:
        """Return what failed, was found to be wrong, or is a check that was left out, each as one line."""
        found = []
        for name, entry in self.values["parts"].items():
            is_skipped = entry["status"].startswith("skipped")
            if entry["status"].startswith("failed") or (is_skipped and entry["is_check"]):
                found.append(f"{name}: {entry['status']}")
            for row, value in entry["rows"].items():
                if isinstance(value, dict) and value.get("is_right") is False:
                    found.append(f"{name}: {row} is wrong: {_short(value)}")
        return found

    def print_faults(self) -> int:
        """Print what was skipped and what is wrong; return the exit code of the run."""
        for skipped in self.skipped():
            print(f"SKIPPED {skipped}", flush=True)
        for fault in self.faults():
            print(f"FAULT {fault}", flush=True)
        print(f"\nwritten to {self.path}")
        return 1 if self.faults() else 0


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_short(item)}" for key, item in value.items() if not isinstance(item, dict | list))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def add_options(parser: argparse.ArgumentParser, minutes: float) -> None:
    """Add the options that the commands of GPU benchmarks share."""
    add = parser.add_argument
    add("--name", help="ends the result file's name; by default the device's own, or the number of processes")
    add("--output", type=Path, help="JSON file to write; by default in benchmarks/results/, with the name")
    add("--minutes", type=float, default=minutes, help="minutes after which no measurement begins, starting included")
    add("--traces", type=Path, help="folder to keep profiler traces in; by default only their numbers are kept")
    add("--list", action="store_true", help="print the parts and their computed seconds, and run nothing")
    add("--rehearse", action="store_true", help="tiny shapes in fp32, on any machine")
