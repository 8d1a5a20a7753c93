"""How a process leaves: its connections are closed before the interpreter ends."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from tests.paths import ROOT

pytestmark = pytest.mark.distributed

PROGRAM = """
import atexit, os, sys, tempfile
from pathlib import Path


@atexit.register
def tell():
    # Registered first, so called last.
    names = [(path / "comm").read_text().strip() for path in Path("/proc/self/task").iterdir()]
    print("left:", sum("gloo" in name for name in names), flush=True)


import torch
import torch.distributed as dist
from peft_mux.engine.processes import Processes

torch.set_num_threads(1)
rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
processes = Processes(rank, 2, timeout_s=60)
processes.connect()
assert processes.gather(rank) == [0, 1]
group = processes.open_group()
names = [(path / "comm").read_text().strip() for path in Path("/proc/self/task").iterdir()]
print("threads:", sum("gloo" in name for name in names), flush=True)
del group
END
"""


def run(folder: str, end: str) -> list[tuple[int, str]]:
    """Return the exit code and the output of each of two processes, which end in the same way."""
    program = textwrap.dedent(PROGRAM).replace("END", end)
    commands = [[sys.executable, "-c", program, str(rank), f"{folder}/store"] for rank in range(2)]
    started = [subprocess.Popen(one, cwd=ROOT, stdout=subprocess.PIPE, text=True) for one in commands]
    return [(one.wait(120), one.stdout.read() if one.stdout else "") for one in started]


@pytest.mark.slow  # two interpreters of their own
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads are counted in /proc")
@pytest.mark.parametrize("end", [pytest.param("", id="well"), pytest.param("raise SystemExit(3)", id="by an exit")])
def test_no_thread_of_gloo_is_left_when_the_interpreter_ends(tmp_path: object, end: str) -> None:
    for code, words in run(str(tmp_path), end):
        assert code == (3 if end else 0)
        first, last = words.split("\n")[:2]
        assert int(first.removeprefix("threads: ")) > 0, "the test looks for the right name"
        assert last == "left: 0"
