"""Counts the attacks: at the end of a run of this folder stands how many there were of each kind, and how many held."""

from __future__ import annotations

from collections import Counter
from pathlib import PurePosixPath
from typing import Any

COUNT = "attacks"
"""Name of the property in which a test that makes several attacks says how many: `record_property(COUNT, number)`."""


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the counts, above the last line; under xdist this runs where all reports come together."""
    held, missed = Counter[str](), Counter[str]()
    for outcome, counts in (("passed", held), ("failed", missed), ("error", missed)):
        for report in terminalreporter.stats.get(outcome, ()):
            path = PurePosixPath(report.nodeid.partition("::")[0])
            if path.parent.name == "attacks" and (report.when == "call" or outcome == "error"):
                counts[path.stem.removeprefix("test_")] += dict(report.user_properties).get(COUNT, 1)
    kinds = sorted(held.keys() | missed.keys())
    if not kinds:
        return
    terminalreporter.section("attacks")
    for kind in kinds:
        terminalreporter.write_line(f"{kind:<12} {held[kind]:6d} held  {missed[kind]:6d} did not")
    terminalreporter.write_line(f"{'all':<12} {held.total():6d} held  {missed.total():6d} did not")
