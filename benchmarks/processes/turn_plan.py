"""What turns are planned to be: the subgraphs of whole passes, Algorithm 1 over them, and the time that they take.

A measured run is compared with it (`benchmarks.processes.overlap`, `tests/engine/tensor/test_turns.py`). A run itself
does not read it: `peft_mux.engine.tensor.turns` orders passes by their tokens, and so the subgraphs of one layer as
their latencies would.

A pass is one chain: forward of all layers, loss, backward. Its subgraphs end at all-reduces, as they do at run time;
adapters are part of the operator beside which they run. For a layer under tensor parallelism:

    forward     | norm, q/k/v, attention, output |- all-reduce -| norm, gate/up, down |- all-reduce -|
    backward    | down, gate/up |- all-reduce -| output, attention, q/k/v |- all-reduce -|
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from peft_mux.engine.tensor.turns import Latency
from peft_mux.scheduler.subgraphs.graph import Operator, OperatorGraph
from peft_mux.scheduler.subgraphs.layers import LayerLatency, layer_graph
from peft_mux.scheduler.subgraphs.schedule import LaunchSchedule, schedule, sequential_schedule
from peft_mux.scheduler.subgraphs.segments import Subgraph, segment
from peft_mux.scheduler.subgraphs.streams import StreamTimeline, simulate_streams

PassSubgraphs = tuple[Subgraph, ...]


def pass_subgraphs(
    name: str,
    *,
    forward: LayerLatency,
    backward: LayerLatency,
    num_layers: int,
    head_s: float = 0.0,
    head_all_reduces_s: Sequence[float] = (),
) -> PassSubgraphs:
    """Return the subgraphs of one pass of a micro-batch, forward and backward, in order.

    The gradient of the first layer's input is not asked for, as embeddings are frozen: its all-reduce is left out.

    Args:
        name: name of the pass.
        forward: seconds of one layer's forward on one shard, adapters included.
        backward: seconds of one layer's backward on one shard, adapters included.
        num_layers: number of layers of the stage.
        head_s: seconds of the loss and its backward on one shard.
        head_all_reduces_s: seconds of each sum in a loss whose vocabulary is cut, in order; `head_s` is spread before
            them.
    """
    there = layer_graph(name, forward, tasks=(name,), num_layers=num_layers)
    back = layer_graph(name, backward, tasks=(name,), num_layers=num_layers, direction="backward")
    operators, last = list(there.operators), there.operators[-1].name
    part_s = head_s / (len(head_all_reduces_s) + 1)
    for number, all_reduce_s in enumerate(head_all_reduces_s):
        operators.append(Operator(f"head{number}", "compute", part_s, (last,)))
        last = f"head{number}.all_reduce"
        operators.append(Operator(last, "communication", all_reduce_s, (f"head{number}",)))
    operators.append(Operator("head", "compute", part_s, (last,)))
    first, *others = back.operators
    operators += [replace(first, depends_on=("head",)), *others]
    if operators[-1].kind == "communication":
        operators.pop()
    return segment(OperatorGraph(name, (name,), tuple(operators)))


def latency_of(subgraphs: PassSubgraphs) -> Latency:
    """Return the latency of each subgraph by its depth, which `Turns` compares; 0 behind the last planned one."""
    seconds = [subgraph.latency_s for subgraph in subgraphs]
    return lambda depth: seconds[depth] if depth < len(seconds) else 0.0


def planned_turns(passes: Sequence[PassSubgraphs]) -> LaunchSchedule:
    """Return the order in which the subgraphs of all passes are launched (M section 3.4.2, Algorithm 1)."""
    return schedule(passes)


def planned_timeline(passes: Sequence[PassSubgraphs], *, overlap: bool = True) -> StreamTimeline:
    """Return when everything runs on one compute and one communication stream.

    Args:
        passes: the subgraphs of each pass.
        overlap: whether passes take turns; otherwise one runs after another and waits for each all-reduce at once.
    """
    if overlap:
        return simulate_streams(schedule(passes), passes)
    return simulate_streams(sequential_schedule(passes), passes, overlap=False)
