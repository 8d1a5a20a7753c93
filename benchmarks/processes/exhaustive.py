"""The planner's own plan against every other plan, executed: a pipeline of two stages, or two tensor parallel ranks.

    python -m benchmarks.processes.exhaustive                    both layouts, 10 mixes each; about 15 idle minutes
    python -m benchmarks.processes.exhaustive --layouts pp2 --mixes 3
    python -m benchmarks.processes.exhaustive --write            also into benchmarks/results/

For mixes of 2 to 4 tasks (drawn by a seed: 2 to 8 rows of 10 to 70, or 1 or 2 of 100 to 200 tokens a step, ranks 4 to
64) all contiguous partitions of the tasks into hTasks, with hTasks that share buckets and without, 1, 2 or 4
micro-batches and, on tensor parallel ranks, 1 to 4 passes in turns are planned; equal plans count once.
One trainer follows all of them, one after another, step by step, after a profile that two processes measured. Then the
fastest of them and the planner's own run again by turns, as the fastest of many medians is also the luckiest; `own /
best` is of these rounds. Steps are flushed, so that each has a time of its own.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import Table, hand_over, in_own_process
from benchmarks.stored import host_kind, read_result, write_result

LAYOUTS: dict[str, dict[str, Any]] = {"pp2": {"pipeline_parallel_size": 2}, "tp2": {"tensor_parallel_size": 2}}
GOALS = {"median": 1.05, "worst": 1.10}


def main() -> None:
    """Run both ranks and print the table; in a rank, measure."""
    options = _parser().parse_args()
    if options.worker:
        from benchmarks.processes.exhaustive_worker import measure

        found = measure(options)
        if os.environ["RANK"] == "0":
            hand_over(found)
        return
    with tempfile.TemporaryDirectory() as folder:
        given = [argument for argument in sys.argv[1:] if argument != "--write"]
        rows = in_own_process(
            "benchmarks.processes.exhaustive", *given, "--worker", "--folder", folder, processes=2, limit_s=7200
        )
    summary = print_table(rows)
    if options.write:
        # A run of one layout leaves what is stored of the other.
        stored = read_result(f"exhaustive-{host_kind()}")
        own = {
            layout: {"summary": figures, "rows": [row for row in rows if row["layout"] == layout]}
            for layout, figures in summary.items()
        }
        kept = {layout: stored[layout] for layout in LAYOUTS if layout in stored}
        write_result(f"exhaustive-{host_kind()}", {**kept, **own})


def print_table(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Print each mix, and return the median and the worst of own over best for each layout.

    Args:
        rows: what the ranks have measured of each mix.
    """
    table = Table(
        "layout:<6", "tasks:>5", "tokens:>6", "plans:>5", "own ms:>7.1f", "best ms:>7.1f", "own / best:>10.3f",
        "own plan -> best plan:<1",
    )  # fmt: skip
    for row in rows:
        own_ms, best_ms = 1e3 * row["own_s"], 1e3 * row["best_s"]
        numbers = (row[key] for key in ("layout", "num_tasks", "num_tokens", "num_plans"))
        table.row(*numbers, own_ms, best_ms, own_ms / best_ms, f"{row['own']} -> {row['best']}")
    summary = {}
    for layout in dict.fromkeys(row["layout"] for row in rows):
        ratios = [row["own_s"] / row["best_s"] for row in rows if row["layout"] == layout]
        summary[layout] = {"median": statistics.median(ratios), "worst": max(ratios)}
        text = ", ".join(f"{name} {value:.3f} (goal {GOALS[name]:.2f})" for name, value in summary[layout].items())
        print(f"{layout}: own over best: {text}")
    return summary


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.processes.exhaustive", description=(__doc__ or "").splitlines()[0]
    )
    add = parser.add_argument
    add("--layouts", nargs="+", choices=tuple(LAYOUTS), default=list(LAYOUTS))
    add("--mixes", type=int, default=10, help="how many mixes to draw for each layout")
    add("--only", type=int, nargs="+", help="numbers of the mixes that are run, from 0; by default all")
    add("--steps", type=int, default=3, help="steps of a plan each time that it is followed; the first is not timed")
    add("--rounds", type=int, default=6, help="how often the fastest plans and the planner's own run again")
    add("--finalists", type=int, default=3, help="how many of the fastest plans run again")
    add("--hidden-size", type=int, default=256)
    add("--layers", type=int, default=4)
    add("--profile-s", type=float, default=15.0, help="seconds of measuring the profile")
    add("--seed", type=int, default=0, help="of the mixes")
    add("--write", action="store_true", help="write the JSON into benchmarks/results/")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    add("--folder", type=Path, help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    main()
