"""`benchmarks.gpu` at its real shapes on the pretended device: no part ends by a wrong device or a wrong name."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.children import run_script


@pytest.mark.nightly
def test_every_part_comes_to_its_end_and_every_contender_trains(pretended_cuda: Path, tmp_path: Path) -> None:
    script = Path(__file__).with_name("benchmarks_on_it.py")
    printed = run_script(script, str(pretended_cuda), str(tmp_path), timeout_s=900, TRITON_INTERPRET="0")
    parts = json.loads(printed.splitlines()[-1])
    assert len(parts) == 12
    assert {name: part.get("traceback") for name, part in parts.items() if part["status"] != "done"} == {}
    rows = parts["end to end 8 uniform x 32 rows"]["rows"]
    trained = {name.split(": ")[-1]: row for name, row in rows.items() if ": " in name}
    assert {name: row.get("failed") for name, row in trained.items() if "steps_s" not in row} == {}
    assert set(trained) == {"floor", "hf", "packed", "mux", "mux_graphs", "padded"}
    assert trained["mux"]["path"] == trained["mux_graphs"]["path"] == "kernels"
    assert trained["mux_graphs"]["num_captures"] > 0
    run = parts["default run"]["rows"]["4K tokens a step: default run"]
    assert run["limit_bytes"] == 0.95 * 85 * 10**9
    assert {"gain_over_packed", "gpu_idle_share", "reserved_over_predicted", "peak_over_predicted"} <= set(run)
