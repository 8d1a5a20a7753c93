"""Plugin of `make test-times`: the CPU seconds of tests with their child processes, by folder and of the dearest tests.

Seconds on a clock say little on a shared machine. What a fixture of a module or session takes is counted for the first
test that uses it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Generator

import psutil
import pytest

_seconds: dict[str, float] = defaultdict(float)  # by test
_before_s = 0.0


def _cpu_s() -> float:
    """Return what this process, its living descendants and the children that they have waited for have used so far."""
    total_s = 0.0
    me = psutil.Process()
    for process in (me, *me.children(recursive=True)):
        try:
            total_s += sum(process.cpu_times()[:4])  # user and system, then those of children
        except psutil.Error:
            continue  # it has just ended, and its parent counts it
    return total_s


def pytest_runtest_logstart() -> None:
    """Begin to count."""
    global _before_s
    _before_s = _cpu_s()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the seconds of a set-up, a test or its end to its report, which goes from a worker to the main process."""
    global _before_s
    report = yield
    now_s = _cpu_s()
    report.cpu_s, _before_s = now_s - _before_s, now_s
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Collect the seconds of one test."""
    _seconds[report.nodeid] += getattr(report, "cpu_s", 0.0)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the sums of folders and the dearest tests."""
    folders: dict[str, list[float]] = defaultdict(list)
    for test, seconds in _seconds.items():
        folders["/".join(test.split("::")[0].split("/")[:2])].append(seconds)
    terminalreporter.section("CPU seconds")
    terminalreporter.write_line(f"{sum(_seconds.values()):9.1f}  {len(_seconds)} tests")
    for folder, times in sorted(folders.items(), key=lambda entry: -sum(entry[1])):
        terminalreporter.write_line(f"{sum(times):9.1f}  {folder} ({len(times)} tests)")
    terminalreporter.section("dearest tests, CPU seconds")
    for test, seconds in sorted(_seconds.items(), key=lambda entry: -entry[1])[: config.getoption("times")]:
        terminalreporter.write_line(f"{seconds:9.1f}  {test}")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add how many tests are listed."""
    parser.addoption("--times", type=int, default=30, help="how many of the dearest tests are listed")
