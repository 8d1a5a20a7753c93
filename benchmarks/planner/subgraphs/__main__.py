"""Subgraph scheduling compared with MuxTune (sections 3.4.2 and 3.4.3, Figures 18 and 19a): computed, nothing is run.

    python -m benchmarks.planner.subgraphs                 every table; seconds on one core
    python -m benchmarks.planner.subgraphs --instances 200 --layers 2

Latencies of a Llama-7B layer come from datasheet numbers and the assumptions that the output states: they are a model
of the hardware, not measurements. Only the planner's own run times are measured.
"""

from __future__ import annotations

import argparse
import random
import statistics
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.planner.subgraphs.adapter_fusion import fuse_adapters
from benchmarks.planner.subgraphs.exhaustive import best_schedule
from benchmarks.planner.subgraphs.graph import Operator, OperatorGraph, Subgraph, segment, with_priorities
from benchmarks.planner.subgraphs.layers import LINEARS, AdapterLatency, LayerLatency, layer_graph
from benchmarks.planner.subgraphs.schedule import compute_busy_s, schedule, sequential_schedule, simulate_streams
from peft_mux.scheduler.subgraphs import StreamTimeline

HIDDEN, INTERMEDIATE, RANK, DEGREE, ELEMENT_BYTES = 4096, 11008, 16, 4, 2
"""Llama-7B, LoRA of rank 16 at all linear layers, 4-way tensor parallelism, bf16."""
FIGURE_19A = {2: 1.20, 3: 1.22, 4: 1.23}
FIGURE_18_LAYER_S, FIGURE_18_BUSY, FIGURE_18_NO_OVERLAP_S, FIGURE_18_OVERLAP_S = 43.2e-3, 0.825, 172.5e-3, 156.2e-3
FIGURE_18_OVERLAP_BUSY, FIGURE_18_TASKS = 0.978, 4
COMMUNICATION_BLOCKS = 8
"""Thread blocks that communication takes from compute (section 3.4.3)."""


@dataclass(frozen=True, slots=True)
class Hardware:
    """Datasheet rates of one device, and the share that is assumed to be reached."""

    name: str
    flops_per_s: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    multiprocessors: int
    flops_share: float = 0.6
    memory_share: float = 0.8
    link_share: float = 0.75
    kernel_s: float = 5e-6
    collective_s: float = 20e-6

    def kernels_s(self, flops: float, num_bytes: float, num_kernels: int = 1) -> tuple[float, float]:
        """Return latency and roofline time (both seconds) of kernels that follow each other."""
        roofline_s = max(
            flops / (self.flops_per_s * self.flops_share), num_bytes / (self.memory_bytes_per_s * self.memory_share)
        )
        return roofline_s + num_kernels * self.kernel_s, roofline_s

    def all_reduce_s(self, num_bytes: float) -> float:
        """Return the time of a ring all-reduce: 2 (n - 1) / n of the bytes over each link."""
        return self.collective_s + 2 * (DEGREE - 1) / DEGREE * num_bytes / (self.link_bytes_per_s * self.link_share)


A40 = Hardware("A40, NVLink bridges (as if all four were linked)", 149.7e12, 696e9, 56.25e9, 84)
H100 = Hardware("H100 SXM, NVLink 4", 989e12, 3350e9, 450e9, 132)


def layer_latency(hardware: Hardware, num_tokens: int, length: int) -> LayerLatency:
    """Return the base operators of one layer on one device; in PEFT the same in both directions (section 3.3)."""

    def linear(inputs: int, outputs: int, elementwise_bytes: int) -> float:
        weights, rows = inputs * outputs / DEGREE, num_tokens * (inputs + outputs) / DEGREE
        num_bytes = (weights + rows) * ELEMENT_BYTES + elementwise_bytes
        return hardware.kernels_s(2 * num_tokens * weights, num_bytes, 2)[0]

    hidden_bytes = num_tokens * HIDDEN * ELEMENT_BYTES
    inner_bytes = num_tokens * INTERMEDIATE * ELEMENT_BYTES // DEGREE
    heads_bytes = hidden_bytes / DEGREE
    return LayerLatency(
        qkv_s=linear(HIDDEN, 3 * HIDDEN, 4 * hidden_bytes),  # residual, norm
        attention_s=hardware.kernels_s(2 * num_tokens * length * HIDDEN / DEGREE, 8 * heads_bytes, 2)[0],
        output_s=linear(HIDDEN, HIDDEN, 0),
        gate_up_s=linear(HIDDEN, 2 * INTERMEDIATE, 4 * hidden_bytes + 3 * inner_bytes),
        down_s=linear(INTERMEDIATE, HIDDEN, 0),
        all_reduce_s=hardware.all_reduce_s(hidden_bytes),
    )


def adapters(hardware: Hardware, task: str, num_tokens: int, direction: str) -> list[AdapterLatency]:
    """Return the LoRA of one task at all linear layers; backward has four products for the two of forward."""
    sizes = {
        "qkv": (HIDDEN, HIDDEN, 3),
        "output": (HIDDEN, HIDDEN, 1),
        "gate_up": (HIDDEN, INTERMEDIATE, 2),
        "down": (INTERMEDIATE, HIDDEN, 1),
    }
    num_products = 2 if direction == "forward" else 4
    found = []
    for name in LINEARS:
        inputs, outputs, num_projections = sizes[name]
        # Column-parallel layers read whole rows and write shards, row-parallel ones the other way round.
        if name in ("qkv", "gate_up"):
            outputs //= DEGREE
        else:
            inputs //= DEGREE
        values = num_projections * num_tokens * (inputs + outputs)
        latency_s, roofline_s = hardware.kernels_s(
            num_products * RANK * values, num_products / 2 * values * ELEMENT_BYTES, num_projections * num_products
        )
        add_bytes = 3 * num_projections * num_tokens * outputs * ELEMENT_BYTES
        add_s = hardware.kernels_s(0, add_bytes, num_projections)[0]
        found.append(AdapterLatency(task, name, latency_s, add_s, roofline_s / latency_s))
    return found


def task_graphs(
    hardware: Hardware, lengths: Sequence[int], batch: int, direction: str, layers: int
) -> list[OperatorGraph]:
    """Return one hTask of one task for each sequence length."""
    return [
        layer_graph(
            f"h{number}",
            layer_latency(hardware, length * batch, length),
            adapters(hardware, f"t{number}", length * batch, direction),
            tasks=[f"t{number}"],
            direction=direction,
            num_layers=layers,
        )
        for number, length in enumerate(lengths)
    ]


def both_directions(run: Callable[[str], StreamTimeline]) -> tuple[float, float]:
    """Return seconds and compute utilisation of a forward and a backward pass together."""
    timelines = [run(direction) for direction in ("forward", "backward")]
    seconds = sum(timeline.makespan_s for timeline in timelines)
    return seconds, sum(compute_busy_s(timeline) for timeline in timelines) / seconds


def contenders(hardware: Hardware, lengths: Sequence[int], batch: int, layers: int) -> dict[str, tuple[float, float]]:
    """Return (seconds, compute utilisation) of every way to run the tasks."""
    graphs = {way: task_graphs(hardware, lengths, batch, way, layers) for way in ("forward", "backward")}
    cut = {way: [segment(graph) for graph in graphs[way]] for way in graphs}
    fused = {way: fuse_adapters([graphs[way]])[0] for way in graphs}
    slowdown = COMMUNICATION_BLOCKS / hardware.multiprocessors
    return {
        "sequential": both_directions(lambda w: simulate_streams(sequential_schedule(cut[w]), cut[w], overlap=False)),
        "no overlap": both_directions(lambda w: simulate_streams(schedule(cut[w]), cut[w], overlap=False)),
        "overlap": both_directions(lambda w: simulate_streams(schedule(cut[w]), cut[w])),
        "8 blocks": both_directions(lambda w: simulate_streams(schedule(cut[w]), cut[w], compute_slowdown=slowdown)),
        "fused": both_directions(lambda w: simulate_streams(fused[w].launches, fused[w].graphs)),
        "fused, 8 blocks": both_directions(
            lambda w: simulate_streams(fused[w].launches, fused[w].graphs, compute_slowdown=slowdown)
        ),
    }


def print_figure_19a(hardware: Hardware, layers: int) -> None:
    """Print throughput over sequential execution for 1 to 4 tasks."""
    print(
        f"\n{hardware.name}\n  {hardware.flops_per_s / 1e12:.1f} TFLOP/s dense bf16, "
        f"{hardware.memory_bytes_per_s / 1e9:.0f} GB/s, link {hardware.link_bytes_per_s / 1e9:.2f} GB/s each way, "
        f"{hardware.multiprocessors} multiprocessors\n"
        f"  assumed: {hardware.flops_share:.0%} of the FLOP/s, {hardware.memory_share:.0%} of the memory rate, "
        f"{hardware.link_share:.0%} of the link rate, {hardware.kernel_s * 1e6:.0f} us a kernel, "
        f"{hardware.collective_s * 1e6:.0f} us a collective"
    )
    print(
        f"  {'':<16} {'one by one':>24} | {'speed-up over one by one':<50} |\n"
        f"  {'tasks x length':<16} {'tokens/s, layer':>16} {'busy':>7} | no overlap  overlap  8 blocks    fused  "
        f"fused, 8 blocks    busy | paper"
    )
    workloads = [(length,) * count for length in (128, 64, 32) for count in (1, 2, 3, 4)] + [(128, 64, 32)]
    for lengths in workloads:
        found = contenders(hardware, lengths, 8, layers)
        base_s, base_busy = found["sequential"]
        speedups = {name: base_s / seconds for name, (seconds, _) in found.items()}
        named = f"{len(lengths)} x {lengths[0]}" if len(set(lengths)) == 1 else "+".join(map(str, lengths))
        paper = FIGURE_19A.get(len(lengths))
        print(
            f"  {named:<16} {8 * sum(lengths) / base_s * layers:>16,.0f} {base_busy:>7.1%} |"
            f" {speedups['no overlap']:>9.3f}x {speedups['overlap']:>7.3f}x {speedups['8 blocks']:>8.3f}x"
            f" {speedups['fused']:>7.3f}x {speedups['fused, 8 blocks']:>15.3f}x {found['fused, 8 blocks'][1]:>7.1%} |"
            f" {f'{paper:.2f}x' if paper else '-'}"
        )


def print_text(text: str) -> None:
    """Print a paragraph."""
    print(textwrap.fill(text, 116, initial_indent="  ", subsequent_indent="  "))


def print_differences(layers: int) -> None:
    """Print why the speed-ups differ from the paper's."""
    print("\nWhy Figure 19(a) differs")
    for hardware in (A40, H100):
        alone = contenders(hardware, [128], 8, layers)["sequential"][1]
        gains = []
        for count in (2, 4):
            found = contenders(hardware, [128] * count, 8, layers)
            gains.append(found["sequential"][0] / found["overlap"][0])
        print_text(
            f"{hardware.name.split(',')[0]}: one task of 8 x 128 tokens spends {1 - alone:.1%} of its time on "
            f"communication, so overlap gains at most {1 / alone:.3f}x; it gains {gains[0]:.3f}x with 2 tasks and "
            f"{gains[1]:.3f}x with 4. In Figure 18(a) the share is {1 - FIGURE_18_BUSY:.1%} and the limit "
            f"{1 / FIGURE_18_BUSY:.3f}x, next to {FIGURE_19A[2]:.2f}x to {FIGURE_19A[4]:.2f}x in Figure 19(a)."
        )
    print_text(
        "Two tasks gain less than four here: an all-reduce that is longer than the output projection of the only other "
        "task stays partly visible. The columns 'fused' add what case (2) of section 3.4.3 saves: with short batches "
        "most of an adapter's time is kernel launches, which one kernel for all tasks pays once. The paper does not "
        "split its gain between overlap and fusion, and measures whole steps against another system (NeMo) with "
        "operators of its own; here all contenders have the same operators, and embeddings, head, loss and optimizer "
        "are left out."
    )


def figure_18_graphs() -> list[tuple[Subgraph, ...]]:
    """Return 4 tasks of one layer, scaled so that one alone has the latency and the busy share of Figure 18(a)."""
    base = layer_latency(A40, 1024, 128)
    lora = adapters(A40, "t", 1024, "forward")
    compute_s = sum(base.of(name) for name in ("qkv", "attention", "output", "gate_up", "down"))
    compute_s += sum(item.latency_s + item.add_s for item in lora)
    scale = FIGURE_18_LAYER_S * FIGURE_18_BUSY / compute_s
    latency = LayerLatency(
        base.qkv_s * scale,
        base.attention_s * scale,
        base.output_s * scale,
        base.gate_up_s * scale,
        base.down_s * scale,
        FIGURE_18_LAYER_S * (1 - FIGURE_18_BUSY) / 2,
    )
    scaled = [AdapterLatency("t", item.linear, item.latency_s * scale, item.add_s * scale) for item in lora]
    return [segment(layer_graph(f"h{number}", latency, scaled, tasks=["t"])) for number in range(FIGURE_18_TASKS)]


def print_figure_18() -> None:
    """Print the layer latency of 4 interleaved tasks next to Figure 18."""
    graphs = figure_18_graphs()
    alone = simulate_streams(sequential_schedule(graphs[:1]), graphs[:1], overlap=False)
    blocked = simulate_streams(schedule(graphs), graphs, overlap=False)
    overlapped = simulate_streams(schedule(graphs), graphs)
    a40_slowdown = COMMUNICATION_BLOCKS / A40.multiprocessors
    slowed = simulate_streams(schedule(graphs), graphs, compute_slowdown=a40_slowdown)
    implied = implied_slowdown(graphs)
    print(
        "\nFigure 18: one layer of Llama-7B, 4-way tensor parallelism, no adapter fusion. One task alone is scaled to\n"
        "the paper's latency and busy share; how its compute time splits over the operators follows the A40 model."
    )
    rows = [
        ("(a) one task", alone, FIGURE_18_LAYER_S, FIGURE_18_BUSY),
        ("(b) 4 tasks, no overlap", blocked, FIGURE_18_NO_OVERLAP_S, 0.847),
        ("(c) 4 tasks, overlap", overlapped, FIGURE_18_OVERLAP_S, FIGURE_18_OVERLAP_BUSY),
        (
            f"(c) and {a40_slowdown:.1%} slower during communication",
            slowed,
            FIGURE_18_OVERLAP_S,
            FIGURE_18_OVERLAP_BUSY,
        ),
    ]
    print(f"  {'':<46} {'ms':>7} {'busy':>7} | paper ms   busy")
    for name, timeline, paper_s, paper_busy in rows:
        print(
            f"  {name:<46} {timeline.makespan_s * 1e3:>7.1f} {compute_busy_s(timeline) / timeline.makespan_s:>7.1%} |"
            f" {paper_s * 1e3:>8.1f} {paper_busy:>6.1%}"
        )
    paper_busy_s, alone_busy_s = FIGURE_18_OVERLAP_S * FIGURE_18_OVERLAP_BUSY, FIGURE_18_LAYER_S * FIGURE_18_BUSY
    print_text(
        "(b): the latency agrees; without overlap the busy share cannot differ from that of (a) here, and the paper "
        f"does not say why its own does. (c): the paper's device is busy for {paper_busy_s * 1e3:.1f} ms where 4 x (a) "
        f"is {FIGURE_18_TASKS * alone_busy_s * 1e3:.1f} ms: its operators got slower during communication. Here that "
        f"latency is met at a slowdown of {implied:.1%} while communication runs; {COMMUNICATION_BLOCKS} of "
        f"{A40.multiprocessors} multiprocessors explain {a40_slowdown:.1%}, the rest may be memory bandwidth, which is "
        f"not modelled. (c) over (b): {blocked.makespan_s / overlapped.makespan_s:.3f}x here without slowdown, "
        f"{FIGURE_18_NO_OVERLAP_S / FIGURE_18_OVERLAP_S:.3f}x in the paper's Figure 18, at most "
        f"{1 / FIGURE_18_BUSY:.3f}x with communication for free; the {FIGURE_19A[4]:.2f}x of Figure 19(a) cannot be of "
        "the same batch."
    )


def implied_slowdown(graphs: Sequence[Sequence[Subgraph]]) -> float:
    """Return the slowdown during communication at which the layer takes as long as in Figure 18(c)."""
    launches = schedule(graphs)
    low, high = 0.0, 0.99
    for _ in range(50):
        middle = (low + high) / 2
        if simulate_streams(launches, graphs, compute_slowdown=middle).makespan_s < FIGURE_18_OVERLAP_S:
            low = middle
        else:
            high = middle
    return low


def random_bucket(rng: random.Random, *, short_communication: bool) -> tuple[tuple[Subgraph, ...], ...]:
    """Return 2 to 4 hTasks with 8 subgraphs or fewer in all.

    With `short_communication` no communication is longer than any compute part; otherwise both are 0 to 10.
    """
    num_htasks = rng.choice([2, 2, 3, 4])
    graphs = []
    for htask in range(num_htasks):
        graph = []
        for number in range(rng.randint(1, 8 // num_htasks)):
            compute = rng.uniform(4, 12) if short_communication else rng.choice([rng.random(), rng.uniform(0, 10)])
            communication = rng.uniform(0, 4) if short_communication else rng.choice([rng.random(), rng.uniform(0, 10)])
            operators = [Operator(f"s{number}", "compute", compute)]
            if rng.random() < 0.6:
                operators.append(Operator(f"s{number}.all_reduce", "communication", communication))
            before = tuple(f"h{htask}/s{other}" for other in range(number) if rng.random() < 0.6)
            graph.append(Subgraph(f"s{number}", f"h{htask}", tuple(operators), before))
        graphs.append(graph)
    return with_priorities(graphs)


def print_gap(instances: int) -> None:
    """Print how far Algorithm 1 is from the best order on small random buckets."""
    print(
        f"\nAlgorithm 1 over the best of all orders, {instances} random buckets of at most 8 subgraphs each (bound: 2)"
    )
    for short in (True, False):
        ratios = []
        for seed in range(instances):
            graphs = random_bucket(random.Random(seed), short_communication=short)
            ratios.append(simulate_streams(schedule(graphs), graphs).makespan_s / best_schedule(graphs)[1])
        ratios.sort()
        optimal = sum(ratio < 1 + 1e-9 for ratio in ratios) / instances
        print(
            f"  {'communication <= every compute part' if short else 'both 0 to 10':<36} optimal in {optimal:.0%}, "
            f"median {statistics.median(ratios):.3f}, 95% {ratios[int(instances * 0.95)]:.3f}, worst {ratios[-1]:.3f}"
        )


def print_times() -> None:
    """Print how long the planner itself takes."""
    print("\nTime on one core of this machine (best of 3)")
    for htasks, layers in ((4, 1), (4, 8), (8, 32), (8, 64)):
        graphs = task_graphs(A40, [128] * htasks, 8, "forward", layers)
        cut = [segment(graph) for graph in graphs]
        launches = schedule(cut)
        segment_s = best_of(lambda graphs=graphs: [segment(graph) for graph in graphs])
        schedule_s = best_of(lambda cut=cut: schedule(cut))
        simulate_s = best_of(lambda cut=cut, launches=launches: simulate_streams(launches, cut))
        line = (
            f"  {htasks} hTasks x {layers:>2} layers: {len(launches):>5} subgraphs, "
            f"segment {segment_s * 1e3:.1f} ms, schedule {schedule_s * 1e3:.1f} ms, simulate {simulate_s * 1e3:.1f} ms"
        )
        if layers <= 8:
            line += f", fuse_adapters {best_of(lambda graphs=graphs: fuse_adapters([graphs])) * 1e3:.1f} ms"
        print(line)


def best_of(run: Callable[[], object], repeats: int = 3) -> float:
    """Return the shortest of some run times, in seconds."""
    times = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        run()
        times.append(time.perf_counter() - start_s)
    return min(times)


def main() -> None:
    """Print all tables."""
    parser = argparse.ArgumentParser(description="Subgraph scheduling next to the paper's Figures 18 and 19(a).")
    parser.add_argument("--instances", type=int, default=2000, help="random buckets of each kind")
    parser.add_argument("--layers", type=int, default=4, help="decoder layers in a pass")
    options = parser.parse_args()
    print(f"Figure 19(a): Llama-7B, {DEGREE}-way tensor parallelism, LoRA of rank {RANK}, batch of 8")
    print_text(
        f"{options.layers} layers forward and backward, LoRA at all linear layers, tasks interleaved as hTasks of one "
        "bucket. 'busy' is the share of time in which the compute stream runs; '8 blocks' slows compute by "
        f"{COMMUNICATION_BLOCKS} of the multiprocessors during communication (section 3.4.3); tokens/s are those of "
        "one layer. A computation, not a measurement."
    )
    for hardware in (A40, H100):
        print_figure_19a(hardware, options.layers)
    print_differences(options.layers)
    print_figure_18()
    print_gap(options.instances)
    print_times()


if __name__ == "__main__":
    main()
