"""The benchmarks of several processes: small runs of each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.processes.sleeping import by_step
from tests.paths import ROOT


def test_tasks_that_step_one_after_another_take_a_step_in_the_sum_of_their_seconds() -> None:
    assert by_step([9.0, 1.0, 2.0], 3) == [1.0, 2.0], "the first step is not counted"
    assert by_step([9.0, 1.0, 2.0, 9.0, 10.0, 20.0], 3) == [11.0, 22.0]


def stored(name: str, folder: Path, *options: str) -> Any:
    """Return what a benchmark stores when it is run with these options."""
    program = (
        f"from pathlib import Path; from benchmarks import stored; from benchmarks.processes import {name};"
        f" stored.RESULTS = Path({str(folder)!r}); {name}.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *options, "--write"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    (path,) = folder.glob("*.json")
    return json.loads(path.read_text(encoding="utf-8"))


@pytest.mark.distributed
@pytest.mark.nightly
def test_the_planners_own_plan_and_all_others_are_executed(tmp_path: Path) -> None:
    small = "--mixes 1 --steps 2 --rounds 1 --hidden-size 64 --layers 2 --profile-s 2".split()
    found = stored("exhaustive", tmp_path, "--layouts", "pp2", *small)["pp2"]
    (row,) = found["rows"]
    assert row["num_plans"] > 2
    assert row["own_s"] >= row["best_s"] > 0, "the own plan is one of those that are compared"
    assert found["summary"]["worst"] == pytest.approx(row["own_s"] / row["best_s"])


@pytest.mark.distributed
@pytest.mark.nightly
def test_the_engine_on_sleeping_devices_takes_as_long_as_kernels_links_and_sums_would(tmp_path: Path) -> None:
    layout = "<2,1>x1, <1,2>x1"
    small = "--nodes 1 --per-node 4 --layers 2 --tasks 3 --rows 1 --slow 10 --slow-shards 4 --steps 1 --repeats 1"
    (row,) = stored("sleeping", tmp_path, "--layouts", layout, *small.split())["1x4xH100-80GB"]["rows"]
    assert (row["layout"], row["num_ranks"], row["slow"]) == (layout, 4, 40)
    # Sleeping is never too short, and on busy cores it ends late.
    assert row["measured_s"] > 0.8 * row["planned_s"] > 0
    assert all(0 < passed_s < row["measured_s"] for passed_s in row["passed_s"])
    cut, whole = row["counts"][:2], row["counts"][2:]
    assert [rank["missing"] + rank["unknown"] for rank in cut] == [0, 0], "the sums of a cut pass are those of the plan"
    assert [rank["stretches"] for rank in whole] == [2 * rank["passes"] for rank in whole], "a forward and a backward"
    assert cut[0]["tokens"] == cut[1]["tokens"] > 0 < whole[0]["tokens"] == whole[1]["tokens"]


@pytest.mark.distributed
@pytest.mark.nightly
def test_techniques_are_compared_on_the_same_rows(tmp_path: Path) -> None:
    small = [
        "--only",
        "template, C = 1",
        "turns, 25",
        *"--layers 8 --rows 0.5 --slow 10 --slow-shards 4 --steps 1".split(),
    ]
    rows = stored("techniques", tmp_path, *small)["rows"]
    ways = {(row["technique"], row["arm"]): row for row in rows}
    for row in rows:
        assert row["measured_s"] > 0.8 * row["planned_s"] > 0, "sleeping is never too short"
    # Of four stages three wait for the micro-batch of each task.
    assert 1.1 < ways["template, C = 1", "one task after another"]["planned_faster"] < 4
    assert ways["turns, 25 GB/s", "one by one"]["planned_faster"] > 1.1
