"""What turns are planned to be: the subgraphs of whole passes, Algorithm 1 over them, and the time that they take.

It is what a run is held against (`benchmarks.overlap`, `tests/engine/test_engine_turns.py`); a run takes its own turns
by `peft_mux.engine.turns` from the tokens of its passes, which order subgraphs of one layer as their latencies do.

A pass is one chain: forward of all layers, loss, backward. Its subgraphs end at all-reduces, as they do at run time;
adapters are part of the operator beside which they run. For a layer under tensor parallelism:

    forward     | norm, q/k/v, attention, output |- all-reduce -| norm, gate/up, down |- all-reduce -|
    backward    | down, gate/up |- all-reduce -| output, attention, q/k/v |- all-reduce -|
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from peft_mux.engine.turns import Latency
from peft_mux.scheduler.operator_graph import Operator, OperatorGraph
from peft_mux.scheduler.subgraph_layers import LayerLatency, layer_graph
from peft_mux.scheduler.subgraph_schedule import LaunchSchedule, schedule, sequential_schedule
from peft_mux.scheduler.subgraph_streams import StreamTimeline, simulate_streams
from peft_mux.scheduler.subgraphs import Subgraph, segment

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
        name: of the pass.
        forward: of a layer on one shard, adapters included.
        backward: likewise.
        num_layers: of the stage.
        head_s: loss and its backward, on one shard.
        head_all_reduces_s: of the sums in a loss whose vocabulary is sharded, in order; `head_s` is spread before them.
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
    """Return what `Turns` compares; behind the last subgraph that was planned, nothing."""
    seconds = [subgraph.latency_s for subgraph in subgraphs]
    return lambda depth: seconds[depth] if depth < len(seconds) else 0.0


def planned_turns(passes: Sequence[PassSubgraphs]) -> LaunchSchedule:
    """Return the order in which the subgraphs of all passes are launched (M section 3.4.2, Algorithm 1)."""
    return schedule(passes)


def planned_timeline(passes: Sequence[PassSubgraphs], *, overlap: bool = True) -> StreamTimeline:
    """Return when everything runs on one compute and one communication stream.

    Args:
        passes: subgraphs of each.
        overlap: in turns; otherwise one pass after another, waiting for every all-reduce at once.
    """
    if overlap:
        return simulate_streams(schedule(passes), passes)
    return simulate_streams(sequential_schedule(passes), passes, overlap=False)
