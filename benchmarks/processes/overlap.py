"""Intra-stage orchestration, executed: hTasks in turns against one after another (MuxTune sections 3.4.2 and 5.3).

    python -m benchmarks.processes.overlap                           two processes, one thread each; a few minutes
    python -m benchmarks.processes.overlap --write --image           also into benchmarks/results/
    python -m benchmarks.processes.overlap --netns                   as root: over a veth pair that `tc` slows down

Two shards of a Llama of random weights run forward and backward of 2 to 4 hTasks of unequal size. The link is slowed on
purpose: a sum of n bytes takes latency + n / bandwidth behind the one before, waited for by sleeping, so that the other
hTasks have the core meanwhile. Both ways are measured in every round. `planned` comes from the simulator, over
subgraphs that were timed with the link at its own speed.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.paths import RESULTS
from benchmarks.processes.workers import run_workers
from benchmarks.training.report import hardware, host_kind, versions
from benchmarks.training.workloads import ModelSpec

PAPER = "MuxTune Figure 19a, 2 to 4 tasks: 1.20, 1.22, 1.23 times as fast with overlap"
MB = 1e6


def main() -> None:
    """Measure both ways and print the table; in a worker process, be one of the shards."""
    options = parse()
    if options.worker is not None:
        work(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        found = json.loads(run(options, Path(folder) / "found.json").read_text())
    print_table(found["rows"], options)
    name = f"overlap-{host_kind()}"
    if options.write:
        facts = {"paper": PAPER, "hardware": hardware(), "versions": versions(), "load_average": os.getloadavg()}
        settings = {"model": vars_of(ModelSpec(num_layers=options.layers)), "rounds": options.rounds}
        link = "a veth pair slowed by tc" if options.netns else "injected delays"
        path = RESULTS / f"{name}.json"
        path.write_text(json.dumps({**facts, **settings, "link": link, "rows": found["rows"]}, indent=1) + "\n")
        print(f"wrote {path}")
    if options.image:
        from benchmarks.processes.overlap_plot import plot

        path = RESULTS / f"{name}.png"
        plot(path, found["timeline"])
        print(f"wrote {path}")


def parse() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--htasks", type=int, nargs="+", default=[2, 3, 4], choices=(2, 3, 4), help="numbers of hTasks")
    parser.add_argument(
        "--mbytes-per-s", type=float, nargs="+", default=[400, 200, 100, 50, 25], help="bandwidths of the link"
    )
    parser.add_argument("--latency-ms", type=float, default=0.2, help="latency of the link")
    parser.add_argument("--layers", type=int, default=3, help="layers of the backbone")
    parser.add_argument("--rounds", type=int, default=9, help="steps that are timed of each way")
    parser.add_argument("--netns", action="store_true", help="a slowed veth pair instead of injected delays")
    parser.add_argument("--write", action="store_true", help="write the JSON into benchmarks/results/")
    parser.add_argument("--image", action="store_true", help="draw one step into benchmarks/results/")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--found", help=argparse.SUPPRESS)
    return parser.parse_args()


def vars_of(spec: ModelSpec) -> dict[str, Any]:
    """Return the attributes of a specification, which has slots and no `__dict__`."""
    return {name: getattr(spec, name) for name in spec.__slots__}


def work(options: argparse.Namespace) -> None:
    """Be one of the shards."""
    from benchmarks.processes.overlap_worker import AT_ONCE, Speed, Worker

    worker = Worker(options.worker, options.layers, f"tcp://{options.address}")
    speeds = [Speed(options.latency_ms / 1e3, rate * MB) for rate in options.mbytes_per_s]
    rows = worker.measure([AT_ONCE] if options.netns else speeds, options.htasks, options.rounds)
    timeline = worker.timeline(AT_ONCE if options.netns else speeds[len(speeds) // 2], 2)
    if options.worker == 0:
        found = {"rows": [row.to_dict() for row in rows], "timeline": timeline}
        Path(options.found).write_text(json.dumps(found))


def run(options: argparse.Namespace, found: Path) -> Path:
    """Run both shards; return where rank 0 left what was found."""
    if options.netns:
        from benchmarks.processes.overlap_netns import slow_pair

        with slow_pair(options.latency_ms, options.mbytes_per_s[0]) as sides:
            start(options, found, f"{sides[0].address}:29511", [side.command for side in sides], sides[0].interface)
    else:
        with socket.socket() as one:
            one.bind(("127.0.0.1", 0))
            port = one.getsockname()[1]
        start(options, found, f"127.0.0.1:{port}", [[], []], None)
    return found


def start(
    options: argparse.Namespace, found: Path, address: str, prefixes: Sequence[list[str]], interface: str | None
) -> None:
    """Start both shards and wait for them; `prefixes` are put before their commands."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    if interface is not None:
        environment["GLOO_SOCKET_IFNAME"] = interface
    own = [argument for argument in sys.argv[1:] if argument not in ("--write", "--image")]
    workers = []
    for rank, prefix in enumerate(prefixes):
        command = [*prefix, sys.executable, "-m", "benchmarks.processes.overlap", *own]
        command += ["--worker", str(rank), "--address", address, "--found", str(found)]
        workers.append((command, environment))
    run_workers(workers)


def print_table(rows: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    """Print a line for each link and number of hTasks."""
    print(f"\nLlama, {options.layers} layers, two shards, one thread each; a step: forward and backward of all hTasks")
    print(f"{'':24} | {'milliseconds of a step':^22} | {'times as fast in turns':^24} | {'planned / measured':^18}")
    print(
        f"{'hTasks':>6} {'link':>10} {'sums':>6} | {'one by one':>12} {'in turns':>9} | {'least':>8} {'median':>7}"
        f" {'planned':>7} | {'one by one':>10} {'turns':>7}"
    )
    for row in rows:
        by_one_s, in_turns_s = min(row["one_by_one_s"]), min(row["in_turns_s"])
        planned = row["planned_one_by_one_s"] / row["planned_in_turns_s"]
        link = "veth" if options.netns else f"{row['bytes_per_s'] / MB:.0f} MB/s"
        print(
            f"{row['num_htasks']:>6} {link:>10} {row['communication_share']:>6.0%}"
            f" | {by_one_s * 1e3:>12.0f} {in_turns_s * 1e3:>9.0f}"
            f" | {by_one_s / in_turns_s:>7.2f}x {row['ratio']:>6.2f}x {planned:>6.2f}x"
            f" | {row['planned_one_by_one_s'] / by_one_s:>10.2f} {row['planned_in_turns_s'] / in_turns_s:>7.2f}"
        )
    print("sums: their share of the planned time of one by one. Times are the least of the rounds; turns are so much")
    print("faster by these, by the median of all rounds' own ratios, and planned.")
    print(PAPER)


if __name__ == "__main__":
    main()
