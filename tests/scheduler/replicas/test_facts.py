"""What follows from a profile of one device: limits of each configuration, and layer times that grow as they must."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peft_mux.scheduler.costs.latency import CostModel, whole_pass
from peft_mux.scheduler.costs.loads import AdapterLoad, TaskLoad
from peft_mux.scheduler.deployment.space import candidate_configs
from peft_mux.scheduler.replicas.configs import ParallelConfig
from peft_mux.scheduler.replicas.facts import layer_times, replica_time_model
from tests.scheduler.replicas.cases import CLUSTER, EIGHT, FACTS, LOADS, ONE, SHAPE_7B, TWO


def test_more_devices_per_replica_hold_longer_sequences() -> None:
    tokens = [FACTS.memory_tokens(ParallelConfig(tp, 1)) or 0 for tp in (1, 2, 4, 8)]
    assert tokens == sorted(set(tokens))
    assert 0 < tokens[0] < 16000 < tokens[3]


@pytest.mark.parametrize("config", [ParallelConfig(2, 4), ParallelConfig(1, 7)])
def test_the_limit_is_exactly_what_the_memory_model_allows_on_the_fullest_stage(config: ParallelConfig) -> None:
    tokens = FACTS.memory_tokens(config)
    assert tokens is not None
    model = replace(FACTS.memory, num_stages=config.pp, devices_per_stage=config.tp)

    def peak(count: int) -> int:
        stages = range(config.pp)
        return max(model.peak_bytes(LOADS, count, in_flight=config.pp - stage, stage=stage) for stage in stages)

    assert peak(tokens) <= CLUSTER.device.memory_bytes < peak(tokens + 1)


def test_micro_batches_hold_no_more_than_a_pass_or_the_longest_sequence() -> None:
    assert FACTS.token_limits([EIGHT]) == {EIGHT: 16000}
    short = replace(FACTS, loads=(LOADS[0],))
    assert short.token_limits([EIGHT]) == {EIGHT: 4096}
    unlimited = replace(short, limit_bytes=None)
    assert (unlimited.token_limits([ONE]), unlimited.memory_tokens(ONE)) == ({ONE: 4096}, None)


def test_configurations_that_hold_nothing_are_left_out() -> None:
    tight = replace(FACTS, limit_bytes=10 * 10**9)
    assert set(tight.token_limits([ONE, EIGHT])) == {EIGHT}
    assert tight.least_bytes(ONE) > 10 * 10**9 > tight.least_bytes(EIGHT)


def test_a_layer_is_faster_on_two_devices_but_not_twice_as_fast() -> None:
    one, two = (layer_times(FACTS, tp, 16000) for tp in (1, 2))
    assert [replace(time, tp=2, seconds=1) for time in one] == [replace(time, seconds=1) for time in two]
    largest_one, largest_two = (max(time.seconds for time in times) for times in (one, two))
    assert largest_one / 2 < largest_two < largest_one


def test_the_sums_of_shards_across_nodes_cost_more_than_within_one() -> None:
    within = replace(FACTS, links=replace(CLUSTER, devices_per_node=16))
    assert layer_times(FACTS, 16, 4096)[-1].seconds > layer_times(within, 16, 4096)[-1].seconds
    assert layer_times(FACTS, 8, 4096) == layer_times(within, 8, 4096)


def test_the_fitted_curve_is_near_its_times_and_larger_replicas_have_lower_throughput_as_in_table_3() -> None:
    model = replica_time_model(FACTS, candidate_configs(FACTS, 16))
    assert max(fit.mean_relative_error for fit in model.fits.values()) < 0.1
    assert max(model.max_tokens.values()) == 16000
    rates = [model.throughput(config, 2048, 16) for config in (ONE, TWO, EIGHT)]
    assert rates == sorted(rates, reverse=True)


def test_adapters_cost_time_and_more_of_them_more() -> None:
    none = replace(FACTS, loads=tuple(replace(one, adapters=()) for one in LOADS))
    twice = replace(FACTS, loads=tuple(replace(one, adapters=one.adapters * 2) for one in LOADS))
    seconds = [layer_times(facts, 1, 4096)[-1].seconds for facts in (none, FACTS, twice)]
    assert seconds[0] < seconds[1] < seconds[2]


@pytest.mark.parametrize("tp", [1, 2, 8, 16])
@pytest.mark.parametrize("num_tasks", [1, 2])
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
    link = CLUSTER.intra_node if tp <= CLUSTER.devices_per_node else CLUSTER.inter_node
    cost = CostModel(facts.profile, SHAPE_7B, devices_per_stage=tp, tensor_link=link)
    seconds = cost.passes_s(loads, [whole_pass(loads)]).item()
    assert found.seconds == pytest.approx(seconds / SHAPE_7B.num_layers)
