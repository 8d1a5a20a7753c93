"""Starts the worker processes of a benchmark, and ends all of them when one fails."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence


def run_workers(commands: Sequence[tuple[Sequence[str], Mapping[str, str]]]) -> None:
    """Run all workers to their end.

    Args:
        commands: for each worker, its command line and its environment.

    Raises:
        SystemExit: if one fails; what it printed stands above.
    """
    processes = [subprocess.Popen(list(command), env=dict(environment)) for command, environment in commands]
    try:
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                break
            time.sleep(0.2)
        codes = [process.poll() for process in processes]
        if any(codes):
            raise SystemExit(f"the workers ended with {codes}; allowed: 0. See what they printed above.")
    finally:
        for process in processes:
            process.kill()
            process.wait()
