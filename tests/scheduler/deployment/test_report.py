"""The example of L section 3 from rates to a deployment, and what failures cost."""

from __future__ import annotations

import numpy as np
import pytest

from peft_mux.scheduler.deployment.deployment_plan import DeploymentPlan, FailureOverhead
from peft_mux.scheduler.deployment.search import plan_deployment
from peft_mux.scheduler.parallel_layout import ParallelConfig
from peft_mux.scheduler.replicas.time_model import LayerFit, ReplicaTimeModel
from tests.scheduler.dispatching.cases import KILO_TOKENS_PER_GPU_S, TABLE_LENGTHS


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


def test_the_example_of_section_3_comes_out_end_to_end() -> None:
    plan = figure_4_plan()
    assert plan.layout == "<8,1>x1, <2,1>x2, <1,1>x4"
    assert plan.bucketing.counts == (196, 62, 16, 4)
    assert [sum(column) for column in zip(*plan.expected.counts, strict=True)] == [196, 62, 16, 4]
    assert plan.expected.counts[2][2:] == (16, 4)
    assert min(plan.utilisation) > 0.98


def test_failures_cost_what_young_s_interval_loses() -> None:
    # 4 failures a day and checkpoints of 50 GB: sqrt(2 x 50 x 21,600) s between checkpoints.
    lost = FailureOverhead.of(4, 50e9, restart_s=180)
    assert lost.save_every_s == pytest.approx(1469.7, abs=0.1)
    assert lost.lost_share == pytest.approx(50 / 1469.7 + (180 + 1469.7 / 2) / 21_600, abs=1e-5)
    for other_s in (0.8 * lost.save_every_s, 1.25 * lost.save_every_s):
        assert lost.lost_share < 50 / other_s + (180 + other_s / 2) / 21_600
    assert FailureOverhead.of(10_000, 50e9).lost_share == 1
    assert FailureOverhead.of(4, 0).lost_share == pytest.approx(180 / 21_600)
    # 5 GB/s: 10 s a checkpoint, every sqrt(2 * 10 * 21,600) = 657.3 s; 60 s a restart.
    fast = FailureOverhead.of(4, 50e9, restart_s=60, storage_gb_per_s=5)
    assert fast.save_every_s == pytest.approx(432_000**0.5, rel=1e-12)
    assert fast.lost_share == pytest.approx(10 / 432_000**0.5 + (60 + 432_000**0.5 / 2) / 21_600, rel=1e-12)
