"""A run whose steps take another time than predicted says so once, and writes it down."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from peft_mux.planning.learning import TimeCorrection
from tests.invariants import mux_lab as lab


@pytest.mark.parametrize(("ratio", "is_told"), [(1.4, True), (1.0, False)])
def test_the_forecast_is_corrected_aloud_once(
    ratio: float, is_told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(TimeCorrection, "observe", lambda self, *_: setattr(self, "time_ratio", ratio))
    run = lab.train([lab.small_task("a", data_seed=1, max_steps=9)], tmp_path)
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("time: measured")]
    assert [line.startswith("time: measured 1.4x of predicted (") for line in lines] == [True] * is_told
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    found = [record for record in records if record["event"] == "forecast"]
    assert len(found) == is_told
    for record in found:
        assert record["corrected_s"] == pytest.approx(1.4 * record["predicted_s"])
        assert run.trainer._plans.current is not None
