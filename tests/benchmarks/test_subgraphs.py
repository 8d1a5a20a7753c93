"""Subgraphs keep the graph, Algorithm 1 orders them as its listing says, and two streams run them (M §3.4.2)."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planner.subgraphs.graph import Operator, OperatorGraph, Subgraph, segment, with_priorities
from benchmarks.planner.subgraphs.layers import WIDTHS, AdapterLatency, LayerLatency, layer_graph
from benchmarks.planner.subgraphs.schedule import compute_busy_s, schedule, simulate_streams

LAYER = LayerLatency(qkv_s=6.0, attention_s=3.0, output_s=2.0, gate_up_s=8.0, down_s=4.0, all_reduce_s=1.5)
Graphs = tuple[tuple[Subgraph, ...], ...]


def a_layer(htask: str = "h0", direction: str = "forward", num_layers: int = 1, layer: LayerLatency = LAYER):
    adapters = [AdapterLatency(linear, 0.5, 0.25) for linear in WIDTHS]
    return layer_graph(htask, layer, adapters, direction=direction, num_layers=num_layers)


def unit(name: str, htask: str, compute: float, communication: float = 0.0, before: tuple[str, ...] = ()) -> Subgraph:
    operators = [Operator(name, "compute", compute)]
    if communication:
        operators.append(Operator(f"{name}.sent", "communication", communication, (name,)))
    return Subgraph(name, htask, tuple(operators), before)


@st.composite
def operator_graphs(draw: st.DrawFn) -> OperatorGraph:
    operators: list[Operator] = []
    for number in range(draw(st.integers(1, 14))):
        before = draw(st.lists(st.sampled_from(range(number)), unique=True, max_size=3)) if number else []
        kind = draw(st.sampled_from(["compute", "compute", "compute", "communication", "adapter"]))
        operators.append(Operator(f"o{number}", kind, draw(st.integers(0, 9)), tuple(f"o{other}" for other in before)))
    return OperatorGraph("h", tuple(draw(st.permutations(operators))))


def random_bucket(rng: random.Random, num_subgraphs: int) -> Graphs:
    num_htasks = rng.randint(2, 4)
    graphs = []
    for htask in range(num_htasks):
        graph = []
        for number in range(rng.randint(1, max(num_subgraphs // num_htasks, 1))):
            compute, sent = (rng.choice([rng.random(), rng.uniform(0, 10)]) for _ in range(2))
            before = tuple(f"h{htask}/s{other}" for other in range(number) if rng.random() < 0.6)
            graph.append(unit(f"s{number}", f"h{htask}", compute, sent * (rng.random() < 0.6), before))
        graphs.append(graph)
    if rng.random() < 0.5 and len(graphs[0]) > 0:  # a dependency across graphs
        last = graphs[1][-1]
        graphs[1][-1] = Subgraph(last.name, last.htask, last.operators, (*last.depends_on, graphs[0][0].key))
    return with_priorities(graphs)


BUCKETS = st.builds(lambda seed: random_bucket(random.Random(seed), 8), st.integers(0, 10**9))


def naive_algorithm_1(graphs: Graphs) -> list[str]:
    """The listing with a plain list for the queue; what is in it already is not enqueued again."""
    remaining = [list(graph) for graph in graphs]
    queue: list[tuple[int, Subgraph]] = []
    order: list[str] = []

    def enqueue_zero_in_degree() -> None:
        left = {item.key for graph in remaining for item in graph}
        for number, graph in enumerate(remaining):
            for item in graph:
                if not left.intersection(item.depends_on) and (number, item) not in queue:
                    queue.append((number, item))

    enqueue_zero_in_degree()
    while queue:
        highest = min(item.priority for _, item in queue)
        filtered = [entry for entry in queue if entry[1].priority == highest]
        longest = max(item.latency_s for _, item in filtered)
        chosen = min(
            (entry for entry in filtered if entry[1].latency_s == longest), key=lambda entry: (entry[0], entry[1].name)
        )
        queue.remove(chosen)
        number, item = chosen
        remaining[number].remove(item)
        enqueue_zero_in_degree()
        order.append(item.key)
    return order


@given(operator_graphs())
def test_segments_hold_each_operator_once_and_keep_its_dependencies(graph: OperatorGraph) -> None:
    cut = segment(graph)
    operators = {operator.name: operator for operator in graph.operators}
    owner = {operator.name: item for item in cut for operator in item.operators}
    assert sorted(operator.name for item in cut for operator in item.operators) == sorted(operators)
    depth: dict[str, int] = {}
    for item in cut:  # the order is topological, or a key would be missing
        depth[item.key] = max((depth[key] + 1 for key in item.depends_on), default=0)
        assert item.priority == depth[item.key]
        names = [operator.name for operator in item.operators]
        outside = {owner[name].key for o in item.operators for name in o.depends_on if owner[name] is not item}
        assert set(item.depends_on) == outside
        for operator in item.operators:
            for name in operator.depends_on:
                assert name not in names or names.index(name) < names.index(operator.name)


@given(BUCKETS)
def test_the_schedule_equals_algorithm_1_written_naively(graphs: Graphs) -> None:
    assert schedule(graphs) == naive_algorithm_1(graphs)


@given(BUCKETS, st.sampled_from([0.0, 0.4]))
def test_no_stream_runs_two_things_at_once_and_nothing_starts_before_what_it_needs(
    graphs: Graphs, slowdown: float
) -> None:
    subgraphs = {item.key: item for graph in graphs for item in graph}
    order = schedule(graphs)
    timeline = simulate_streams(order, graphs, compute_slowdown=slowdown)
    spans = dict(zip(order, timeline.spans, strict=True))
    for key, span in spans.items():
        assert all(spans[other].end_s <= span.compute_start_s for other in subgraphs[key].depends_on)
        assert span.compute_start_s <= span.compute_end_s <= span.communication_start_s <= span.end_s
        assert span.end_s - span.communication_start_s == pytest.approx(subgraphs[key].communication_s)
        slowest_s = subgraphs[key].compute_s / (1 - slowdown)
        assert subgraphs[key].compute_s - 1e-9 <= span.compute_end_s - span.compute_start_s <= slowest_s + 1e-9
    for first, second in itertools.pairwise(timeline.spans):
        assert first.compute_end_s <= second.compute_start_s
    sent = [span for span in timeline.spans if span.end_s > span.communication_start_s]
    for first, second in itertools.pairwise(sent):
        assert first.end_s <= second.communication_start_s
    assert timeline.makespan_s == max(span.end_s for span in timeline.spans)
    assert slowdown or compute_busy_s(timeline) == pytest.approx(sum(item.compute_s for item in subgraphs.values()))


@given(
    st.integers(2, 5),
    st.lists(st.integers(10, 60), min_size=5, max_size=5),
    st.integers(1, 10),
    st.sampled_from(["forward", "backward"]),
)
def test_communication_of_equal_htasks_is_hidden_except_at_the_end(
    num_htasks: int, base: list[int], all_reduce: int, direction: str
) -> None:
    layer = LayerLatency(*map(float, base), all_reduce_s=float(all_reduce))
    graphs = [segment(a_layer(f"h{number}", direction, 2, layer)) for number in range(num_htasks)]
    timeline = simulate_streams(schedule(graphs), graphs)
    stall_s = timeline.makespan_s - compute_busy_s(timeline)
    assert stall_s == pytest.approx(all_reduce), "the last all-reduce has nothing left to hide under"


@given(st.integers(0, 10**9))
def test_algorithm_1_takes_at_most_twice_as_long_as_the_best_order(seed: int) -> None:
    graphs = random_bucket(random.Random(seed), 5)
    before = {item.key: item.depends_on for graph in graphs for item in graph}
    orders = [
        order
        for order in itertools.permutations(before)
        if all(order.index(one) < order.index(key) for key in order for one in before[key])
    ]
    best_s = min(simulate_streams(order, graphs).makespan_s for order in orders)
    assert simulate_streams(schedule(graphs), graphs).makespan_s <= 2 * best_s + 1e-9
