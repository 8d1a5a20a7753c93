"""`benchmarks.gpu` at its real shapes on the pretended device: no part ends by a wrong device or a wrong name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.children import run_script

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def parts(pretended_cuda: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    script, folder = Path(__file__).with_name("benchmarks_on_it.py"), tmp_path_factory.mktemp("benchmarks")
    printed = run_script(script, str(pretended_cuda), str(folder), timeout_s=900, TRITON_INTERPRET="0")
    return json.loads(printed.splitlines()[-1])


def test_every_part_comes_to_its_end(parts: dict[str, Any]) -> None:
    assert len(parts) == 12
    faults = {name: entry.get("traceback") for name, entry in parts.items() if entry["status"] != "done"}
    assert faults == {}


def test_every_contender_trains_or_is_left_out_for_its_size(parts: dict[str, Any]) -> None:
    rows = parts["end to end 8 uniform x 32 rows"]["rows"]
    trained = {name.split(": ")[-1]: row for name, row in rows.items() if ": " in name}
    assert {name: row.get("failed") for name, row in trained.items() if "steps_s" not in row} == {}
    assert set(trained) == {"floor", "hf", "packed", "mux", "mux_graphs", "padded"}
    (gain,) = (row for name, row in parts["gain 8B"]["rows"].items() if name.startswith("512 "))
    assert {"gain_over_hf", "gain_over_alone", "gain_over_alone_with_graphs"} <= set(gain)


def test_passes_go_through_kernels_and_are_captured(parts: dict[str, Any]) -> None:
    rows = parts["end to end 8 uniform x 32 rows"]["rows"]
    for name, row in rows.items():
        if name.endswith((": mux", ": mux_graphs")):
            assert row["path"] == "kernels"
    (graphs,) = (row for name, row in rows.items() if name.endswith(": mux_graphs"))
    assert graphs["num_captures"] > 0


def test_the_default_run_is_profiled_on_the_card_and_compared_with_packed_peft(parts: dict[str, Any]) -> None:
    rows = parts["default run"]["rows"]
    run = rows["4K tokens a step: default run"]
    assert run["limit_bytes"] == 0.95 * 85 * 10**9
    assert run["profile"]["num_steps"] == 2
    assert {"gain_over_packed", "gpu_idle_share", "reserved_over_predicted", "peak_over_predicted"} <= set(run)
    assert "steps_s" in rows["4K tokens a step: PEFT, packed"]
    assert "skipped" in rows["4K tokens a step: TRL"]
