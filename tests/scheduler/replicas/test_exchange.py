"""The exchange of gradients: hand-computed rings, and deployments that are chosen with it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from peft_mux.scheduler.costs.hardware import parse_devices
from peft_mux.scheduler.costs.loads import TaskLoad
from peft_mux.scheduler.deployment.search import plan_deployment, replica_groups
from peft_mux.scheduler.replicas.configs import ParallelConfig, ReplicaGroup
from peft_mux.scheduler.replicas.exchange import GradientExchange
from peft_mux.scheduler.replicas.facts import replica_time_model
from tests.scheduler.replicas.cases import EIGHT, FACTS, LOADS, ONE, TWO

STAGES = ParallelConfig(1, 2)


def exchange_of(devices: str, parameters: int, cut: int = 0) -> GradientExchange:
    load = TaskLoad("a", (100,), 50, (), parameters, cut_parameters=cut)
    return GradientExchange((load,), replace(FACTS, loads=(load,), links=parse_devices(devices)))


def seconds(exchange: GradientExchange, *replicas: tuple[ParallelConfig, int]) -> float:
    return exchange.seconds_of([ReplicaGroup(config, count, 1) for config, count in replicas])


def test_many_adapters_on_64_gpus_take_longer_to_add_than_their_passes() -> None:
    # 4.76G parameters, halved by two stages, over a ring of 32 at 25 GB/s and 15 us a message: each node of two devices
    # has one rank of each stage, and one port for it.
    found = seconds(exchange_of("32x2xH100-80GB", 4_760_000_000), (STAGES, 32))
    assert found == pytest.approx(2 * 31 * (15e-6 + 4 * 4.76e9 / 2 / 32 / 25e9), rel=1e-12)
    assert found == pytest.approx(0.74, abs=0.003)


def test_groups_of_ranks_share_the_ports_of_a_node() -> None:
    # Nodes of 8 have 4 ranks of each of two stages: 4 ports for each, and so a quarter of the seconds for the bytes.
    exchange = exchange_of("8x8xH100-80GB", 4_760_000_000)
    found = seconds(exchange, (STAGES, 32))
    assert found == pytest.approx(2 * 31 * (15e-6 + 4 * 4.76e9 / 2 / 32 / 100e9), rel=1e-12)
    two_ports = replace(exchange, facts=replace(exchange.facts, links=replace(exchange.facts.links, ports_per_node=2)))
    slower = seconds(two_ports, (STAGES, 32))
    assert slower == pytest.approx(2 * 31 * (15e-6 + 4 * 4.76e9 / 2 / 32 / 25e9), rel=1e-12)
    # Ports cannot send more than the links within the node bring.
    many = replace(exchange, facts=replace(exchange.facts, links=replace(exchange.facts.links, ports_per_node=64)))
    assert seconds(many, (ONE, 64)) == pytest.approx(2 * 63 * (15e-6 + 4 * 4.76e9 / 64 / 380e9), rel=1e-12)


def test_every_task_pays_the_latency_of_its_own_sums() -> None:
    loads = tuple(TaskLoad(name, (100,), 50, (), 1_000_000) for name in "abc")
    exchange = GradientExchange(loads, replace(FACTS, loads=loads, links=parse_devices("8xH100-80GB")))
    assert seconds(exchange, (ONE, 8)) == pytest.approx(3 * 2 * 7 * (5e-6 + 4e6 / 8 / 380e9), rel=1e-12)


def test_sums_of_tasks_that_end_early_are_hidden_by_the_passes_of_others() -> None:
    loads = tuple(TaskLoad(name, (100,), 50, (), size) for name, size in {"a": 10**9, "b": 10**8, "c": 10**8}.items())
    exchange = GradientExchange(loads, replace(FACTS, loads=loads, links=parse_devices("8xH100-80GB")))
    groups = [ReplicaGroup(ONE, 8, 1)]
    a_s, b_s, c_s = (exchange.of(name).seconds_of(groups) for name in "abc")
    assert exchange.exposed_s(groups, {"a": 5.0, "b": 5.0, "c": 5.0}) == pytest.approx(a_s + b_s + c_s)
    assert exchange.exposed_s(groups, {"a": 0.0, "b": 4.0, "c": 5.0}) == pytest.approx(c_s)
    late = {"a": 5.0 - a_s / 2, "b": 5.0 - a_s / 4, "c": 5.0}
    assert exchange.exposed_s(groups, late) == pytest.approx(a_s / 2 + b_s + c_s)


def test_within_a_node_the_links_of_the_node_count() -> None:
    exchange = exchange_of("8xH100-80GB", 1_000_000)
    assert seconds(exchange, (ONE, 8)) == pytest.approx(2 * 7 * (5e-6 + 4e6 / 8 / 380e9), rel=1e-12)
    assert seconds(exchange_of("2x4xH100-80GB", 1_000_000), (ONE, 4)) < seconds(
        exchange_of("4x2xH100-80GB", 1_000_000), (ONE, 4)
    )


def test_tensor_parallel_ranks_add_the_factors_that_are_not_cut_and_share_the_others() -> None:
    exchange = exchange_of("8xH100-80GB", 1_000_000, cut=600_000)
    whole = 2 * 7 * (5e-6 + 4 * 400_000 / 8 / 380e9)
    cut = 2 * 3 * (5e-6 + 4 * 300_000 / 4 / 380e9)
    assert seconds(exchange, (TWO, 4)) == pytest.approx(whole + cut, rel=1e-12)
    alone = 2 * 1 * (5e-6 + 4 * 400_000 / 2 / 380e9)
    assert seconds(exchange, (TWO, 1)) == pytest.approx(alone, rel=1e-12)


def test_a_single_device_or_an_unknown_link_takes_no_time() -> None:
    assert seconds(exchange_of("8xH100-80GB", 1_000_000), (ONE, 1)) == 0
    assert seconds(exchange_of("8xH100-80GB", 1_000_000), (STAGES, 1)) == 0
    unknown = replace(FACTS, links=None, profile=replace(FACTS.profile, link=None))
    assert seconds(GradientExchange(LOADS, unknown), (ONE, 8)) == 0


def test_the_device_with_most_gradients_decides_among_unequal_replicas() -> None:
    exchange = exchange_of("8xH100-80GB", 1_000_000)
    ring = 2 * 3 * (5e-6 + 4e6 / 4 / 380e9)
    assert seconds(exchange, (STAGES, 2), (ONE, 2)) == pytest.approx(ring, rel=1e-12)


def test_many_deployments_at_once_are_priced_as_each_alone() -> None:
    configs = (ONE, STAGES, TWO, EIGHT)
    counts = np.random.default_rng(0).integers(0, 4, size=(50, 4))
    counts[:, 0] += counts.sum(axis=1) == 0
    exchange = exchange_of("16xA100-40GB", 50_000_000, cut=20_000_000)
    alone = [
        seconds(exchange, *((config, int(count)) for config, count in zip(configs, row, strict=True) if count))
        for row in counts
    ]
    np.testing.assert_allclose(exchange.seconds(configs, counts), alone, rtol=1e-12)


@pytest.mark.parametrize("rank", [8, 512])
def test_the_deployment_that_is_fastest_with_its_exchange_is_chosen(rank: int) -> None:
    loads = tuple(replace(load, trainable_parameters=rank * 10_000_000) for load in LOADS)
    facts = replace(FACTS, loads=loads, limit_bytes=None)
    model = replica_time_model(facts, (ONE, STAGES, ParallelConfig(1, 4), TWO, ParallelConfig(4, 1)))
    exchange = GradientExchange(loads, facts)
    lengths = [length for load in loads for length in load.lengths]
    options = {"proposal": False, "interval": 256, "relative_gap": 0.0}
    counted = plan_deployment(lengths, len(lengths), 8, model, exchange=exchange, **options)
    every = plan_deployment(lengths, len(lengths), 8, model, exchange=exchange, lower_bound_filter=False, **options)
    free = plan_deployment(lengths, len(lengths), 8, model, **options)
    assert counted.expected_step_s <= every.expected_step_s * 1.01
    assert counted.expected_step_s <= (free.expected_step_s + exchange.seconds_of(free.groups)) * 1.01
    assert counted.exchange_s == exchange.seconds_of(counted.groups)
    assert free.exchange_s == 0
    for one in counted.candidates:
        if one.step_s is not None:
            own_s = exchange.seconds_of(replica_groups(counted.configurations, one.counts, model))
            assert one.step_s >= max(own_s, one.bound_s * (1 - 1e-6))
