"""How benchmarks repeat, interleave, time and compare: runs by turns, and runs in processes of their own."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from benchmarks.paths import ROOT

T = TypeVar("T")
Clock = Callable[[], float]
CLOCKS: dict[str, Clock] = {"wall": time.perf_counter, "processor": time.process_time}
"""Seconds that pass, or those of the processor, which other programs on the machine change least; for one thread."""


def in_turns(
    runs: Mapping[str, Callable[[], Any]], rounds: int, clock: Clock = time.process_time, *, num_warm: int = 1
) -> dict[str, list[float]]:
    """Return the seconds of each run by round.

    Each round has all runs, and begins with another one, so that whatever else the machine does affects all equally.

    Args:
        runs: what is timed, by name.
        rounds: rounds that are timed.
        clock: returns seconds.
        num_warm: rounds before them.
    """
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(-num_warm, rounds):
        for name in rotated(list(runs), turn):
            start_s = clock()
            runs[name]()
            if turn >= 0:
                seconds[name].append(clock() - start_s)
    return seconds


def timed(act: Callable[[], T], clock: Clock = time.process_time) -> tuple[T, float]:
    """Return what a call gives, and its seconds."""
    start_s = clock()
    value = act()
    return value, clock() - start_s


def rotated(names: Sequence[T], turn: int) -> list[T]:
    """Return what runs in a round, in its order: each round begins with another one."""
    first = turn % max(len(names), 1)
    return [*names[first:], *names[:first]]


def ratio(seconds: Sequence[float], others: Sequence[float]) -> float:
    """Return the median over the rounds of one time over another of the same round."""
    return statistics.median(a / b for a, b in zip(seconds, others, strict=True))


class UnequalWorkError(RuntimeError):
    """Contenders do not do the same work, so that their times must not be compared."""


def require_equal_losses(what: str, losses: Sequence[float], others: Sequence[float], tolerance: float = 1e-4) -> None:
    """Compare the losses of two contenders; NaN is a difference.

    Args:
        what: what is compared, for the error.
        losses: losses of a contender.
        others: losses of another one on the same rows.
        tolerance: largest relative difference.

    Raises:
        UnequalWorkError: if two of them differ.
    """
    pairs = zip(losses, others, strict=False)
    if len(losses) != len(others) or not all(math.isclose(a, b, rel_tol=tolerance) for a, b in pairs):
        raise UnequalWorkError(f"{what}: losses {list(losses)} and {list(others)} must be equal: the work is not.")


class Table:
    """A table in Markdown that is printed row by row.

    Args:
        *columns: title and format of each column, such as `"step s:>9.3f"`; a text has its side and width.
    """

    def __init__(self, *columns: str) -> None:
        titles, self._formats = zip(*(column.rsplit(":", 1) for column in columns), strict=True)
        self.row(*titles)
        print("|" + "---|" * len(titles))

    def row(self, *values: Any) -> None:
        """Print a row."""
        cells = []
        for value, style in zip(values, self._formats, strict=True):
            side_and_width = "".join(re.findall(r"^[<>]|\d+", style)[:2])
            cells.append(format(value, side_and_width if isinstance(value, str) else style))
        print(f"| {' | '.join(cells)} |", flush=True)


_MARK = "found: "


def in_own_process(module: str, *arguments: str, processes: int = 1, limit_s: float = 3600, **environment: str) -> Any:
    """Run a module in one or several processes of its own; return what it has handed to `hand_over`.

    Args:
        module: what `python -m` runs.
        *arguments: its command line.
        processes: processes that run it together, under `torchrun`.
        limit_s: seconds after which it is ended.
        **environment: variables in addition to those of this process.

    Raises:
        RuntimeError: with the end of its output, if it fails.
        subprocess.TimeoutExpired: if it takes longer.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *(launcher if processes > 1 else []), "-m", module, *arguments]
    variables = {"OMP_NUM_THREADS": "1"} if processes > 1 else {}
    variables |= {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **environment}
    pipe = subprocess.PIPE
    with subprocess.Popen(
        command, cwd=ROOT, env=os.environ | variables, stdout=pipe, stderr=pipe, text=True, start_new_session=True
    ) as process:
        try:
            output, errors = process.communicate(timeout=limit_s)
        finally:
            if process.poll() is None:  # ends what it has started, too
                os.killpg(process.pid, signal.SIGKILL)
    if process.returncode != 0:
        # The launcher's own report comes last, and pushes what a process has said out of the end.
        said = "\n".join(line for line in errors.splitlines() if "Error: " in line)
        raise RuntimeError(f"{module} ended with code {process.returncode}:\n{said[:3000]}\n{errors[-3000:]}")
    (result,) = (line for line in output.splitlines() if line.startswith(_MARK))
    return json.loads(result.removeprefix(_MARK))


def hand_over(result: Any) -> None:
    """Give plain values to the process that waits in `in_own_process`; of several processes one does."""
    print(f"\n{_MARK}{json.dumps(result)}", flush=True)
