"""Case 2 of adapter fusion (M section 3.4.3) against what the planner does instead, on paper; half a minute.

    python -m benchmarks.planner.case_two

Two hTasks of one task each, of one bucket, over layers of a 7B Llama on two GPUs. `shared` has their adapters of one
site in one launch wherever that does not lengthen the step, while their passes take turns (M's case 2, with free choice
of sites); `turns` has turns without it; `one` is one hTask of both in one pass (case 1), and `halves` the same in two
passes that take turns, which a GPU may not run, as two passes of a task would add to its gradients at one time. All
come out of one simulator, with latencies of one cost model, adapters fused as in Eq. 3; the launches of
a fused kernel are paid once.
"""

from __future__ import annotations

import itertools
import statistics
from functools import partial
from typing import NamedTuple

from benchmarks.planner.subgraphs.adapter_fusion import fuse_adapters, fuse_within
from benchmarks.planner.subgraphs.graph import OperatorGraph, segment, with_priorities
from benchmarks.planner.subgraphs.layers import LINEARS, AdapterLatency, LayerLatency, layer_graph
from benchmarks.planner.subgraphs.schedule import schedule, sequential_schedule, simulate_streams
from peft_mux.scheduler.costs.hardware import Link, parse_devices
from peft_mux.scheduler.costs.latency import all_reduce_s
from peft_mux.scheduler.costs.loads import ModelShape
from peft_mux.scheduler.costs.profile import Profile, analytic_profile, launch_s

LLAMA_7B = ModelShape(32, 4096, 11008, 4096, 4096, 32000, 13_400_000_000, 2)
DEVICES, LAYERS = 2, 2
SHEETS = ("A40", "H100-80GB")
PROFILES = {name: analytic_profile(parse_devices(name).device, LLAMA_7B, DEVICES) for name in SHEETS}
FORWARD_LAUNCHES = 3
"""Of an adapter: half of the six of both directions, as the profile divides their seconds."""
WIDTHS = {"qkv": 3 * 8192, "output": 8192, "gate_up": 2 * 15104, "down": 15104}
SHARES = {"qkv": 3 / 12.06, "output": 1 / 12.06, "gate_up": 2 * 2.6875 / 12.06, "down": 2.6875 / 12.06}
"""Part of a layer's weights that each linear layer has."""
TOKENS, RANKS, SPEEDS = (64, 256, 1024, 4096), (8, 64), (5e9, 2e10, 1e11)


class Case(NamedTuple):
    """One setting.

    Attributes:
        tokens: tokens of the pass of each of the two tasks.
        ranks: ranks of their adapters.
        bytes_per_s: bandwidth of the link.
    """

    tokens: tuple[int, int]
    ranks: tuple[int, int]
    bytes_per_s: float


class Found(NamedTuple):
    """Seconds of the forward of both tasks, each way.

    Attributes:
        shared_s: in turns, adapters of one site in one launch where that helps.
        turns_s: in turns.
        one_s: in one pass.
        halves_s: in two passes of both, in turns.
    """

    shared_s: float
    turns_s: float
    one_s: float
    halves_s: float


def cases() -> list[Case]:
    """Return all settings."""
    pairs = itertools.combinations_with_replacement(TOKENS, 2)
    ranks = itertools.combinations_with_replacement(RANKS, 2)
    return [Case(*one) for one in itertools.product(pairs, ranks, SPEEDS)]


def compared(case: Case, sheet: str) -> Found:
    """Return how long each way takes.

    Args:
        case: the setting.
        sheet: the data sheet of the GPUs.
    """
    _graph = partial(_graph_of, PROFILES[sheet], launch_s(parse_devices(sheet).device))
    apart = [_graph(f"{index}", case, {index: tokens}) for index, tokens in enumerate(case.tokens)]
    whole = dict(enumerate(case.tokens))
    halves = [_graph(f"half{index}", case, {task: tokens / 2 for task, tokens in whole.items()}) for index in (0, 1)]
    (shared,) = fuse_adapters([apart])
    return Found(shared.makespan_s, _makespan_s(apart), _makespan_s([_graph("both", case, whole)]), _makespan_s(halves))


def _graph_of(profile: Profile, a_launch_s: float, name: str, case: Case, tokens: dict[int, float]) -> OperatorGraph:
    """Return the graph of a pass of some tokens of each task."""
    total = sum(tokens.values())
    layer_s = profile.forward_fraction * float(profile.layer(total)) / DEVICES
    sum_s = all_reduce_s(Link(1e-5, case.bytes_per_s), DEVICES, total * LLAMA_7B.hidden_size * 2)
    attention_s = profile.forward_fraction * float(profile.attention(min(total, 512))) / DEVICES
    latency = LayerLatency(*(_of(layer_s, attention_s, name) for name in _OPERATORS), sum_s)
    adapters = [
        AdapterLatency(
            f"{task}",
            linear,
            profile.forward_fraction * float(profile.adapter(case.ranks[task], WIDTHS[linear] / DEVICES, own)),
            utilization=float(profile.utilization(case.ranks[task], WIDTHS[linear] / DEVICES, own, grows=False)),
            launch_s=FORWARD_LAUNCHES * a_launch_s,
        )
        for task, own in tokens.items()
        for linear in LINEARS
    ]
    return layer_graph(name, latency, adapters, tasks=[f"{task}" for task in tokens], num_layers=LAYERS)


_OPERATORS = ("qkv", "attention", "output", "gate_up", "down")


def _of(layer_s: float, attention_s: float, name: str) -> float:
    return attention_s if name == "attention" else SHARES[name] * layer_s


def _makespan_s(graphs: list[OperatorGraph]) -> float:
    """Return the seconds of passes, their adapters of one site fused within each (case 1)."""
    cut = with_priorities([segment(fuse_within(graph)) for graph in graphs])
    if len(cut) == 1:
        return simulate_streams(sequential_schedule(cut), cut, overlap=False).makespan_s
    return simulate_streams(schedule(cut), cut).makespan_s


def main() -> None:
    """Print how the ways compare over all settings."""
    print(f"two tasks, tokens of {TOKENS}, ranks of {RANKS}, links of {SPEEDS} bytes/s")
    for sheet in SHEETS:
        found = [compared(case, sheet) for case in cases()]
        over_turns = [one.turns_s / one.shared_s for one in found]
        print(f"{sheet}, {len(found)} settings: case 2 over turns: {max(over_turns):.3f}x at most")
        for ways in (("turns_s", "one_s"), ("turns_s", "one_s", "halves_s")):
            gains = [min(getattr(one, way) for way in ways) / one.shared_s for one in found]
            names = ", ".join(way.removesuffix("_s") for way in ways)
            print(
                f"  case 2 over the best of {names}: {statistics.median(gains):.3f}x in the median, "
                f"{max(gains):.3f}x at most, faster in {sum(gain > 1.001 for gain in gains)}"
            )


if __name__ == "__main__":
    main()
