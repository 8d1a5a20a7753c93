"""Starts the worker processes of a benchmark, and ends all of them when one fails."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path


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
            raise SystemExit(f"the workers ended with {codes} instead of 0. See what they printed above.")
    finally:
        for process in processes:
            process.kill()
            process.wait()


def written_once(rank: int, path: Path, write: Callable[[Path], object]) -> Path:
    """Return a path that rank 0 writes, whole; the others wait for it.

    Args:
        rank: the number of this process.
        path: the file or folder.
        write: writes it to the path that it is given.
    """
    if rank == 0:
        unfinished = path.with_name(f"unfinished-{path.name}")
        write(unfinished)
        unfinished.rename(path)
    while not path.exists():
        time.sleep(0.05)
    return path


def run_ranks(module: str, num_processes: int, found: Path, *, kept_here: Collection[str] = ()) -> None:
    """Run a benchmark's module once for each rank, with this process's own arguments; rank 0 leaves what was found.

    Args:
        module: name of the module, which takes `--worker RANK` and `--found FILE`.
        num_processes: number of ranks.
        found: where rank 0 leaves what was found.
        kept_here: arguments that are for this process alone.

    Raises:
        SystemExit: if one of them fails; then the others are ended.
    """
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        port = one.getsockname()[1]
    own = [argument for argument in sys.argv[1:] if argument not in kept_here]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONWARNINGS": "ignore"}
    environment |= {"WORLD_SIZE": str(num_processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    workers = []
    for rank in range(num_processes):
        command = [sys.executable, "-m", module, *own, "--worker", str(rank), "--found", str(found)]
        workers.append((command, {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}))
    run_workers(workers)
