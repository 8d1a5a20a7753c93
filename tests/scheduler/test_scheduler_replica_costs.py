"""Time models from a profile of one device: limits of each configuration, times that grow as they must, whole plans."""

from __future__ import annotations

import json
import xml.dom.minidom
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from dispatch_cases import KILO_TOKENS_PER_GPU_S, TABLE_LENGTHS

from peft_mux.errors import ConfigError
from peft_mux.scheduler.cost_model import CostModel
from peft_mux.scheduler.deployment import plan_deployment
from peft_mux.scheduler.deployment_baselines import TaskLengths, task_fused
from peft_mux.scheduler.deployment_plan import DeploymentPlan
from peft_mux.scheduler.deployment_report import Alternative, ConfigRow, DeploymentReport
from peft_mux.scheduler.dispatch import dispatch
from peft_mux.scheduler.hardware import parse_devices
from peft_mux.scheduler.loads import AdapterLoad, TaskLoad
from peft_mux.scheduler.memory import MemoryModel, ModelShape
from peft_mux.scheduler.profile import analytic_profile
from peft_mux.scheduler.replica_costs import (
    ReplicaFacts,
    candidate_configs,
    interval_tokens,
    layer_times,
    least_bytes,
    memory_tokens,
    replica_time_model,
    token_limits,
)
from peft_mux.scheduler.replica_time import LayerFit, ReplicaTimeModel
from peft_mux.scheduler.replicas import ParallelConfig

SHAPE_7B = ModelShape(32, 4096, 11008, 4096, 4096, 32000, backbone_bytes=13_476_839_424, activation_bytes=2)
CLUSTER = parse_devices("16xA100-40GB")
ONE, TWO, EIGHT = ParallelConfig(1, 1), ParallelConfig(2, 1), ParallelConfig(8, 1)


def load(name: str, lengths: tuple[int, ...], rank: int = 16) -> TaskLoad:
    adapters = tuple(AdapterLoad(rank, 8192) for _ in range(4))
    return TaskLoad(name, lengths, sum(lengths) // 2, adapters, 32 * 4 * rank * 8192)


LOADS = (load("chat", (200, 300, 90, 120) * 16), load("books", (16000, 4000, 700, 900)))
FACTS = ReplicaFacts(
    SHAPE_7B,
    analytic_profile(CLUSTER.device, SHAPE_7B),
    LOADS,
    MemoryModel(SHAPE_7B),
    CLUSTER.device.memory_bytes,
    pass_tokens=4096,
    links=CLUSTER,
)


def figure_4_model() -> ReplicaTimeModel:
    """Return a model that has the rates of L Table 3."""
    fits, limits = {}, {}
    for (tp, rates), limit in zip(KILO_TOKENS_PER_GPU_S.items(), TABLE_LENGTHS, strict=True):
        token_s = 1 / (1024 * tp * np.array(rates))
        slope, level = np.polyfit(TABLE_LENGTHS[: len(rates)], token_s, 1) if len(rates) > 1 else (0.0, token_s[0])
        fits[tp] = LayerFit((float(slope), 0.0, float(level), 0.0, 0.0, 0.0))
        limits[ParallelConfig(tp, 1)] = limit
    return ReplicaTimeModel(fits, 1, limits)


def figure_4_plan() -> DeploymentPlan:
    counts = (196, 62, 16, 4)
    lengths = [length for length, count in zip(TABLE_LENGTHS, counts, strict=True) for _ in range(count)]
    return plan_deployment(lengths, sum(counts), 16, figure_4_model(), interval=2048)


def report_of(plan: DeploymentPlan, model: ReplicaTimeModel) -> DeploymentReport:
    tasks = [TaskLengths("all", tuple(length for length in TABLE_LENGTHS for _ in range(8)), 32)]
    lengths = TABLE_LENGTHS
    rows = tuple(
        ConfigRow(
            config,
            model.max_tokens[config],
            model.max_tokens[config],
            tuple(model.throughput(config, length, 16) for length in lengths),
            is_proposed=True,
        )
        for config in model.configurations
    )
    return DeploymentReport(
        plan=plan,
        devices="16 x A100-40GB",
        times_from="L Table 3",
        fit_error=0.0,
        limit_bytes=40 * 10**9,
        lengths=lengths,
        configs=rows,
        by_length=dispatch(plan.groups, plan.bucketing, model, policy="length"),
        alternatives=(
            Alternative.of(task_fused(tasks, 16, model), 16),
            Alternative("Task-Sequential", (), None, None, "no task fits"),
        ),
        notes=("one remark",),
    )


# ------------------------------------------------------------------------- limits


def test_more_devices_per_replica_hold_longer_sequences() -> None:
    tokens = [memory_tokens(FACTS, ParallelConfig(tp, 1)) for tp in (1, 2, 4, 8)]
    assert tokens == sorted(tokens, key=lambda number: number or 0)
    assert len(set(tokens)) == 4
    assert tokens[0] is not None
    assert tokens[0] < 16000 < (tokens[3] or 0)


def test_the_limit_is_exactly_what_the_memory_model_allows_on_the_fullest_stage() -> None:
    config = ParallelConfig(2, 4)
    tokens = memory_tokens(FACTS, config)
    assert tokens is not None
    model = replace(FACTS.memory, num_stages=4, devices_per_stage=2)

    def peak(count: int) -> int:
        return max(model.peak_bytes(LOADS, count, in_flight=4 - stage, stage=stage) for stage in range(4))

    assert peak(tokens) <= CLUSTER.device.memory_bytes < peak(tokens + 1)


def test_micro_batches_hold_no_more_than_a_pass_or_the_longest_sequence() -> None:
    assert token_limits(FACTS, [EIGHT]) == {EIGHT: 16000}
    short = replace(FACTS, loads=(LOADS[0],))
    assert token_limits(short, [EIGHT]) == {EIGHT: 4096}
    assert token_limits(replace(short, limit_bytes=None), [ONE]) == {ONE: 4096}
    assert memory_tokens(replace(short, limit_bytes=None), ONE) is None


def test_configurations_that_hold_nothing_are_left_out() -> None:
    tight = replace(FACTS, limit_bytes=10 * 10**9)
    assert set(token_limits(tight, [ONE, EIGHT])) == {EIGHT}
    assert least_bytes(tight, ONE) > 10 * 10**9 > least_bytes(tight, EIGHT)


def test_candidates_have_shards_by_powers_of_two_and_every_depth_that_makes_the_largest_stage_smaller() -> None:
    assert candidate_configs(FACTS, 3) == (ONE, ParallelConfig(1, 2), TWO, ParallelConfig(1, 3))
    found = candidate_configs(FACTS, 16)
    assert {config.tp for config in found} == {1, 2, 4, 8, 16}
    # Of 32 layers nine stages have one with 4, as eight have; eleven have one with 3.
    assert [config.pp for config in found if config.tp == 1] == [1, 2, 3, 4, 5, 6, 7, 8, 11, 16]
    shallow = replace(FACTS, shape=replace(SHAPE_7B, num_layers=2))
    assert max(config.pp for config in candidate_configs(shallow, 16)) == 2
    no_shards = replace(FACTS, supports=lambda config: config.tp == 1)
    assert candidate_configs(no_shards, 4) == (ONE, *(ParallelConfig(1, depth) for depth in (2, 3, 4)))
    assert candidate_configs(replace(FACTS, supports=lambda config: False), 4) == ()


def test_on_many_devices_depths_are_powers_of_two_as_deployments_would_be_too_many() -> None:
    found = candidate_configs(FACTS, 64)
    assert {config.pp for config in found} == {1, 2, 4, 8, 16, 32}
    assert {config.tp for config in found} == {1, 2, 4, 8, 16, 32, 64}


# -------------------------------------------------------------------------- times


def test_a_layer_is_faster_on_two_devices_but_not_twice_as_fast() -> None:
    one, two = (layer_times(FACTS, tp, 16000) for tp in (1, 2))
    assert [(time.length_tokens, time.num_sequences) for time in one] == [
        (time.length_tokens, time.num_sequences) for time in two
    ]
    largest_one, largest_two = (max(times, key=lambda time: time.seconds) for times in (one, two))
    assert largest_one.seconds / 2 < largest_two.seconds < largest_one.seconds


def test_the_sums_of_shards_across_nodes_cost_more_than_within_one() -> None:
    within = replace(FACTS, links=replace(CLUSTER, devices_per_node=16))
    assert layer_times(FACTS, 16, 4096)[-1].seconds > layer_times(within, 16, 4096)[-1].seconds
    assert layer_times(FACTS, 8, 4096) == layer_times(within, 8, 4096)


def test_the_fitted_curve_stays_near_the_times_that_it_was_made_from() -> None:
    model = replica_time_model(FACTS, candidate_configs(FACTS, 16))
    assert max(fit.mean_relative_error for fit in model.fits.values()) < 0.1
    assert max(model.max_tokens.values()) == 16000


def test_larger_replicas_have_lower_throughput_per_device_as_in_table_3() -> None:
    model = replica_time_model(FACTS, [ONE, TWO, EIGHT])
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
    """Whole sequences of one length, of either task alike: M Eq. 3, with the ends and launches spread over layers."""
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
    assert found.seconds == pytest.approx(cost.pass_s(loads, 1) / SHAPE_7B.num_layers)


def test_intervals_are_those_of_the_paper_for_long_and_finer_for_short_sequences() -> None:
    assert [interval_tokens(longest) for longest in (10, 1024, 4096, 16384, 10**6)] == [16, 16, 64, 256, 256]


def test_a_run_s_own_tasks_are_given_replicas_that_hold_each_of_them() -> None:
    model = replica_time_model(FACTS, candidate_configs(FACTS, 16))
    lengths = [length for one in LOADS for length in one.lengths]
    plan = plan_deployment(lengths, len(lengths), 16, model)
    assert max(group.max_tokens for group in plan.groups) >= 16000
    assert len(plan.groups) > 1, "one kind of replica would do here; the case is too easy"


# ------------------------------------------------------------------------ reports


def test_the_example_of_section_3_comes_out_end_to_end() -> None:
    plan = figure_4_plan()
    assert plan.layout == "<1,1>x4, <2,1>x2, <8,1>x1"
    assert plan.bucketing.counts == (196, 62, 16, 4)
    assert [sum(column) for column in zip(*plan.expected.counts, strict=True)] == [196, 62, 16, 4]
    assert plan.expected.counts[2][2:] == (16, 4)
    assert min(plan.utilisation) > 0.98


def test_a_report_shows_candidates_plan_alternatives_and_how_to_run_it() -> None:
    model = figure_4_model()
    report = report_of(figure_4_plan(), model)
    said = str(report)
    for part in (
        "devices  16 x A100-40GB, 37.25 GiB each",
        "times    L Table 3",
        "deployment  <1,1>x4, <2,1>x2, <8,1>x1",
        "Task-Fused",
        "no task fits",
        "note: one remark",
        'to run it: replicas: "<1,1>x4, <2,1>x2, <8,1>x1", on 16 processes',
    ):
        assert part in said
    (row,) = [line.split() for line in said.splitlines() if line.split()[:2] == ["<2,1>", "2"]]
    assert row[2:5] == ["4096", "4096", f"{model.throughput(TWO, 2048, 16):.0f}"]
    assert row[-2:] == ["-", "combined"]
    assert report.picture() == report.plan.picture()


def test_a_report_as_json_says_what_to_run_and_keeps_the_plan() -> None:
    report = report_of(figure_4_plan(), figure_4_model())
    data = json.loads(report.to_json())
    assert data["replicas"] == "<1,1>x4, <2,1>x2, <8,1>x1"
    assert data["gpu_seconds"] == pytest.approx(16 * data["expected_step_s"])
    assert data["utilisation"]["<8,1>x1"] == pytest.approx(report.plan.utilisation[2])
    assert DeploymentPlan.from_json(json.dumps(data["plan"])) == report.plan
    assert [one["name"] for one in data["alternatives"]] == ["Task-Fused", "Task-Sequential"]


def test_a_report_is_drawn_as_in_figure_9(tmp_path: Path) -> None:
    report = report_of(figure_4_plan(), figure_4_model())
    path = report.save_image(tmp_path / "plan.svg")
    written = path.read_text(encoding="utf-8")
    xml.dom.minidom.parseString(written)
    for part in ("length-based dispatch", "balanced dispatch", "&lt;8,1&gt;x1", "16384"):
        assert part in written
    report.save_image(tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text(encoding="utf-8") == written
    with pytest.raises(ConfigError, match=r"ends in \.png or \.svg"):
        report.save_image(tmp_path / "plan.pdf")
