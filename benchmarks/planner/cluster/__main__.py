"""Replays a trace of fine-tuning tasks on a simulated cluster: throughput next to M Figure 21(b), waiting, completion.

python -m benchmarks.planner.cluster                  a week, 128 A40; 5 to 9 minutes, one thread
python -m benchmarks.planner.cluster --quick          a day, 32 GPUs; about half a minute
python -m benchmarks.planner.cluster --write          also results/cluster-<device>.json and .png

Three parts: Uniform and Non-uniform with all tasks of the trace, which offers many times what the cluster can do, so
that throughput is what an instance full of tasks does; and a lighter load, every n-th task of the trace, run until all
have ended, where waiting and completion times mean something. Needs simpy; the drawing needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.paths import RESULTS, ROOT
from benchmarks.planner.cluster.instance import SYSTEMS, InstanceModel, InstanceSpec
from benchmarks.planner.cluster.plot import save_replays
from benchmarks.planner.cluster.replay import ReplaySettings, replay
from benchmarks.planner.cluster.result import Replay
from benchmarks.planner.cluster.trace import NON_UNIFORM, UNIFORM, Recipe, TracedTask, read_trace
from peft_mux.scheduler.costs.hardware import parse_devices
from peft_mux.scheduler.costs.loads import ModelShape

DATA = ROOT.parent / "shared" / "data" / "traces"
TRACE = "trace_muxtune_week_adapted.csv"
LLAMA_7B = ModelShape(32, 4096, 11008, 4096, 4096, 32000, 2 * 6_738_415_616, 2)
DAY_S = 86400.0

CASES: tuple[tuple[str, Recipe], ...] = (("Uniform", UNIFORM), ("Non-uniform", NON_UNIFORM))
"""Of Figure 21(b)."""

PAPER = {
    ("Uniform", "hf-peft"): 1.61,
    ("Uniform", "nemo"): 1.51,
    ("Uniform", "sl-peft"): 1.36,
    ("Non-uniform", "sl-peft"): 1.58,
}
"""Throughput of MuxTune over each baseline, M §5.4."""

WHY = {
    ("Uniform", "hf-peft"): "eager operators are counted here, not measured; M's HF-PEFT may run another parallelism",
    (
        "Uniform",
        "nemo",
    ): "one task at its best C has few bubbles to fill (--micro-batches 4 shows more of them), and the "
    "profile's products are saturated by a few hundred tokens, so that sharing saves little else; M sets C by hand",
    ("Uniform", "sl-peft"): "tasks of one dataset need no padding, and SL-PEFT's own kernels are not modelled: what is "
    "left is bubbles, and room for fewer passes in flight, which grow with fewer micro-batches",
    (
        "Non-uniform",
        "sl-peft",
    ): "a batch of up to 8 tasks nearly always holds one of the longest dataset and is padded to "
    "it; M does not state its mix of datasets",
}
"""Where a difference from the paper comes from."""


def run_case(tasks: Sequence[TracedTask], spec: InstanceSpec, settings: ReplaySettings) -> tuple[list[Replay], float]:
    """Replay all systems on the same tasks; return that and the seconds that it took."""
    started = time.perf_counter()
    reference = InstanceModel("nemo", spec)
    replays = [replay(tasks, InstanceModel(system, spec), reference, settings) for system in SYSTEMS]
    return replays, time.perf_counter() - started


def print_case(name: str, replays: Sequence[Replay]) -> None:
    """Print the figures of one case."""
    print(f"\n{name}: {len(replays[0].records):,} tasks submitted")
    print(
        f"  {'system':<9} {'tokens/s':>10} {'computed':>10} {'muxtune /':>9} {'ended':>7} {'rejected':>8} "
        f"{'wait min':>9} {'done min':>9} {'p50':>8} {'p99':>8} {'GPUs held':>9} {'busy':>6}"
    )
    best = replays[-1].tokens_per_s
    for one in replays:
        figures = one.summary()
        waiting, done = figures["waiting_minutes"] or {}, figures["completion_minutes"] or {}
        print(
            f"  {one.system:<9} {one.tokens_per_s:>10,.0f} {figures['computed_tokens_per_s']:>10,.0f} "
            f"{best / one.tokens_per_s:>9.2f} {figures['ended']:>7,} {one.num_rejected:>8,} "
            f"{waiting.get('mean', math.nan):>9,.0f} {done.get('mean', math.nan):>9,.0f} "
            f"{done.get('p50', math.nan):>8,.0f} {done.get('p99', math.nan):>8,.0f} {one.allocation:>9.1%} "
            f"{one.utilization:>6.1%}"
        )


def compared(name: str, replays: Sequence[Replay]) -> list[dict[str, Any]]:
    """Return our ratios of throughput next to the paper's."""
    best = replays[-1].tokens_per_s
    return [
        {
            "case": name,
            "over": one.system,
            "paper": PAPER.get((name, one.system)),
            "ours": best / one.tokens_per_s,
            "why": WHY.get((name, one.system), "M gives no figure"),
        }
        for one in replays[:-1]
    ]


def print_comparison(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table of ratios."""
    print("\nthroughput of MuxTune's planner over                 paper   ours   the difference")
    for row in rows:
        paper = f"{row['paper']:.2f}x" if row["paper"] else "-"
        print(f"  {row['case']:<12} {row['over']:<36} {paper:>6} {row['ours']:>5.2f}x   {row['why']}")


def settings_of(arguments: argparse.Namespace) -> tuple[InstanceSpec, ReplaySettings, float]:
    """Return what instances are made of, how the full trace is replayed, and when it stops."""
    num_gpus = 32 if arguments.quick else arguments.gpus
    horizon_s = DAY_S * (1 if arguments.quick else arguments.days)
    devices = parse_devices(f"{arguments.gpus_per_instance}x{arguments.device}")
    spec = InstanceSpec(devices, LLAMA_7B, arguments.max_tasks, tuple(arguments.micro_batches))
    settings = ReplaySettings(num_gpus, arguments.placement, horizon_s, arguments.queue_limit)
    return spec, settings, horizon_s


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run everything, print it, and return it as JSON types."""
    spec, settings, horizon_s = settings_of(arguments)
    path = arguments.data / TRACE
    rows: list[dict[str, Any]] = []
    parts: dict[str, list[Replay]] = {}
    for name, recipe in CASES:
        tasks = read_trace(path, recipe, until_s=horizon_s)
        parts[name], wall_s = run_case(tasks, spec, settings)
        if not rows:
            print_assumptions(parts[name], path, (UNIFORM, NON_UNIFORM))
        print_case(name, parts[name])
        print(f"  replayed in {wall_s:.0f} s")
        rows += compared(name, parts[name])
    # Durations are those of NeMo, alone on an instance: their sum over the instances' time is its offered load.
    load = sum(task.duration_s for task in tasks) / horizon_s / (settings.num_gpus // spec.devices.num_devices)
    every = arguments.every or max(1, math.floor(load))
    lighter = read_trace(path, NON_UNIFORM, every=every, until_s=horizon_s)
    name = f"Non-uniform, every {every}th task, until all have ended"
    parts[name], wall_s = run_case(lighter, spec, ReplaySettings(settings.num_gpus, arguments.placement))
    print_case(name, parts[name])
    print(
        "  Throughput of this part ends with the longest task, so that it says more of the trace than of the systems."
    )
    print(f"  replayed in {wall_s:.0f} s; the whole trace offers {load:.1f} times what NeMo does on this cluster")
    print_comparison(rows)
    result = {
        "device": arguments.device,
        "num_gpus": settings.num_gpus,
        "horizon_s": horizon_s,
        "trace": TRACE,
        "load_of_the_whole_trace": load,
        "assumptions": {one.system: list(one.assumptions) for one in parts[name]},
        "comparison": rows,
        "cases": {name: [one.summary() for one in replays] for name, replays in parts.items()},
    }
    if arguments.write:
        write(result, parts, arguments)
    return result


def print_assumptions(replays: Sequence[Replay], path: Path, recipes: Sequence[Recipe]) -> None:
    """Print the assumptions."""
    print(f"Trace {path.name}; Llama 7B shapes, 16-bit, LoRA on the four projections of attention.")
    for sentence in replays[-1].assumptions:
        print(f"* {sentence}")
    for recipe in recipes:
        print(
            f"* Drawn with equal chances (seed {recipe.seed}): dataset {' / '.join(recipe.datasets)}, batch "
            f"{' / '.join(map(str, recipe.batch_sizes))}, rank {' / '.join(map(str, recipe.ranks))}."
        )
    print("* hf-peft and nemo hold one task an instance; hf-peft runs eager operators, counted by hand, and GPipe.")
    print("* sl-peft pads all tasks of an instance to the longest; every system takes its fastest C.")


def write(result: dict[str, Any], parts: dict[str, list[Replay]], arguments: argparse.Namespace) -> None:
    """Write the JSON file and the drawing."""
    arguments.results.mkdir(parents=True, exist_ok=True)
    stem = f"cluster-{arguments.device.lower()}{'-quick' if arguments.quick else ''}"
    target = arguments.results / f"{stem}.json"
    target.write_text(json.dumps(result, indent=1) + "\n")
    picture = save_replays(parts, arguments.results / f"{stem}.png")
    print(f"\nwrote {target.name} and {picture.name} into {arguments.results.name}/")


def parser() -> argparse.ArgumentParser:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DATA, help="folder with the trace")
    parser.add_argument("--device", default="A40", help="data sheet of one GPU: A40, A100-80GB, H200, ...")
    parser.add_argument("--gpus", type=int, default=128)
    parser.add_argument("--gpus-per-instance", type=int, default=4)
    parser.add_argument("--max-tasks", type=int, default=8, help="tasks that share an instance")
    parser.add_argument("--micro-batches", type=int, nargs="+", default=[4, 8, 16], help="C to choose from")
    parser.add_argument("--days", type=float, default=7.0)
    parser.add_argument("--queue-limit", type=int, default=256, help="tasks that may wait under the full load")
    parser.add_argument(
        "--every", type=int, help="n of the lighter load; default: so that NeMo is offered a little more than it can do"
    )
    parser.add_argument("--placement", choices=("spread", "fill"), default="spread")
    parser.add_argument("--quick", action="store_true", help="a day, 32 GPUs")
    parser.add_argument("--write", action="store_true", help="write JSON and PNG")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder for --write")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    arguments = parser().parse_args(argv)
    if not (arguments.data / TRACE).is_file():
        print(
            f"{TRACE} is not in {arguments.data}. It is a CSV file with the columns submit_s and duration_s (seconds). "
            "To make one, take the Microsoft ITP traces (github.com/microsoft/elasticflow-traces, MIT) or any trace of "
            "jobs, set the clock of a week to 0, and name its folder with --data."
        )
        return 2
    run(arguments)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
