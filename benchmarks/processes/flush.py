"""A pipeline that is flushed at every step against one that is not, executed: the same steps of the same tasks.

    python -m benchmarks.processes.flush            two processes, one thread each; about 2 minutes on 2 idle cores
    python -m benchmarks.processes.flush --write    also into benchmarks/results/

Two stages of a Llama of random weights, in two processes over gloo, train four tasks with equal adapters, each a bucket
of its own with C micro-batches of T tokens a step: a light load, so the flush is a large part. `flushed` takes
steps one by one, as `pipeline_flush="every_step"` does: passes, the sum of the norms, updates. `window` takes the same
number of steps in one window, as "auto" does. Both run in every round, by turns first and last; `faster` is the median
over rounds of flushed over window, both of one round, and `planned` the same of the simulator, of passes alone, over
latencies that are measured next to them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.paths import RESULTS
from benchmarks.processes.workers import run_ranks
from benchmarks.training.report import hardware, host_kind, versions
from benchmarks.training.workloads import ModelSpec

NUM_PROCESSES = 2
_SETTINGS = "micro_batches tasks tokens steps rounds layers".split()


def main() -> None:
    options = _parser().parse_args()
    if options.worker is not None:
        _work(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        run_ranks("benchmarks.processes.flush", NUM_PROCESSES, path, kept_here=("--write",))
        rows = json.loads(path.read_text(encoding="utf-8"))
    print_table(rows, options)
    if options.write:
        path = RESULTS / f"flush-{host_kind()}.json"
        contents = {
            "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "hardware": hardware(),
            "versions": versions(),
            "settings": {name: getattr(options, name) for name in _SETTINGS},
            "figures": [figures(row, options.steps) for row in rows],
            "rows": rows,
        }
        path.write_text(json.dumps(contents, indent=1) + "\n", encoding="utf-8")
        print(f"wrote {path}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--micro-batches", type=int, nargs="+", default=[1, 2, 4], help="numbers of micro-batches of each task, C"
    )
    parser.add_argument("--tasks", type=int, default=4, help="number of tasks")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a micro-batch, T; a multiple of 32")
    parser.add_argument("--steps", type=int, default=8, help="steps of a window")
    parser.add_argument("--rounds", type=int, default=5, help="windows that are timed")
    parser.add_argument("--layers", type=int, default=ModelSpec().num_layers, help="layers of the backbone")
    parser.add_argument("--write", action="store_true", help="write the JSON into benchmarks/results/")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--found", help=argparse.SUPPRESS)
    return parser


def _work(options: argparse.Namespace) -> None:
    """Be one of the stages."""
    from benchmarks.processes.flush_worker import FlushWorker
    from benchmarks.processes.pipeline_worker import Settings

    settings = Settings(
        model=ModelSpec(num_layers=options.layers),
        num_tasks=options.tasks,
        num_tokens=options.tokens,
        micro_batches=tuple(options.micro_batches),
        rounds=options.rounds,
        drawn=0,
    )
    found = FlushWorker(options.worker, settings).measure_flushes(options.steps)
    if options.worker == 0:
        Path(options.found).write_text(json.dumps(found), encoding="utf-8")


def figures(row: Mapping[str, Any], num_steps: int) -> dict[str, float]:
    """Return what a step takes in milliseconds with and without flushes, and how much faster it is without.

    Args:
        row: seconds of `num_steps` steps by round, "flushed_s" and "window_s", and what is planned of a step.
        num_steps: steps of a window.
    """
    pairs = list(zip(row["flushed_s"], row["window_s"], strict=True))
    return {
        "num_micro_batches": row["num_micro_batches"],
        "flushed_ms": 1e3 * statistics.median(row["flushed_s"]) / num_steps,
        "window_ms": 1e3 * statistics.median(row["window_s"]) / num_steps,
        "faster": statistics.median(flushed / window for flushed, window in pairs),
        "least": min(row["flushed_s"]) / min(row["window_s"]),
        "planned": row["planned_flushed_s"] / row["planned_window_s"],
    }


def print_table(rows: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> None:
    """Print a line for each number of micro-batches."""
    print(
        f"\nLlama, {options.layers} layers, two stages, one thread each; {options.tasks} tasks, T = {options.tokens};"
        f" {options.rounds} rounds of {options.steps} steps"
    )
    print(f"{'C':>3} | {'flushed':>10} {'window':>10} ms a step | {'faster':>7} {'least':>6} {'planned':>8}")
    for row in rows:
        one = figures(row, options.steps)
        print(
            f"{row['num_micro_batches']:>3} | {one['flushed_ms']:>10.1f} {one['window_ms']:>10.1f}           |"
            f" {one['faster']:>6.2f}x {one['least']:>5.2f}x {one['planned']:>7.2f}x"
        )


if __name__ == "__main__":
    main()
