"""Pipeline orchestration over tasks, executed: M's template against one task after another (MuxTune 3.4.1, 5.3).

    python -m benchmarks.processes.pipeline            two processes, one thread each; at most 6 minutes on 2 idle cores
    python -m benchmarks.processes.pipeline --write --image  also into benchmarks/results/

Two stages of a Llama of random weights, in two processes over gloo, train four tasks with equal adapters. Each task
has C micro-batches of T tokens a step and is a bucket of its own, so that all schedules do the same work in another
order:

    mux       the planner's multi-task template over all tasks
    drained   1F1B task by task, the pipeline of each empty before the next begins: one task after another
    1f1b      1F1B over the micro-batches of all tasks, not drained in between
    gpipe     all forwards, then all backwards

Every round takes one step under each schedule, by turns first and last, and measures each stage's latencies next to
them, in both processes at the same time; so what they take from one another is in both. Times are medians over rounds:
`passes` are forward and backward of all tasks, `steps` have the sums of norms and the updates too. `planned` comes from
the simulator over the measured latencies and the measured link; it is off by planned / measured - 1. `least` compares
the fastest steps, which on a machine that others use as well say more than medians.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.paths import RESULTS
from benchmarks.processes.workers import run_ranks
from benchmarks.training.report import hardware, host_kind, versions
from benchmarks.training.workloads import ModelSpec

PAPER = (
    "MuxTune section 5.3, Figure 19(b), over NeMo: 1.24, 1.35, 1.36 times as fast with more and more tasks;"
    " 1.59 times with 4 micro-batches"
)
NUM_PROCESSES = 2
_DIRECTIONS = ("forward", "backward")
GOAL = 0.15
"""Greatest relative error of a planned time that the planner aims at."""


def main() -> None:
    options = _parser().parse_args()
    if options.worker is not None:
        _work(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "found.json"
        run_ranks("benchmarks.processes.pipeline", NUM_PROCESSES, path, kept_here=("--write", "--image"))
        found = json.loads(path.read_text(encoding="utf-8"))
    print_tables(found, options)
    name = f"parallel-{host_kind()}"
    if options.write:
        path = RESULTS / f"{name}.json"
        path.write_text(json.dumps(_contents(found, options), indent=1) + "\n", encoding="utf-8")
        print(f"wrote {path}")
    if options.image:
        from benchmarks.processes.pipeline_plot import plot

        path = RESULTS / f"{name}.png"
        plot(path, found["timelines"], options.drawn)
        print(f"wrote {path}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--micro-batches", type=int, nargs="+", default=[1, 2, 4, 8], help="numbers of micro-batches of each task, C"
    )
    parser.add_argument("--tasks", type=int, default=4, help="number of tasks")
    parser.add_argument("--tokens", type=int, default=64, help="tokens of a micro-batch, T; a multiple of 32")
    parser.add_argument("--rounds", type=int, default=5, help="steps that are timed under each schedule")
    parser.add_argument("--layers", type=int, default=ModelSpec().num_layers, help="layers of the backbone")
    parser.add_argument("--drawn", type=int, default=2, help="number of micro-batches whose timelines --image draws")
    parser.add_argument("--write", action="store_true", help="write the JSON into benchmarks/results/")
    parser.add_argument("--image", action="store_true", help="draw the timelines into benchmarks/results/")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--found", help=argparse.SUPPRESS)
    return parser


def _work(options: argparse.Namespace) -> None:
    """Be one of the stages."""
    from benchmarks.processes.pipeline_worker import Settings, Worker

    settings = Settings(
        model=ModelSpec(num_layers=options.layers),
        num_tasks=options.tasks,
        num_tokens=options.tokens,
        micro_batches=tuple(options.micro_batches),
        rounds=options.rounds,
        drawn=options.drawn if options.drawn in options.micro_batches else options.micro_batches[-1],
    )
    found = Worker(options.worker, settings).measure()
    if options.worker == 0:
        Path(options.found).write_text(json.dumps(found), encoding="utf-8")


def figures(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return medians of each row, how much faster it is than task by task, and how far the plan was off.

    Args:
        rows: what was measured under each schedule with each number of micro-batches.

    Returns:
        For each row `faster_passes` and `faster_steps` (medians over rounds of task by task over this one, both of one
        round), `least_passes` and `least_steps` (the same of the fastest rounds), `planned_faster`, and the signed
        errors `passes_off` and `steps_off`.
    """
    base = {row["num_micro_batches"]: row for row in rows if row["schedule"] == "drained"}
    return [_figures_of(row, base[row["num_micro_batches"]]) for row in rows]


def _figures_of(row: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {"schedule": row["schedule"], "num_micro_batches": row["num_micro_batches"]}
    for kind in ("passes", "steps"):
        measured_s = statistics.median(row[f"{kind}_s"])
        ratios = [other / own for own, other in zip(row[f"{kind}_s"], base[f"{kind}_s"], strict=True)]
        found[f"{kind}_s"] = measured_s
        found[f"faster_{kind}"] = statistics.median(ratios)
        found[f"least_{kind}"] = min(base[f"{kind}_s"]) / min(row[f"{kind}_s"])
        found[f"{kind}_off"] = row[f"planned_{kind}_s"] / measured_s - 1.0
    return {**found, "planned_faster": base["planned_passes_s"] / row["planned_passes_s"]}


def print_tables(found: Mapping[str, Any], options: argparse.Namespace) -> None:
    """Print times and ratios, then what they are made of, then bytes.

    Raises:
        SystemExit: if bytes differ from the closed form.
    """
    print(
        f"\nLlama, {options.layers} layers, two stages, one thread each; {options.tasks} tasks, T = {options.tokens};"
        f" {options.rounds} rounds"
    )
    _print_times(found["rows"], options.tasks * options.tokens)
    for count, profile in found["profile"].items():
        kinds = [" + ".join(f"{one * 1e3:.0f}" for one in profile["loads"][0][f"{kind}_s"]) for kind in _DIRECTIONS]
        print(f"C = {count}: a micro-batch of the first task takes {kinds[0]} ms forward, {kinds[1]} ms backward")
    link = found["link"]
    print(f"link: {link['latency_s'] * 1e6:.0f} us and {link['bytes_per_s'] / 1e6:.0f} MB/s")
    _print_bytes(found["rows"])


def _print_times(rows: Sequence[Mapping[str, Any]], num_tokens: int) -> None:
    """Print a line for each schedule.

    Args:
        rows: what was measured under each schedule with each number of micro-batches.
        num_tokens: number of tokens of one micro-batch of every task together.
    """
    print(
        f"{'':12} | {'milliseconds':^17} | {'tokens/s':>8} | {'times as fast as drained':^31} |"
        f" {'planned is off':^16} | in flight"
    )
    print(
        f"{'C':>3} {'':8} | {'passes':>8} {'steps':>8} | {'steps':>8} |"
        f" {'passes':>7} {'steps':>7} {'least':>6} {'planned':>8} | {'passes':>7} {'steps':>8} |"
    )
    found = figures(rows)
    for row, one in zip(rows, found, strict=True):
        count, steps_s = one["num_micro_batches"], one["steps_s"]
        print(
            f"{count:>3} {one['schedule']:8} | {one['passes_s'] * 1e3:>8.0f} {steps_s * 1e3:>8.0f}"
            f" | {num_tokens * count / steps_s:>8.0f} | {one['faster_passes']:>6.2f}x {one['faster_steps']:>6.2f}x"
            f" {one['least_steps']:>5.2f}x {one['planned_faster']:>7.2f}x"
            f" | {one['passes_off']:>+7.0%} {one['steps_off']:>+8.0%} | {' '.join(map(str, row['most_in_flight']))}"
        )
    offs = [abs(one["steps_off"]) for one in found]
    print(f"planned steps are off by {statistics.mean(offs):.0%} on average, {max(offs):.0%} at most; goal {GOAL:.0%}")
    print(PAPER)


def _print_bytes(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print what each stage sent in a step, next to the closed form."""
    for row in rows:
        if row["schedule"] == "mux":
            print(
                f"C = {row['num_micro_batches']}: bytes of a step by stage: hidden states and their gradients"
                f" {row['sent_bytes']}, closed form {row['closed_form_bytes']} each; losses and norms"
                f" {row['summed_bytes']}, closed form {row['closed_form_summed_bytes']}"
            )
    odd = [row for row in rows if not _as_closed_form(row)]
    if odd:
        names = ", ".join(f"{row['schedule']} with C = {row['num_micro_batches']}" for row in odd)
        raise SystemExit(f"{names}: bytes differ from the closed form. See sent_bytes of the rows.")


def _as_closed_form(row: Mapping[str, Any]) -> bool:
    is_sent = all(sent == row["closed_form_bytes"] for sent in row["sent_bytes"])
    return is_sent and row["summed_bytes"] == row["closed_form_summed_bytes"]


def _contents(found: Mapping[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Return what goes into the JSON file."""
    settings = {name: getattr(options, name) for name in ("micro_batches", "tasks", "tokens", "rounds")}
    return {
        "finished": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "paper": PAPER,
        "hardware": hardware(),
        "versions": versions(),
        "settings": {**settings, "model": asdict(ModelSpec(num_layers=options.layers))},
        "link": found["link"],
        "figures": figures(found["rows"]),
        "rows": found["rows"],
        "profile": found["profile"],
    }


if __name__ == "__main__":
    main()
