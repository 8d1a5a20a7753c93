"""Replays a trace of fine-tuning tasks on a simulated cluster: throughput next to M Figure 21(b).

    python -m benchmarks.planner.cluster                  a week, 128 A40; 5 to 9 minutes, one thread
    python -m benchmarks.planner.cluster --quick          a day, 32 GPUs; about half a minute
    python -m benchmarks.planner.cluster --write          also results/cluster-<device>.json and docs/paper_tables.md

The trace offers many times what the cluster can do, so that throughput is what an instance full of tasks does. Step
times come from the analytic profile of the data sheet. Llama 7B shapes, 16-bit, LoRA on the four projections of
attention. hf-peft and nemo hold one task an instance; hf-peft runs eager operators, counted by hand, and GPipe. sl-peft
pads all tasks of an instance to the longest; every system takes its fastest number of micro-batches.

Where differences from the paper come from. hf-peft: eager operators are counted here, not measured; M's HF-PEFT may run
another parallelism. nemo: one task at its best C has few bubbles to fill (--micro-batches 4 shows more), and the
profile's products are saturated by a few hundred tokens, so that sharing saves little else; M sets C by hand. sl-peft,
Uniform: tasks of one dataset need no padding, and SL-PEFT's own kernels are not modelled: what is left is bubbles.
Non-uniform: a batch of up to 8 tasks nearly always holds one of the longest dataset, and is padded to it; M does not
state its mix of datasets.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness import Table
from benchmarks.papers.simulated import write_table
from benchmarks.paths import SHARED_DATA
from benchmarks.planner.cluster.instance import SYSTEMS, InstanceModel, InstanceSpec
from benchmarks.planner.cluster.replay import Replay, replay
from benchmarks.planner.cluster.trace import CASES, read_trace
from benchmarks.planner.figures_bench import LLAMA_7B
from benchmarks.stored import write_result
from peft_mux.scheduler.costs.hardware import parse_devices

TRACE = "trace_muxtune_week_adapted.csv"
DAY_S = 86400.0
PAPER = {
    ("Uniform", "hf-peft"): 1.61,
    ("Uniform", "nemo"): 1.51,
    ("Uniform", "sl-peft"): 1.36,
    ("Non-uniform", "sl-peft"): 1.58,
}
"""Throughput of MuxTune over each baseline, M §5.4."""


def run_case(name: str, spec: InstanceSpec, options: argparse.Namespace) -> list[Replay]:
    """Replay all systems on the same tasks, and print a line of each."""
    tasks = read_trace(options.data / TRACE, CASES[name], DAY_S * options.days)
    start_s = time.perf_counter()
    reference = InstanceModel("nemo", spec)
    rules = {"horizon_s": DAY_S * options.days, "queue_limit": options.queue_limit}
    num_instances = options.gpus // options.gpus_per_instance
    replays = [replay(tasks, InstanceModel(system, spec), reference, num_instances, **rules) for system in SYSTEMS]
    print(f"\n{name}: {len(tasks):,} tasks submitted, replayed in {time.perf_counter() - start_s:.0f} s")
    table = Table(
        "system:<9",
        "tokens/s:>10,.0f",
        "computed:>10,.0f",
        "muxtune /:>9.2f",
        "ended:>7,",
        "rejected:>8,",
        "busy:>6.1%",
    )
    for result in replays:
        computed = result.computed_tokens / result.elapsed_s
        ended = sum(end_s is not None for end_s in result.end_s)
        ratio, busy = replays[-1].tokens_per_s / result.tokens_per_s, result.busy_s / result.elapsed_s / num_instances
        table.row(result.system, result.tokens_per_s, computed, ratio, ended, result.num_rejected, busy)
    return replays


def main(arguments: Sequence[str] | None = None) -> int:
    """Run both cases, print how they compare, and write what is asked for."""
    options = _parser().parse_args(arguments)
    if not (options.data / TRACE).is_file():
        print(
            f"{TRACE} is not in {options.data}. It is a CSV file with the columns submit_s and duration_s (seconds). "
            "To make one, take the Microsoft ITP traces (github.com/microsoft/elasticflow-traces, MIT) or any trace of "
            "jobs, set the clock of a week to 0, and name its folder with --data."
        )
        return 2
    if options.quick:
        options.gpus, options.days = 32, 1.0
    devices = parse_devices(f"{options.gpus_per_instance}x{options.device}")
    spec = InstanceSpec(devices, LLAMA_7B, options.max_tasks, tuple(options.micro_batches))
    rows = []
    for name in CASES:
        *others, best = run_case(name, spec, options)
        for other in others:
            ratio = best.tokens_per_s / other.tokens_per_s
            rows.append({"case": name, "over": other.system, "paper": PAPER.get((name, other.system)), "ours": ratio})
    print("\nthroughput of MuxTune's planner")
    table = Table("tasks:<12", "over:<9", "paper:>6.2f", "ours:>6.2f")
    for row in rows:
        table.row(row["case"], row["over"], row["paper"] or "-", row["ours"])
    print(f"\n{__doc__}")
    if options.write:
        stem = f"cluster-{options.device.lower()}{'-quick' if options.quick else ''}"
        settings = {"gpus": options.gpus, "days": options.days, "trace": TRACE}
        write_result(stem, {"settings": settings, "comparison": rows}, options.results)
        if not options.quick:
            lines = [("21(a)", "scaling up, and up then out", "1.61x and 1.28x over NeMo", "not simulated")]
            lines += [
                ("21(b)", f"{row['case']}: over {row['over']}", f"{row['paper'] or '-'}{'x' * bool(row['paper'])}",
                 f"{row['ours']:.2f}x")
                for row in rows
            ]  # fmt: skip
            write_table("benchmarks.planner.cluster", lines)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--data", type=Path, default=SHARED_DATA / "traces", help="folder with the trace")
    add("--device", default="A40", help="data sheet of one GPU: A40, A100-80GB, H200, ...")
    add("--gpus", type=int, default=128)
    add("--gpus-per-instance", type=int, default=4)
    add("--max-tasks", type=int, default=8, help="tasks that share an instance")
    add("--micro-batches", type=int, nargs="+", default=[4, 8, 16], help="C to choose from")
    add("--days", type=float, default=7.0)
    add("--queue-limit", type=int, default=256, help="tasks that may wait")
    add("--quick", action="store_true", help="a day, 32 GPUs")
    add("--write", action="store_true", help="write the JSON, and the table of the documentation")
    add("--results", type=Path, help="folder for the JSON")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
