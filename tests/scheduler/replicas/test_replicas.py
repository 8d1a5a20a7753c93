"""Replicas: which configurations are possible, their plans, and the exchange of their gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from peft_mux.scheduler.costs.hardware import parse_devices
from peft_mux.scheduler.costs.latency import CostModel, whole_pass
from peft_mux.scheduler.costs.loads import AdapterLoad, TaskLoad
from peft_mux.scheduler.deployment.search import plan_deployment
from peft_mux.scheduler.parallel_layout import ParallelConfig
from peft_mux.scheduler.plan import Link
from peft_mux.scheduler.planner.planner import Budget, Outcome, plan_tasks
from peft_mux.scheduler.replicas.exchange import GradientExchange
from peft_mux.scheduler.replicas.facts import layer_times, replica_time_model
from peft_mux.scheduler.replicas.replica_planner import ReplicaPlanner
from peft_mux.scheduler.replicas.time_model import ReplicaGroup
from tests.scheduler.replicas.cases import CLUSTER, EIGHT, FACTS, LOADS, ONE, SHAPE_7B, TWO


@pytest.mark.parametrize("config", [ParallelConfig(2, 4), ParallelConfig(1, 7)])
def test_the_limit_is_exactly_what_the_memory_model_allows_on_the_fullest_stage(config: ParallelConfig) -> None:
    tokens = FACTS.memory_tokens(config)
    assert tokens is not None
    model = replace(FACTS.memory, num_stages=config.pp, devices_per_stage=config.tp)

    def peak(count: int) -> int:
        stages = range(config.pp)
        return max(model.peak_bytes(LOADS, count, in_flight=config.pp - stage, stage=stage) for stage in stages)

    assert peak(tokens) <= CLUSTER.device.memory_bytes < peak(tokens + 1)


def test_micro_batches_hold_no_more_than_a_pass_or_the_longest_sequence_and_what_holds_nothing_is_left_out() -> None:
    assert FACTS.token_limits([EIGHT]) == {EIGHT: 16000}
    short = replace(FACTS, loads=(LOADS[0],))
    assert short.token_limits([EIGHT]) == {EIGHT: 4096}
    unlimited = replace(short, limit_bytes=None)
    assert (unlimited.token_limits([ONE]), unlimited.memory_tokens(ONE)) == ({ONE: 4096}, None)
    tight = replace(FACTS, limit_bytes=10 * 10**9)
    assert set(tight.token_limits([ONE, EIGHT])) == {EIGHT}
    assert tight.least_bytes(ONE) > 10 * 10**9 > tight.least_bytes(EIGHT)


@pytest.mark.parametrize(("tp", "num_tasks"), [(1, 1), (2, 2), (16, 1)])
def test_a_layer_takes_what_the_cost_model_says_of_such_a_micro_batch(tp: int, num_tasks: int) -> None:
    """Whole sequences of one length, of either task: M Eq. 3, with the ends and launches spread over layers."""
    cut = tuple(AdapterLoad(rank, width, width // 2) for rank, width in ((8, 8192), (8, 8192), (16, 15104)))
    time = next(time for time in layer_times(FACTS, tp, 8192) if time.num_sequences == 2 and time.length_tokens > 600)
    per_task = 2 // num_tasks
    loads = tuple(
        TaskLoad(str(number), (time.length_tokens,) * per_task, 301 * per_task, cut, 0) for number in range(num_tasks)
    )
    facts = replace(FACTS, profile=replace(FACTS.profile, attention_call_s=1e-5), loads=loads)
    found = next(
        other for other in layer_times(facts, tp, 8192) if replace(other, seconds=1) == replace(time, seconds=1)
    )
    # Two nodes of 8: 8 ports of 25 GB/s.
    link = CLUSTER.intra_node if tp <= 8 else Link(15e-6, 200e9)
    cost = CostModel(facts.profile, SHAPE_7B, devices_per_stage=tp, tensor_link=link)
    seconds = cost.passes_s(loads, [whole_pass(loads)]).item()
    assert found.seconds == pytest.approx(seconds / SHAPE_7B.num_layers)


ROWS = tuple(load.lengths for load in LOADS)
PLANNER = ReplicaPlanner(FACTS, max_tokens=4096)


def planned(config: ParallelConfig, rows: Sequence[Sequence[int]], planner: ReplicaPlanner = PLANNER) -> Outcome:
    found = planner.plan(config, rows)
    assert found is not None
    return found


def test_a_replica_of_all_rows_takes_what_the_planner_of_a_run_says() -> None:
    cost = CostModel(FACTS.profile, FACTS.shape, devices_per_stage=8, tensor_link=FACTS.links.intra_node)  # type: ignore[union-attr]
    memory = replace(FACTS.memory, devices_per_stage=8)
    plan = plan_tasks(LOADS, cost, memory, Budget(4096, FACTS.limit_bytes))
    assert PLANNER.step_s(EIGHT, ROWS) == pytest.approx(plan.step_s)
    num_plans = PLANNER.num_plans
    assert planned(EIGHT, [list(own) for own in ROWS]).htasks == plan.htasks
    assert PLANNER.num_plans == num_plans, "a plan is made once"


def test_a_pipeline_is_planned_with_its_stages_and_its_links() -> None:
    deep, chat = ParallelConfig(2, 4), (LOADS[0].lengths, ())
    outcome = planned(deep, chat)
    assert outcome.template is not None
    assert len(outcome.peak_bytes) == 4
    slow_links = replace(FACTS.links, devices_per_node=4, inter_node=Link(1e-4, 1e9))  # type: ignore[type-var]
    slow = ReplicaPlanner(replace(FACTS, links=slow_links), max_tokens=4096)
    assert slow.step_s(deep, chat) > PLANNER.step_s(deep, chat)
    three = ParallelConfig(2, 3)
    first, second = (PLANNER.step_s(three, chat, FACTS.stage_links(three, 1, device)) for device in (0, 6))
    assert first == PLANNER.step_s(three, chat) < second, "devices 6 to 11 are on two nodes"
    assert FACTS.stage_links(three, 2) == FACTS.stage_links(three, 1, 6), "the slowest of two"


def test_a_task_without_rows_is_still_updated_and_a_replica_without_any_does_nothing() -> None:
    chat = (LOADS[0].lengths[:8], ())
    outcome = planned(EIGHT, chat)
    assert [htask.tasks for htask in outcome.htasks] == [("chat",)]
    assert PLANNER.step_s(EIGHT, chat) > outcome.step_s
    assert PLANNER.step_s(EIGHT, ((), ())) == 0.0


def test_rows_that_a_replica_does_not_hold_have_no_plan() -> None:
    limit = FACTS.token_limits([ONE])[ONE]
    assert math.isfinite(PLANNER.step_s(ONE, ((limit,), ())))
    assert PLANNER.step_s(ONE, ((limit + 1,), ())) == math.inf


@pytest.mark.parametrize("config", [ONE, ParallelConfig(1, 2)], ids=str)
def test_gradients_are_ready_when_the_last_backward_of_their_htask_ends(config: ParallelConfig) -> None:
    planner = ReplicaPlanner(replace(FACTS, limit_bytes=None), max_tokens=4096, policy="interleaved")
    outcome = planned(config, ROWS, planner)
    assert sorted(htask.tasks for htask in outcome.htasks) == [("books",), ("chat",)]
    ready_s = planner.ready_s(config, ROWS)
    computing_s = outcome.step_s - planner._models_of(config)[0].outside_s(LOADS)
    assert max(ready_s.values()) == pytest.approx(computing_s)
    # One stage runs one hTask after the other, longest first.
    if config == ONE:
        books, _ = outcome.htasks
        assert ready_s["books"] == pytest.approx(books.micro_batches * books.pass_s, rel=0.01)
    assert ready_s["books"] != ready_s["chat"]
    assert planner.ready_s(config, [ROWS[0], ()]).keys() == ready_s.keys()
    assert planner.ready_s(config, [ROWS[0], ()])["books"] == 0


STAGES = ParallelConfig(1, 2)


def exchange_of(devices: str, *parameters: int, cut: int = 0) -> GradientExchange:
    """Return the exchange of tasks a, b and so on with so many parameters each."""
    loads = tuple(
        TaskLoad(name, (100,), 50, (), size, cut_parameters=cut) for name, size in zip("abc", parameters, strict=False)
    )
    return GradientExchange(loads, replace(FACTS, loads=loads, links=parse_devices(devices)))


def ring_s(size: int, num_bytes: float, latency_s: float = 5e-6, bytes_per_s: float = 380e9) -> float:
    """Return the seconds of a ring of so many ranks; by default over the links within a node of H100s."""
    return 2 * (size - 1) * (latency_s + num_bytes / size / bytes_per_s)


def seconds(exchange: GradientExchange, *replicas: tuple[ParallelConfig, int]) -> float:
    return exchange.seconds_of([ReplicaGroup(config, count, 1) for config, count in replicas])


def test_many_adapters_on_64_gpus_take_longer_to_add_than_their_passes() -> None:
    # 4.76G parameters, halved by two stages, over a ring of 32 at 25 GB/s and 15 us a message: each node of two devices
    # has one rank of each stage, and one port for it.
    found = seconds(exchange_of("32x2xH100-80GB", 4_760_000_000), (STAGES, 32))
    assert found == pytest.approx(ring_s(32, 4 * 4.76e9 / 2, 15e-6, 25e9), rel=1e-12)
    assert found == pytest.approx(0.74, abs=0.003)
    # Nodes of 8 have 4 ranks of each of two stages: 4 ports for each, and so a quarter of the seconds for the bytes.
    nodes_of_8 = seconds(exchange_of("8x8xH100-80GB", 4_760_000_000), (STAGES, 32))
    assert nodes_of_8 == pytest.approx(ring_s(32, 4 * 4.76e9 / 2, 15e-6, 100e9), rel=1e-12)


@pytest.mark.parametrize(
    ("tp", "pp", "count", "whole", "cut"),
    [
        # Bandwidth in GB/s of the ring of whole factors and of that of cut ones: 25 for each of its ranks on a node.
        (2, 8, 4, 50, 25),
        (16, 1, 4, 200, 25),
        (8, 1, 8, 200, 25),
        (1, 1, 64, 200, 200),
        (1, 8, 8, 25, 25),
        (1, 4, 16, 50, 50),
        (4, 4, 4, 100, 25),
    ],
)
def test_a_ring_between_nodes_has_the_ports_of_its_ranks_there(
    tp: int, pp: int, count: int, whole: float, cut: float
) -> None:
    exchange = exchange_of("8x8xH100-80GB", 1_000_000_000, cut=600_000_000)
    expected_s = ring_s(tp * count, 4 * 4e8 / pp, 15e-6, whole * 1e9) + ring_s(
        count, 4 * 6e8 / pp / tp, 15e-6, cut * 1e9
    )
    assert seconds(exchange, (ParallelConfig(tp, pp), count)) == pytest.approx(expected_s, rel=1e-12)


def test_sums_of_tasks_that_end_early_are_hidden_by_the_passes_of_others() -> None:
    exchange = exchange_of("8xH100-80GB", 10**9, 10**8, 10**8)
    groups = [ReplicaGroup(ONE, 8, 1)]
    a_s, b_s, c_s = (exchange.of(name).seconds_of(groups) for name in "abc")
    assert exchange.exposed_s(groups, {"a": 5.0, "b": 5.0, "c": 5.0}) == pytest.approx(a_s + b_s + c_s)
    assert exchange.exposed_s(groups, {"a": 0.0, "b": 4.0, "c": 5.0}) == pytest.approx(c_s)
    assert exchange.exposed_s(groups, {"a": 5.0, "b": 4.0, "c": 0.0}) == pytest.approx(a_s), "in order of their ends"
    late = {"a": 5.0 - a_s / 2, "b": 5.0 - a_s / 4, "c": 5.0}
    assert exchange.exposed_s(groups, late) == pytest.approx(a_s / 2 + b_s + c_s)


def test_an_exchange_is_that_of_the_fullest_device_over_the_links_of_its_node() -> None:
    exchange, three = exchange_of("8xH100-80GB", 1_000_000), exchange_of("8xH100-80GB", *[1_000_000] * 3)
    cut = exchange_of("8xH100-80GB", 1_000_000, cut=600_000)
    cases = [
        (exchange, [(ONE, 8)], ring_s(8, 4e6)),
        (exchange, [(STAGES, 2), (ONE, 2)], ring_s(4, 4e6)),
        (three, [(ONE, 8)], 3 * ring_s(8, 4e6)),  # every task pays the latency of its own sums
        # Tensor-parallel ranks add the factors that are not cut and share the others.
        (cut, [(TWO, 4)], ring_s(8, 4 * 400_000) + ring_s(4, 4 * 300_000)),
        (cut, [(TWO, 1)], ring_s(2, 4 * 400_000)),
        (exchange, [(ONE, 1)], 0),
        (exchange, [(STAGES, 1)], 0),
    ]
    for one, replicas, expected_s in cases:
        assert seconds(one, *replicas) == pytest.approx(expected_s, rel=1e-12)
    one_node, two_nodes = (exchange_of(nodes, 1_000_000) for nodes in ("2x4xH100-80GB", "4x2xH100-80GB"))
    assert seconds(one_node, (ONE, 4)) < seconds(two_nodes, (ONE, 4))
    unknown = replace(FACTS, links=None, profile=replace(FACTS.profile, link=None))
    assert seconds(GradientExchange(LOADS, unknown), (ONE, 8)) == 0


@pytest.mark.parametrize("rank", [pytest.param(8, marks=pytest.mark.nightly), 512])
def test_the_deployment_that_is_fastest_with_its_exchange_is_chosen(rank: int) -> None:
    loads = tuple(replace(load, trainable_parameters=rank * 10_000_000) for load in LOADS)
    facts = replace(FACTS, loads=loads, limit_bytes=None)
    model = replica_time_model(facts, (ONE, STAGES, ParallelConfig(1, 4), TWO, ParallelConfig(4, 1)))
    exchange = GradientExchange(loads, facts)
    lengths = [length for load in loads for length in load.lengths]
    options = {"proposal": False, "interval": 256, "relative_gap": 0.0}
    counted, every, free = (
        plan_deployment(lengths, len(lengths), 8, model, **options, **more)
        for more in ({"exchange": exchange}, {"exchange": exchange, "lower_bound_filter": False}, {})
    )
    assert counted.expected_step_s <= every.expected_step_s * 1.01
    assert counted.expected_step_s <= (free.expected_step_s + exchange.seconds_of(free.groups)) * 1.01
    assert counted.exchange_s == exchange.seconds_of(counted.groups)
    assert free.exchange_s == 0
    for one in counted.candidates:
        if one.step_s is not None:
            own_s = exchange.seconds_of(model.groups(dict(zip(counted.configurations, one.counts, strict=True))))
            assert one.step_s >= max(own_s, one.bound_s * (1 - 1e-6))
