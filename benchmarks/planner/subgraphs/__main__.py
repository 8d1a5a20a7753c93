"""Subgraph scheduling compared with MuxTune (sections 3.4.2 and 3.4.3, Figures 18 and 19a): computed, nothing is run.

    python -m benchmarks.planner.subgraphs              both tables; a second on one core
    python -m benchmarks.planner.subgraphs --write      also the table of docs/paper_tables.md

Latencies of layers of a 7B Llama come from data sheets and the assumptions of the package's analytic profile; links are
NVLink bridges of the A40 (as if all four were linked) and NVLink 4, of which 75 % are reached, and 20 us a collective.

1. Figure 19(a): tasks of 8 sequences on 4 GPUs, LoRA of rank 16, one hTask each, forward and backward of 4 layers. All
   contenders have the same operators. "8 blocks" slows computing by 8 of the multiprocessors during communication. The
   paper does not split its gain between overlap and fusion of adapters, and measures whole steps against another
   system (NeMo).
2. Figure 18: one task alone is scaled to the paper's latency and busy share; how its compute time splits over the
   operators follows the A40. In (c) the paper's device is busy for longer than four times (a): its operators got
   slower during communication. 8 of 84 multiprocessors explain a part, the rest may be memory bandwidth, which is not
   modelled.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

from benchmarks.harness import Table
from benchmarks.papers.simulated import write_table
from benchmarks.planner.subgraphs.graph import Subgraph, segment
from benchmarks.planner.subgraphs.layers import Llama7B, layer_graph
from benchmarks.planner.subgraphs.schedule import compute_busy_s, schedule, sequential_schedule, simulate_streams
from peft_mux.scheduler.plan import Link
from peft_mux.scheduler.subgraphs import StreamTimeline

LINKS = {"A40": Link(2e-5, 0.75 * 56.25e9), "H100-80GB": Link(2e-5, 0.75 * 450e9)}
SLOWDOWNS = {"A40": 8 / 84, "H100-80GB": 8 / 132}
"""Part of the multiprocessors that communication takes from compute (section 3.4.3)."""
RANK, DEGREE, LAYERS = 16, 4, 4
FIGURE_19A = {2: 1.20, 3: 1.22, 4: 1.23}
FIGURE_18_LAYER_S, FIGURE_18_BUSY = 43.2e-3, 0.825
FIGURE_18 = {"no overlap": (172.5e-3, 0.847), "overlap": (156.2e-3, 0.978)}


# -------------------------------------------------------------- Figure 19(a)


def contenders(sheet: str, lengths: Sequence[int]) -> dict[str, tuple[float, float]]:
    """Return (seconds, compute utilisation) of every way to run tasks of these lengths, forward and backward."""
    model = Llama7B(sheet, DEGREE, LINKS[sheet])
    cut: dict[str, list[tuple[Subgraph, ...]]] = {}
    for way in ("forward", "backward"):
        shape = {"direction": way, "num_layers": LAYERS}
        passes = [(model.latency(8 * length, length), model.adapters(8 * length, RANK)) for length in lengths]
        cut[way] = [segment(layer_graph(f"h{n}", *latencies, **shape)) for n, latencies in enumerate(passes)]
    slow = SLOWDOWNS[sheet]

    def both(run: Callable[[str], StreamTimeline]) -> tuple[float, float]:
        timelines = [run(way) for way in cut]
        seconds = sum(timeline.makespan_s for timeline in timelines)
        return seconds, sum(compute_busy_s(timeline) for timeline in timelines) / seconds

    return {
        "one by one": both(lambda way: simulate_streams(sequential_schedule(cut[way]), cut[way], overlap=False)),
        "overlap": both(lambda way: simulate_streams(schedule(cut[way]), cut[way])),
        "8 blocks": both(lambda way: simulate_streams(schedule(cut[way]), cut[way], compute_slowdown=slow)),
    }


def figure_19a() -> list[tuple[str, str, str, str]]:
    """Print the speed-up over one by one, and return the rows of the documentation."""
    print("Figure 19(a): times as fast as one by one; busy: share of the time in which the compute stream runs")
    table = Table(
        "device:<9", "tasks x length:<14", "busy alone:>10.1%", "overlap:>8.3f", "8 blocks:>8.3f", "paper:>6.2f"
    )
    gains: dict[int, list[float]] = {count: [] for count in FIGURE_19A}
    for sheet in LINKS:
        for count, length in itertools.product((1, 2, 3, 4), (128, 64, 32)):
            times = contenders(sheet, (length,) * count)
            base_s, busy = times.pop("one by one")
            overlap, blocks = (base_s / seconds for seconds, _ in times.values())
            table.row(sheet, f"{count} x {length}", busy, overlap, blocks, FIGURE_19A.get(count, "-"))
            if length == 128 and count > 1:
                gains[count].append(overlap)
    return [
        ("19(a)", f"{count} tasks of 8 x 128, overlap over one by one: A40; H100", f"{FIGURE_19A[count]:.2f}x",
         "; ".join(f"{gain:.3f}x" for gain in gains_of_count))
        for count, gains_of_count in gains.items()
    ]  # fmt: skip


# ----------------------------------------------------------------- Figure 18


def figure_18() -> list[tuple[str, str, str, str]]:
    """Print the latency of a layer of 4 interleaved tasks, and return the rows of the documentation."""
    model = Llama7B("A40", DEGREE, LINKS["A40"])
    base, adapters = model.latency(1024, 128), model.adapters(1024, RANK)
    parts = ("qkv", "attention", "output", "gate_up", "down")
    compute_s = sum(base.of(name) for name in parts) + sum(adapter.latency_s for adapter in adapters)
    scale = FIGURE_18_LAYER_S * FIGURE_18_BUSY / compute_s
    latency = replace(
        base,
        **{f"{name}_s": scale * base.of(name) for name in parts},
        all_reduce_s=FIGURE_18_LAYER_S * (1 - FIGURE_18_BUSY) / 2,
    )
    scaled = [adapter._replace(latency_s=scale * adapter.latency_s) for adapter in adapters]
    graphs = [segment(layer_graph(f"h{number}", latency, scaled)) for number in range(4)]
    order, slow = schedule(graphs), SLOWDOWNS["A40"]
    rows = [
        ("18(b)", "4 tasks, no overlap: latency of a layer, busy", "no overlap", {"overlap": False}),
        ("18(c)", "4 tasks, overlap: latency of a layer, busy", "overlap", {}),
        ("18(c)", f"the same, computing {100 * slow:.1f} % slower during sums", "overlap", {"compute_slowdown": slow}),
    ]
    lines = []
    print("\nFigure 18: one layer, no adapter fusion")
    table = Table("figure:<6", "what:<50", "paper:<18", "ours:<18")
    for figure, what, name, options in rows:
        timeline = simulate_streams(order, graphs, **options)
        simulated = timeline.makespan_s, compute_busy_s(timeline) / timeline.makespan_s
        paper, ours = (f"{1e3 * seconds:.1f} ms, {100 * busy:.1f} %" for seconds, busy in (FIGURE_18[name], simulated))
        lines.append((figure, what, paper, ours))
        table.row(*lines[-1])
    return lines


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the table of the documentation")
    options = parser.parse_args()
    of_19a = figure_19a()
    of_18 = figure_18()
    if options.write:
        write_table("benchmarks.planner.subgraphs", [*of_18, *of_19a])


if __name__ == "__main__":
    main()
