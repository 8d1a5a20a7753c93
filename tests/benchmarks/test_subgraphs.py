"""Subgraphs keep the graph, Algorithm 1 orders them as its listing says, and two streams run them (M §3.4.2)."""

from __future__ import annotations

import itertools
import random
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planner.subgraphs.exhaustive import best_schedule
from benchmarks.planner.subgraphs.graph import Operator, OperatorGraph, Subgraph, segment, with_priorities
from benchmarks.planner.subgraphs.layers import LINEARS, AdapterLatency, LayerLatency, layer_graph
from benchmarks.planner.subgraphs.schedule import (
    communication_busy_s,
    compute_busy_s,
    compute_stall_s,
    launches_of,
    schedule,
    simulate_streams,
)

LAYER = LayerLatency(qkv_s=6.0, attention_s=3.0, output_s=2.0, gate_up_s=8.0, down_s=4.0, all_reduce_s=1.5)
Graphs = tuple[tuple[Subgraph, ...], ...]


def a_layer(htask: str = "h0", direction: str = "forward", num_layers: int = 1, layer: LayerLatency = LAYER):
    adapters = [AdapterLatency("t", linear, 0.5, 0.25, 0.3) for linear in LINEARS]
    return layer_graph(htask, layer, adapters, tasks=["t"], direction=direction, num_layers=num_layers)


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
    return OperatorGraph("h", ("t",), tuple(draw(st.permutations(operators))))


def random_bucket(rng: random.Random, num_subgraphs: int, *, short_communication: bool = False) -> Graphs:
    num_htasks = rng.randint(2, 4)
    graphs = []
    for htask in range(num_htasks):
        graph = []
        for number in range(rng.randint(1, max(num_subgraphs // num_htasks, 1))):
            compute, sent = (rng.choice([rng.random(), rng.uniform(0, 10)]) for _ in range(2))
            if short_communication:
                compute, sent = rng.uniform(4, 12), rng.uniform(0, 4)
            before = tuple(f"h{htask}/s{other}" for other in range(number) if rng.random() < 0.6)
            graph.append(unit(f"s{number}", f"h{htask}", compute, sent * (rng.random() < 0.6), before))
        graphs.append(graph)
    if rng.random() < 0.5 and len(graphs[0]) > 0:  # a dependency across graphs, as fusion creates them
        last = graphs[1][-1]
        graphs[1][-1] = Subgraph(last.name, last.htask, last.operators, (*last.depends_on, graphs[0][0].key))
    return with_priorities(graphs)


BUCKETS = st.builds(lambda seed: random_bucket(random.Random(seed), 8), st.integers(0, 10**9))


def naive_algorithm_1(graphs: Graphs) -> list[tuple[str, float]]:
    """The listing with a plain list for the queue; what is in it already is not enqueued again."""
    remaining = [list(graph) for graph in graphs]
    queue: list[tuple[int, Subgraph]] = []
    order: list[tuple[str, float]] = []
    t = 0.0

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
        order.append((item.key, t))
        t += item.latency_s
    return order


@pytest.mark.parametrize(
    ("direction", "names"),
    [
        ("forward", ["layer0.output.all_reduce", "layer0.down.all_reduce"]),
        ("backward", ["layer0.backward.gate_up.all_reduce", "layer0.backward.qkv.all_reduce"]),
    ],
)
def test_a_layer_has_its_all_reduces_after_the_adds_of_the_partial_sums(direction: str, names: list[str]) -> None:
    graph = a_layer(direction=direction)
    sent = [operator for operator in graph.operators if operator.kind == "communication"]
    assert [operator.name for operator in sent] == names
    assert [operator.depends_on for operator in sent] == [(name.replace("all_reduce", "add"),) for name in names]
    assert sum(operator.latency_s for operator in graph.operators) == 23 + 4 * 0.75 + 2 * 1.5


def test_a_decoder_layer_is_cut_as_the_docstring_draws_it() -> None:
    cut = segment(a_layer())
    assert [(item.priority, [o.name.removeprefix("layer0.") for o in item.operators]) for item in cut] == [
        (0, ["qkv"]),
        (0, ["qkv.lora.t"]),
        (1, ["qkv.add", "attention"]),
        (2, ["output.lora.t"]),
        (3, ["output", "output.add", "output.all_reduce"]),
        (4, ["gate_up"]),
        (4, ["gate_up.lora.t"]),
        (5, ["gate_up.add"]),
        (6, ["down.lora.t"]),
        (7, ["down", "down.add", "down.all_reduce"]),
    ]
    output = cut[4]
    assert (output.compute_s, output.communication_s, output.latency_s) == (2.25, 1.5, 3.75)
    assert output.depends_on == ("h0/layer0.qkv.add", "h0/layer0.output.lora.t")


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


@given(operator_graphs())
def test_segments_isolate_adapters_and_end_in_the_communication_of_their_operators(graph: OperatorGraph) -> None:
    operators = {operator.name: operator for operator in graph.operators}
    waits: dict[str, frozenset[str]] = {}
    for name in graph.topological_order():
        before = [waits[other] | ({other} & sent(operators)) for other in operators[name].depends_on]
        waits[name] = frozenset().union(*before)
    cut = segment(graph)
    owner = {operator.name: item for item in cut for operator in item.operators}
    for item in cut:
        kinds = [operator.kind for operator in item.operators]
        if "adapter" in kinds:
            assert kinds == ["adapter"] + ["communication"] * (len(kinds) - 1)
        computes = [operator.name for operator in item.operators if operator.kind == "compute"]
        assert kinds[: len(computes)] == ["compute"] * len(computes) or "adapter" in kinds
        assert len({waits[name] for name in computes}) <= 1, "one waits for a communication that others do not need"
    for operator in graph.operators:
        if operator.kind == "communication" and len(operator.depends_on) == 1:
            assert owner[operator.name] is owner[operator.depends_on[0]]


def sent(operators: dict[str, Operator]) -> frozenset[str]:
    return frozenset(name for name, operator in operators.items() if operator.kind == "communication")


@given(BUCKETS)
def test_the_schedule_equals_algorithm_1_written_naively(graphs: Graphs) -> None:
    launches = [(launch.key, launch.t_s) for launch in schedule(graphs)]
    assert launches == naive_algorithm_1(graphs)


@given(BUCKETS, st.sampled_from([0.0, 0.4]))
def test_no_stream_runs_two_things_at_once_and_nothing_starts_before_what_it_needs(
    graphs: Graphs, slowdown: float
) -> None:
    subgraphs = {item.key: item for graph in graphs for item in graph}
    launches = schedule(graphs)
    timeline = simulate_streams(launches, graphs, compute_slowdown=slowdown)
    spans = dict(zip((launch.key for launch in launches), timeline.spans, strict=True))
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
    total_s = sum(item.compute_s + item.communication_s for item in subgraphs.values())
    assert timeline.makespan_s == max(span.end_s for span in timeline.spans)
    assert slowdown or timeline.makespan_s <= total_s + 1e-9, "one of the streams is always busy"
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
    assert compute_stall_s(timeline) == pytest.approx(all_reduce), "the last all-reduce has nothing left to hide under"
    assert communication_busy_s(timeline) == pytest.approx(num_htasks * 4 * all_reduce)


def permuted_best_s(graphs: Graphs) -> float:
    """The shortest makespan over all permutations that keep the dependencies."""
    items = [item for graph in graphs for item in graph]
    best_s = float("inf")
    for order in itertools.permutations(items):
        seen: set[str] = set()
        if all(seen.issuperset(item.depends_on) and not seen.add(item.key) for item in order):
            best_s = min(best_s, simulate_streams(launches_of(order), graphs).makespan_s)
    return best_s


@given(st.integers(0, 10**9))
def test_the_exhaustive_search_finds_the_best_of_all_permutations(seed: int) -> None:
    graphs = random_bucket(random.Random(seed), 6)
    launches, best_s = best_schedule(graphs)
    assert best_s == pytest.approx(permuted_best_s(graphs))
    assert simulate_streams(launches, graphs).makespan_s == pytest.approx(best_s)


@given(BUCKETS)
def test_algorithm_1_takes_at_most_twice_as_long_as_the_best_order(graphs: Graphs) -> None:
    assert simulate_streams(schedule(graphs), graphs).makespan_s <= 2 * best_schedule(graphs)[1] + 1e-9


def test_the_bound_of_two_is_tight() -> None:
    graphs = [[unit("compute", "h0", 1.0)], [unit("send", "h1", 0.0, 0.999)]]
    assert simulate_streams(schedule(graphs), graphs).makespan_s == pytest.approx(1.999)
    assert best_schedule(graphs)[1] == 1.0


def test_algorithm_1_is_near_the_best_order_where_communication_is_shorter_than_compute() -> None:
    ratios = []
    for seed in range(50):
        graphs = random_bucket(random.Random(seed), 8, short_communication=True)
        ratios.append(simulate_streams(schedule(graphs), graphs).makespan_s / best_schedule(graphs)[1])
    assert min(ratios) >= 1 - 1e-12
    assert statistics.median(ratios) < 1.02
    assert max(ratios) < 1.35
