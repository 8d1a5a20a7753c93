"""Reports of a deployment: the example of L section 3 as tables, JSON and a picture."""

from __future__ import annotations

import json
import xml.dom.minidom
from pathlib import Path

import numpy as np
import pytest

from peft_mux.errors import ConfigError
from peft_mux.scheduler.deployment.baselines import Baseline, task_fused
from peft_mux.scheduler.deployment.plan import DeploymentPlan, FailureOverhead
from peft_mux.scheduler.deployment.report import ConfigRow, DeploymentReport, save_deployment
from peft_mux.scheduler.deployment.search import plan_deployment
from peft_mux.scheduler.deployment.space import TaskLengths
from peft_mux.scheduler.dispatching.dispatch import dispatch
from peft_mux.scheduler.replicas.time_model import LayerFit, ParallelConfig, ReplicaTimeModel
from peft_mux.scheduler.units import rate_text
from tests.scheduler.dispatching.cases import KILO_TOKENS_PER_GPU_S, TABLE_LENGTHS
from tests.scheduler.replicas.cases import TWO


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
        alternatives=(task_fused(tasks, 16, model), Baseline("Task-Sequential", note="no task fits")),
        notes=("one remark",),
    )


def test_the_example_of_section_3_comes_out_end_to_end() -> None:
    plan = figure_4_plan()
    assert plan.layout == "<8,1>x1, <2,1>x2, <1,1>x4"
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
        "deployment  <8,1>x1, <2,1>x2, <1,1>x4",
        "Task-Fused",
        "no task fits",
        "note: one remark",
        'to run it: replicas: "<8,1>x1, <2,1>x2, <1,1>x4", on 16 processes',
    ):
        assert part in said
    (row,) = [line.split() for line in said.splitlines() if line.split()[:2] == ["<2,1>", "2"]]
    assert row[2:5] == ["4096", "4096", rate_text(model.throughput(TWO, 2048, 16))]
    assert row[-2:] == ["-", "combined"]
    assert report.picture() == report.plan.picture()


def test_a_report_as_json_says_what_to_run_and_keeps_the_plan() -> None:
    report = report_of(figure_4_plan(), figure_4_model())
    data = json.loads(report.to_json())
    assert data["replicas"] == "<8,1>x1, <2,1>x2, <1,1>x4"
    assert data["gpu_seconds"] == pytest.approx(16 * data["expected_step_s"])
    assert data["utilisation"]["<8,1>x1"] == pytest.approx(report.plan.utilisation[2])
    assert data["plan"]["groups"][0] == {"config": {"tp": 1, "pp": 1}, "count": 4, "max_tokens": 2048, "slowness": 1.0}
    assert data["plan"]["candidates"][0]["verdict"] == "chosen"
    assert [one["name"] for one in data["alternatives"]] == ["Task-Fused", "Task-Sequential"]


def test_failures_cost_what_young_s_interval_loses() -> None:
    # 4 failures a day and checkpoints of 50 GB: sqrt(2 x 50 x 21,600) s between checkpoints.
    lost = FailureOverhead.of(4, 50e9, restart_s=180)
    assert lost.save_every_s == pytest.approx(1469.7, abs=0.1)
    assert lost.lost_share == pytest.approx(50 / 1469.7 + (180 + 1469.7 / 2) / 21_600, abs=1e-5)
    for other_s in (0.8 * lost.save_every_s, 1.25 * lost.save_every_s):
        assert lost.lost_share < 50 / other_s + (180 + other_s / 2) / 21_600
    assert FailureOverhead.of(10_000, 50e9).lost_share == 1
    assert FailureOverhead.of(4, 0).lost_share == pytest.approx(180 / 21_600)


def test_a_report_is_drawn_as_in_figure_9(tmp_path: Path) -> None:
    report = report_of(figure_4_plan(), figure_4_model())
    path = save_deployment(report, tmp_path / "plan.svg")
    written = path.read_text(encoding="utf-8")
    xml.dom.minidom.parseString(written)
    for part in ("length-based dispatch", "balanced dispatch", "&lt;8,1&gt;x1", "16384"):
        assert part in written
    save_deployment(report, str(tmp_path / "again.svg"))
    assert (tmp_path / "again.svg").read_text(encoding="utf-8") == written
    with pytest.raises(ConfigError, match=r"ends in \.png or \.svg"):
        save_deployment(report, tmp_path / "plan.pdf")
