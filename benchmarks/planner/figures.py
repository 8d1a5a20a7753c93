"""The planner's figures next to those of M, Figures 9, 14 to 17, 19(b) and 20: by simulation with an analytic profile.

python -m benchmarks.planner.figures             about 10 seconds, one thread
python -m benchmarks.planner.figures --write     also benchmarks/results/planner-figures.json

No number is fitted to the paper. From data sheets: peak arithmetic, memory bandwidth and memory of an A40, bandwidth of
PCIe 4.0 x16. From the model cards: the shapes of Table 1; tasks of Figures 17 and 20 are those of Table 2.
Assumed in `peft_mux.scheduler.costs.profile` and `hardware`: which part of the peaks kernels reach, launches and bytes
of a layer. Workloads that M gives only as pictures (numbers of tasks and batches in Figures 14, 15, 16 and 19, "light"
and "heavy") are chosen here and printed.
"""

from __future__ import annotations

import argparse
import inspect
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.harness import Table
from benchmarks.papers.simulated import write_table
from benchmarks.planner.cluster.instance import SYSTEMS, InstanceModel, InstanceSpec
from benchmarks.planner.cluster.trace import TaskKind
from benchmarks.planner.figures_bench import (
    GPT_2_7B,
    LLAMA_7B,
    QA,
    RANK,
    RTE,
    SST2,
    TABLE_1,
    WORKLOADS,
    Bench,
    Row,
    tokens_of,
)
from benchmarks.stored import write_result
from peft_mux.scheduler.costs.hardware import DEVICES, parse_devices
from peft_mux.scheduler.costs.latency import whole_pass
from peft_mux.scheduler.costs.loads import TaskLoad
from peft_mux.scheduler.pipeline.simulator import simulate
from peft_mux.scheduler.pipeline.template import build_template

STAGES = 4


# ------------------------------------------------------------------- Figure 9


def figure_9(device: str) -> list[Row]:
    """Spatial against temporal multiplexing of two tasks, and what batching brings one GPU.

    9(a): M's picture has no numbers in the text; where the sign turns depends on how many tokens saturate products,
    which the roofline puts at the point where arithmetic takes as long as reading weights. 9(b): 1,024 tokens saturate
    the roofline's products; real products of 1,024 rows reach a smaller part of the peak than larger ones, and launches
    that the GPU waits for are not modelled.
    """
    shape = replace(LLAMA_7B, num_layers=16, backbone_bytes=LLAMA_7B.backbone_bytes // 2)
    bench = Bench(shape, STAGES, device)
    rows = []
    for size in (1, 2, 4, 8, 16, 32):
        loads = bench.tasks((SST2, SST2), 4 * size)
        spatial_s = bench.makespan_s([bench.bucket(loads, 4)], "1f1b")
        temporal_s = bench.makespan_s([bench.bucket([load], 4, load.name) for load in loads], "mux")
        rows.append(
            Row(
                "9(a)",
                f"2 tasks, micro-batch {size} x 64: temporal time / spatial time",
                "> 1, then < 1",
                temporal_s / spatial_s,
                "x",
            )
        )
    one_gpu = Bench(replace(LLAMA_7B, num_layers=8, backbone_bytes=LLAMA_7B.backbone_bytes // 4), 1, device)
    alone_s, batched_s = (
        float(one_gpu.cost.passes_s(loads, [whole_pass(loads)]).sum())
        for loads in (one_gpu.tasks((QA,), 8), one_gpu.tasks((QA,), 64))
    )
    rows.append(
        Row(
            "9(b)",
            "8 tasks of 8 x 128 in one batch / one, 1 GPU, 8 layers: throughput",
            "1.12x",
            8 * alone_s / batched_s,
            "x",
        )
    )
    return rows


# ----------------------------------------------------------- Figures 14 and 15


def figure_14(device: str) -> list[Row]:
    """End to end against the baselines, on the backbones and numbers of GPUs of Table 1.

    Pipelines of all GPUs stand for M's tensor and hybrid parallelism, numbers of tasks and batches are those of a
    picture, eager operators are counted, and the roofline's products are saturated by a few hundred tokens.
    """
    paper = {"hf-peft": ("up to 2.33x", "2.23x"), "nemo": ("up to 1.87x", "1.83x"), "sl-peft": ("up to 1.64x", "1.85x")}
    return _end_to_end("14", device, 16, paper)


def figure_15(device: str) -> list[Row]:
    """The same as Figure 14 on a node of eight H100."""
    return _end_to_end("15", "H100-80GB", 8, {"nemo": ("5.29x", "3.69x"), "sl-peft": ("2.31x", "1.94x")})


def _end_to_end(figure: str, device: str, most_gpus: int, paper: dict[str, tuple[str, str]]) -> list[Row]:
    rows = []
    for model, shape, num_gpus in TABLE_1:
        if num_gpus > most_gpus:
            continue
        spec = InstanceSpec(parse_devices(f"1x{num_gpus}x{device}"), shape)
        systems = {name: InstanceModel(name, spec) for name in SYSTEMS if name in ("muxtune", *paper)}
        for mix, lengths in enumerate(((QA,), (SST2, QA, RTE))):
            for batch_size in (8, 32):
                kinds = [TaskKind(lengths[number % len(lengths)], batch_size, RANK) for number in range(8)]
                # Systems that do not share a backbone run one task after another.
                step_s = {
                    name: system.speed(kinds).step_s
                    if system.max_tasks > 1
                    else sum(system.speed([kind]).step_s for kind in kinds)
                    for name, system in systems.items()
                }
                what = f"{model}, {num_gpus} GPUs, 8 tasks of {batch_size} x {'/'.join(map(str, lengths))}"
                for name, published in paper.items():
                    ratio = step_s[name] / step_s["muxtune"]
                    rows.append(Row(figure, f"{what}: over {name}", published[mix], ratio, "x"))
    return rows


# ------------------------------------------------------------------ Figure 16


def figure_16(device: str) -> list[Row]:
    """What each component is worth, light and heavy.

    Fusion: the roofline's products are saturated from the tokens on with which arithmetic takes as long as reading
    weights; beyond, fusion saves little but launches and adapters; real products are slow up to more tokens. A gain
    means that fusion by Eq. 6, an estimate, made too large hTasks. Orchestration: only bubbles of pipelines are filled,
    as a pipeline of one GPU a stage has no collectives to overlap; M's figure holds both where its stages communicate.
    Alignment follows from the mix of lengths alone: padding to the longest of all tasks; M's mix is not in the text.
    Within hTasks each is padded to its own longest task: fusion sorts by tokens and so puts like lengths together.
    """
    cases = (
        ("light", (SST2, QA, RTE, QA), 4, 4, ("-36.1%", "-30.3%", "-22.5%")),
        ("heavy", (SST2, QA, RTE, QA, SST2, QA, RTE, QA), 128, 16, ("-6.25%", "-25.1%", "-34.3%")),
    )
    rows = []
    for name, lengths, batch_size, count, paper in cases:
        bench = Bench(LLAMA_7B, STAGES, device)
        loads = bench.tasks(lengths, batch_size)
        whole_s = bench.plan(loads, count, "mux").step_s
        what = f"{name}: {len(loads)} tasks, {count} micro-batches of {batch_size // count} x 64/128/256"
        unfused_s = bench.plan(loads, count, "interleaved").step_s
        padded_s, padded_htasks_s = _padded_s(bench, loads, count)
        for label, seconds, published in (
            ("without task fusion", unfused_s, paper[0]),
            ("without operator orchestration", _in_turn_s(bench, loads, count), paper[1]),
            ("without alignment, all padded", padded_s, paper[2]),
            ("without alignment, padded within hTasks", padded_htasks_s, paper[2]),
        ):
            rows.append(Row("16", f"{what}, {label}", published, 100 * (whole_s / seconds - 1), "%"))
    return rows


def _in_turn_s(bench: Bench, loads: Sequence[TaskLoad], count: int) -> float:
    """Return the least time with hTasks one after another, each drained: fused as planned, or all in one."""
    by_name = {load.name: load for load in loads}
    plan = bench.plan(loads, count, "mux")
    partitions = ([htask.tasks for htask in plan.htasks], [tuple(by_name)])
    extra_s = bench.cost.optimizer_s(loads) + bench.cost.profile.step_overhead_s
    return extra_s + min(
        sum(bench.makespan_s([bench.bucket([by_name[name] for name in names], count)], "1f1b") for names in partition)
        for partition in partitions
    )


def _padded_s(bench: Bench, loads: Sequence[TaskLoad], count: int) -> tuple[float, float]:
    """Return times with zero padding to the longest of all tasks (planned again), and of each hTask as planned."""
    longest = max(load.longest for load in loads)
    all_s = bench.plan([_padded(load, longest) for load in loads], count, "mux").step_s
    by_name = {load.name: load for load in loads}
    buckets = []
    for htask in bench.plan(loads, count, "mux").htasks:
        members = [by_name[name] for name in htask.tasks]
        longest = max(load.longest for load in members)
        buckets.append(bench.bucket([_padded(load, longest) for load in members], count, "+".join(htask.tasks)))
    makespan_s = min(bench.makespan_s(buckets, schedule) for schedule in ("mux", "1f1b"))
    return all_s, makespan_s + bench.cost.optimizer_s(loads) + bench.cost.profile.step_overhead_s


def _padded(load: TaskLoad, length: int) -> TaskLoad:
    return replace(load, lengths=(length,) * len(load.lengths), num_targets=length * len(load.lengths))


# ------------------------------------------------------------------ Figure 17


def figure_17(device: str) -> list[Row]:
    """Memory of the fullest GPU: a backbone for each task, zero padding, and ours with all or few tasks in flight.

    Eq. 5 holds the activations of all tasks at once, as eager launching does where memory allows; M measures, with
    contexts and buffers that are not modelled, and tensor parallelism in (a), for which stages of a pipeline stand.
    SL-PEFT is one batch of all tasks, padded to the longest: the ratio is padded over own tokens, less the share of
    weights. M gives no figure for 1F1B order, in which at most S tasks hold activations.
    """
    rows = []
    cases = (
        ("(a)", "GPT 2.7B, 2 GPUs", GPT_2_7B, 2, "WL-A", {15: ("4.67x", "1.44x"), 32: ("5.29x", "1.46x")}),
        ("(b)", "Llama 7B, 4 GPUs", LLAMA_7B, 4, "WL-B", {11: ("3.57x", "1.37x"), 32: ("-", "-")}),
    )
    for part, model, shape, stages, workload, paper in cases:
        bench = Bench(shape, stages, device)
        for count, (replicated, padded) in paper.items():
            tasks = (WORKLOADS[workload] * 4)[:count]
            loads = bench.workload(tasks)  # one micro-batch an iteration, as in M
            few, all_held = _peak_bytes(bench, [[load] for load in loads]), _equation_5_bytes(bench, loads)
            joint = _peak_bytes(bench, [bench.workload(tasks, padded_to=max(length for length, _ in tasks))])
            alone = sum(_peak_bytes(bench, [[load]]) for load in loads)
            what = f"{model}, {count} tasks of {workload}"
            rows += [
                Row(f"17{part}", f"{what}: a backbone each / shared, all held", replicated, alone / all_held, "x"),
                Row(f"17{part}", f"{what}: SL-PEFT / shared, all held", padded, joint / all_held, "x"),
                Row(f"17{part}", f"{what}: a backbone each / shared, 1F1B", "-", alone / few, "x"),
            ]
    return rows


def _peak_bytes(bench: Bench, groups: Sequence[Sequence[TaskLoad]]) -> int:
    """Return the peak of the fullest stage with one micro-batch for each group of tasks, launched in 1F1B order."""
    loads = [load for group in groups for load in group]
    buckets = [bench.bucket(group, 1, f"{number}") for number, group in enumerate(groups)]
    held = simulate(build_template(buckets, "1f1b"), buckets).peak_bytes
    tokens = max(tokens_of(group) for group in groups)
    return max(
        bench.memory.static_bytes(loads, stage) + held[stage] + bench.memory.workspace_bytes(tokens, stage)
        for stage in range(bench.num_stages)
    )


def _equation_5_bytes(bench: Bench, loads: Sequence[TaskLoad]) -> int:
    """Return what the fullest stage holds with the activations of one micro-batch of every task."""
    tokens = max(load.tokens for load in loads)
    return max(
        bench.memory.static_bytes(loads, stage)
        + bench.memory.activation_bytes(tokens_of(loads), stage)
        + bench.memory.workspace_bytes(tokens, stage)
        for stage in range(bench.num_stages)
    )


# --------------------------------------------------------------- Figure 19(b)


def figure_19b(device: str) -> list[Row]:
    """Interleaving alone, no fusion, against task by task, by number of tasks and of micro-batches.

    Bubbles bound it by (C + S - 1) / C; M's numbers of tasks are in a picture: its figures are compared with 2, 4, 8.
    """
    bench = Bench(LLAMA_7B, STAGES, device)
    rows = []
    paper = {(2, 8): "1.24x", (4, 8): "1.35x", (8, 8): "1.36x", (8, 4): "1.59x"}
    for count in (8, 4):
        for num_tasks in (2, 4, 8, 16):
            loads = bench.tasks([(QA, SST2, 32)[number % 3] for number in range(num_tasks)], 8 * count)
            buckets = [bench.bucket([load], count, load.name) for load in loads]
            alone_s = sum(bench.makespan_s([bucket], "1f1b") for bucket in buckets)
            joint_s = min(bench.makespan_s(buckets, schedule) for schedule in ("mux", "1f1b"))
            rows.append(
                Row(
                    "19(b)",
                    f"{num_tasks} tasks of {count} micro-batches of 8 x 128/64/32: NeMo time / interleaved time",
                    paper.get((num_tasks, count), "-"),
                    alone_s / joint_s,
                    "x",
                )
            )
    return rows


# ------------------------------------------------------------------ Figure 20


def figure_20(device: str) -> list[Row]:
    """Chunk-based alignment against zero padding of one hTask with one micro-batch.

    Packs are as long as the longest sequence, cut into longest / chunk pieces that fill the pipeline, which one padded
    micro-batch cannot. As chunks never hold more padding than zero padding does, effective gains exceed overall ones of
    any one workload; M's text has them the other way round in (b), of different numbers of tasks or swapped. Longer
    packs make more pieces.
    """
    bench = Bench(LLAMA_7B, STAGES, device)
    rows = []
    for part, workload, chunk, paper in (
        ("(a)", "WL-A", 64, ("2.33x", "3.59x")),
        ("(b)", "WL-B", 128, ("3.77x", "2.57x")),
    ):
        for num_tasks in (2, 4, 8):
            loads = bench.workload(WORKLOADS[workload][:num_tasks])
            longest = max(load.longest for load in loads)
            padded = [_padded(load, longest) for load in loads]
            chunked = [_padded(load, -(-load.longest // chunk) * chunk) for load in loads]
            padded_s = bench.makespan_s([bench.bucket(padded, 1)], "gpipe")
            # The chunks of a pack pass the pipeline one after another; backward runs from the last to the first, so
            # that all forwards come first.
            chunked_s = bench.makespan_s([bench.bucket(chunked, longest // chunk)], "gpipe")
            overall = tokens_of(chunked) / chunked_s * padded_s / tokens_of(padded)
            what = f"{num_tasks} tasks of {workload}, chunk {chunk} / zero padding"
            published = [f"up to {factor}" if num_tasks == 8 else "-" for factor in paper]
            rows += [
                Row(f"20{part}", f"{what}: throughput", published[0], overall, "x"),
                Row(f"20{part}", f"{what}: effective throughput", published[1], padded_s / chunked_s, "x"),
            ]
    return rows


FIGURES = {
    "9": figure_9,
    "14": figure_14,
    "15": figure_15,
    "16": figure_16,
    "17": figure_17,
    "19": figure_19b,
    "20": figure_20,
}


def table_lines(rows: Sequence[Row]) -> list[tuple[str, str, str, str]]:
    """Return rows for the documentation; of those that differ in the batch alone, the least and the greatest."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        what = row.what
        if row.figure in ("14", "15"):
            mix = "non-uniform" if "/" in what else "uniform"
            what = f"{what.split(', 8 tasks')[0]}, {mix}:{what.split(':')[1]}"
        groups.setdefault((row.figure, what, row.paper), []).append(row)
    lines = []
    for key, group in groups.items():
        group.sort(key=lambda row: row.ours)
        lines.append((*key, " to ".join(row.text for row in dict.fromkeys((group[0], group[-1])))))
    return lines


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="A40", choices=tuple(DEVICES), help="data sheet")
    parser.add_argument("--figures", nargs="+", default=list(FIGURES), choices=tuple(FIGURES))
    parser.add_argument("--write", action="store_true", help="write the JSON, and the table of the documentation")
    parser.add_argument("--results", type=Path, help="folder for the JSON alone")
    arguments = parser.parse_args(argv)
    sheet = DEVICES[arguments.device]
    print(
        f"{sheet.name} by its data sheet: {sheet.flops_per_s / 1e12:g} TFLOP/s, {sheet.memory_bytes_per_s / 1e9:g} "
        f"GB/s, {sheet.memory_bytes / 1e9:g} GB; assumed: {sheet.efficiency:.0%} of peak arithmetic; LoRA rank {RANK} "
        "on the four projections of attention\n"
    )
    rows = []
    for name in arguments.figures:
        table = Table("figure:<6", "what:<86", "paper:>12", "ours:>8")
        for row in FIGURES[name](arguments.device):
            rows.append(row)
            table.row(row.figure, row.what, row.paper, row.text)
        print(f"\n{inspect.getdoc(FIGURES[name])}\n")
    if arguments.write:
        write_result(
            "planner-figures", {"device": arguments.device, "rows": [row._asdict() for row in rows]}, arguments.results
        )
        if arguments.results is None:
            write_table("benchmarks.planner.figures", table_lines(rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
