"""Two checkouts of the package side by side: the same training steps in turn, and the ratio of their times.

    python -m benchmarks.training.checkouts --before ../before          about 4 minutes on one core
    python -m benchmarks.training.checkouts --before ../before --mix host --layers 32        half a minute

Each checkout trains in a process of its own, which times one step after another; the two processes take turns round by
round, so that a machine that slows down slows both. Seconds are processor seconds of one thread, which other programs
change least. The ratio is the median over the rounds, each of which compares neighbours in time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.paths import ROOT
from benchmarks.training.shapes import SHAPES
from benchmarks.training.workloads import MIXES

HOST = "host", "host-ranks", "host-selective", "host-liger", "host-liger-selective"
"""The mixes whose passes only seem to be on a GPU; see `host_passes.py`."""


class Child:
    """One checkout that works in a process of its own, a step at a time.

    Args:
        script: what the process runs; it gets the checkout, the root of the benchmarks and `arguments`.
        checkout: folder of the checkout.
        arguments: what else the script wants to know.
    """

    def __init__(self, script: Path, checkout: Path, *arguments: str) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        # -P: the folder of the script holds modules that must not be found by their bare names.
        command = [sys.executable, "-P", str(script), str(checkout), str(ROOT), *arguments]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment, cwd="/tmp")

    def tell(self, line: str) -> None:
        """Send one line."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def hear(self) -> Any:
        """Return what the next line of JSON says."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"a checkout ended with status {self.process.wait()}")
        return json.loads(line)

    def step(self) -> Any:
        """Take one step; return what the script says of it."""
        self.tell("step")
        return self.hear()


def compare(before: Path, after: Path, mix: str, *shape: str, num_steps: int, num_warm: int) -> None:
    """Print the times of both checkouts and their ratio, and whether they trained to the same losses."""
    script = Path(__file__).with_name("host_passes.py" if mix in HOST else "checkout_steps.py")
    children = [Child(script, folder, mix, *shape) for folder in (before, after)]
    for child in children:
        child.tell(str(num_steps))
    rounds = [[float(child.step()) for child in children] for _ in range(num_steps)][num_warm:]
    losses = [child.hear() for child in children]
    ratio = statistics.median(pair[1] / pair[0] for pair in rounds)
    seconds = [statistics.median(times) for times in zip(*rounds, strict=True)]
    same = "bit-equal losses" if losses[0] == losses[1] else "DIFFERENT losses"
    same = f"{losses[0]}, {losses[1]}" if mix in HOST else same
    print(f"{mix:<12} before {seconds[0]:.5f} s   after {seconds[1]:.5f} s   after / before {ratio:.3f}   {same}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare on each mix."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.training.checkouts", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--before", type=Path, required=True, help="folder of the checkout to compare with")
    parser.add_argument("--after", type=Path, default=ROOT, help="folder of the other checkout; by default this one")
    parser.add_argument("--steps", type=int, default=24, help="steps of each checkout, the first ones not counted")
    parser.add_argument("--warm", type=int, default=4, help="steps that are not counted")
    parser.add_argument(
        "--shape", choices=SHAPES, help="a published backbone's; by default a Llama of 29.5M parameters"
    )
    parser.add_argument("--layers", type=int, default=4, help="layers of the shape that are taken")
    parser.add_argument("--mix", nargs="+", choices=(*MIXES, *HOST), default=MIXES, help="kinds of workload")
    options = parser.parse_args(arguments)
    folders = options.before.resolve(), options.after.resolve()
    for mix in options.mix:
        shape = (options.shape or "", str(options.layers)) if options.shape or mix in HOST else ()
        compare(*folders, mix, *shape, num_steps=options.steps, num_warm=options.warm)


if __name__ == "__main__":
    main()
