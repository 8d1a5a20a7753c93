"""Bands of forecasts are those of stored measurements, and stand wherever a plan is shown."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from peft_mux.scheduler.units import ANALYTIC_TIME, MEASURED_TIME, MEMORY, Band, time_band
from tests.scheduler.plan_cases import a_plan

RESULTS = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("planner-accuracy*.json"))


@pytest.mark.parametrize(("band", "what"), [(MEASURED_TIME, "step time"), (MEMORY, "peak memory")])
def test_a_band_is_the_worst_stored_error_rounded_up_to_whole_five_percent(band: Band, what: str) -> None:
    assert RESULTS
    worst = max(json.loads(path.read_text(encoding="utf-8"))["summary"][what]["worst_error"] for path in RESULTS)
    width = -(-worst // 0.05) * 0.05
    assert (band.low, band.high) == (pytest.approx(1 - width), pytest.approx(1 + width))
    assert band.words == f"+-{width:.0%}".replace("%", " %")


def test_times_of_data_sheets_have_a_wider_band_than_measured_ones() -> None:
    assert time_band("measured") is MEASURED_TIME
    assert time_band("analytic") is ANALYTIC_TIME
    assert ANALYTIC_TIME.low < MEASURED_TIME.low
    assert ANALYTIC_TIME.high > MEASURED_TIME.high


def test_text_html_and_json_of_a_plan_have_the_bands() -> None:
    plan = replace(a_plan(), profile_source="measured")
    assert "1.25 s a step +-15 %, " in str(plan)
    assert "+-15 %" in plan._repr_html_()
    found = json.loads(plan.to_json())["forecast"]
    assert found["step_s"] == {
        "predicted": 1.25,
        "low": pytest.approx(1.0625),
        "high": pytest.approx(1.4375),
        "source": "measured profile",
    }
    assert found["peak_bytes"]["high"] == pytest.approx(1.15 * plan.memory.peak_bytes)
    assert found["peak_bytes"]["source"] == "analytic estimate"
    assert replace(plan, step_s=0.0).forecast["step_s"] is None
