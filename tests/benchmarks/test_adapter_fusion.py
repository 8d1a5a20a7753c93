"""Adapters are fused within an hTask and across single-task hTasks of a bucket, and never slow a bucket (M §3.4.3)."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.planner.subgraphs.adapter_fusion import fuse_adapters, fuse_site, fused_latency_s
from benchmarks.planner.subgraphs.graph import Operator, OperatorGraph, segment
from benchmarks.planner.subgraphs.layers import WIDTHS, AdapterLatency, LayerLatency, layer_graph
from benchmarks.planner.subgraphs.schedule import compute_busy_s, simulate_streams

LAYER = LayerLatency(qkv_s=6.0, attention_s=3.0, output_s=2.0, gate_up_s=8.0, down_s=4.0, all_reduce_s=1.5)


def an_htask(number: int, tasks: int = 1, utilization: float = 0.25, num_layers: int = 1) -> OperatorGraph:
    names = [f"t{number}{letter}" for letter in "abcdef"[:tasks]]
    adapters = [AdapterLatency(name, linear, 1.0, 0.25, utilization) for name in names for linear in WIDTHS]
    return layer_graph(f"h{number}", LAYER, adapters, tasks=names, num_layers=num_layers)


def adapter(name: str, before: tuple[str, ...], site: str, latency_s: float = 1.0) -> Operator:
    return Operator(name, "adapter", latency_s, before, utilization=0.5, site=site)


@pytest.mark.parametrize(
    ("shares", "latencies", "expected"),
    [
        ((0.25, 0.25), (2.0, 2.0), 2.0),  # the slowest bounds it
        ((0.75, 0.75), (2.0, 2.0), 3.0),  # the device is full
        ((1.0, 1.0, 1.0), (1.0, 2.0, 3.0), 6.0),  # no gain
        ((0.5,), (4.0,), 4.0),  # of one adapter it is that adapter
    ],
)
def test_fused_latency_is_that_of_equation_3(shares, latencies, expected: float) -> None:
    members = [
        Operator(str(n), "adapter", t, utilization=u) for n, (u, t) in enumerate(zip(shares, latencies, strict=True))
    ]
    assert fused_latency_s(members) == expected
    launched = [replace(one, latency_s=one.latency_s + 0.5, launch_s=0.5) for one in members]
    assert fused_latency_s(launched) == expected + 0.5, "its launches are paid once"


def test_single_task_htasks_of_a_bucket_share_their_adapters_at_every_site() -> None:
    bucket = fuse_adapters([an_htask(number) for number in range(3)])
    assert bucket.fused_sites == tuple(f"layer0.{linear}.lora" for linear in WIDTHS)
    first = [item for item in bucket.graphs[0] if item.is_adapter]
    assert [item.fused_with for item in first] == [
        tuple(f"h{n}/layer0.{linear}.lora.t{n}a" for n in (1, 2)) for linear in WIDTHS
    ]
    assert not any(item.is_adapter for graph in bucket.graphs[1:] for item in graph)
    (add,) = [item for item in bucket.graphs[2] if item.name == "layer0.qkv.add"]
    assert add.depends_on == ("h2/layer0.qkv", "h0/layer0.qkv.lora.t0a")
    saved_s = 4 * (3 - 1) * 1.0  # three adapters of 1 s take 1 s together
    assert bucket.unfused_makespan_s - bucket.makespan_s == pytest.approx(saved_s)
    timeline = simulate_streams(bucket.launches, bucket.graphs)
    assert timeline.makespan_s - compute_busy_s(timeline) == pytest.approx(1.5)


def test_nothing_is_fused_with_htasks_of_several_tasks() -> None:
    bucket = fuse_adapters([an_htask(0, tasks=2), an_htask(1)])
    assert bucket.fused_sites == ()
    assert not any(item.fused_with for graph in bucket.graphs for item in graph)


def test_a_fusion_that_would_close_a_cycle_is_left_out() -> None:
    there = OperatorGraph("h0", ("a",), (adapter("x", (), "X"), adapter("y", ("x",), "Y")))
    back = OperatorGraph("h1", ("b",), (adapter("y", (), "Y"), adapter("x", ("y",), "X")))
    first = fuse_site([segment(there), segment(back)], "X")
    assert first is not None
    assert fuse_site(first, "Y") is None
    bucket = fuse_adapters([there, back])
    assert len(bucket.fused_sites) == 1


def random_htask(number: int, rng: random.Random) -> OperatorGraph:
    layer = LayerLatency(*(rng.uniform(1, 9) for _ in range(5)), all_reduce_s=rng.uniform(0, 6))
    linears = [linear for linear in WIDTHS if rng.random() < 0.8]
    adapters = [AdapterLatency("t", linear, rng.uniform(0, 3), rng.random(), rng.random()) for linear in linears]
    return layer_graph(f"h{number}", layer, adapters, tasks=["t"], num_layers=rng.randint(1, 2))


@given(st.integers(0, 10**9), st.integers(2, 4))
def test_fusion_keeps_every_operator_once_and_never_makes_the_makespan_longer(seed: int, num_htasks: int) -> None:
    rng = random.Random(seed)
    graphs = [random_htask(number, rng) for number in range(num_htasks)]
    bucket = fuse_adapters(graphs)
    assert bucket.makespan_s <= bucket.unfused_makespan_s * (1 + 1e-9)
    assert bucket.makespan_s == simulate_streams(bucket.launches, bucket.graphs).makespan_s
    items = [item for graph in bucket.graphs for item in graph]
    adapters = [key for item in items if item.is_adapter for key in (item.key, *item.fused_with)]
    expected = [f"{graph.htask}/{o.name}" for graph in graphs for o in graph.operators if o.kind == "adapter"]
    assert sorted(adapters) == sorted(expected)
    others = sorted((item.htask, o.name) for item in items for o in item.operators if o.kind != "adapter")
    assert others == sorted((graph.htask, o.name) for graph in graphs for o in graph.operators if o.kind != "adapter")
