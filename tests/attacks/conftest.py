"""Fixtures of the attacks, and their count: how many there were of each kind, and how many the package withstood."""

from __future__ import annotations

from collections import Counter
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

from tests.attacks import attack_lab as attacks
from tests.attacks import kill_cases, run_files
from tests.attacks.attack_lab import COUNT, Outcome
from tests.attacks.kill_cases import Whole


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Return the run of a process that is not killed."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    outcome = kill_cases.run(folder)
    assert outcome.exit_code == 0
    assert list(outcome.steps) == list(range(1, kill_cases.NUM_STEPS + 1))
    assert outcome.final is not None
    assert [status for _, status in outcome.final.values()] == ["succeeded"] * 3
    return Whole(folder, outcome)


@pytest.fixture(scope="session")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """Return the run of two tasks without a fault."""
    return attacks.train(run_files.two_tasks(), tmp_path_factory.mktemp("sound"), **run_files.SAVING)


@pytest.fixture(scope="session")
def crashed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run that saved after steps 2 and 4, and crashed in step 5."""
    folder = tmp_path_factory.mktemp("crashed")
    run_files.crash_run(folder)
    return folder


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
