"""How a process leaves: its connections are closed before the interpreter ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT

pytestmark = pytest.mark.distributed

PROGRAM = """\
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
if rank == 1:
    raise SystemExit(3)
"""


@pytest.mark.nightly  # two interpreters of their own
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads are counted in /proc")
def test_no_thread_of_gloo_is_left_when_the_interpreter_ends_well_or_by_an_exit(tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM]
    started = [
        subprocess.Popen([*command, str(rank), f"{tmp_path}/store"], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for code, process in zip((0, 3), started, strict=True):
        printed, _ = process.communicate(timeout=120)
        assert process.returncode == code
        first, last = printed.split("\n")[:2]
        assert int(first.removeprefix("threads: ")) > 0, "the test looks for the right name"
        assert last == "left: 0"
