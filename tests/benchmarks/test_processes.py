"""The benchmarks of several processes: a baseline, what is made of times, and small runs of two benchmarks."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.processes.pipeline_worker import SCHEDULES, drained_1f1b
from peft_mux.scheduler.pipeline.simulator import simulate
from tests.paths import ROOT
from tests.scheduler.pipeline.cases import even

NUM_TASKS, NUM_STAGES = 4, 2


@pytest.mark.parametrize("num_micro_batches", [1, 3])
def test_one_task_after_another_fills_and_empties_the_pipeline_for_each(num_micro_batches: int) -> None:
    own = even([1.0] * NUM_TASKS, stages=NUM_STAGES, micro_batches=num_micro_batches, size=0)
    template = drained_1f1b(own)
    # 1F1B takes (C + S - 1) (f + b) for each task.
    assert simulate(template, own).makespan_s == pytest.approx(NUM_TASKS * 2 * (num_micro_batches + NUM_STAGES - 1))


def stored(name: str, folder: Path, *options: str) -> Any:
    """Return what a benchmark stores when it is run with these options."""
    program = (
        f"import sys; from pathlib import Path; from benchmarks.processes import {name};"
        f" {name}.RESULTS = Path({str(folder)!r}); {name}.main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *options, "--write"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
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
def test_the_benchmark_measures_every_schedule_and_sends_what_the_closed_form_says(tmp_path: Path) -> None:
    options = ["--micro-batches", "1", "2", "--rounds", "1", "--layers", "2", "--tokens", "32"]
    rows = stored("pipeline", tmp_path, *options)["rows"]
    assert [(row["num_micro_batches"], row["schedule"]) for row in rows] == [
        (count, schedule) for count in (1, 2) for schedule in SCHEDULES
    ]
    for row in rows:
        assert row["sent_bytes"] == [4 * row["num_micro_batches"] * 32 * 512 * 4] * NUM_STAGES
        assert row["summed_bytes"] == row["closed_form_summed_bytes"] == [4 * (4 + 8)] * NUM_STAGES
        assert row["planned_steps_s"] > row["planned_passes_s"] > 0
        assert row["steps_s"][0] > row["passes_s"][0] > 0
    in_flight = {(row["num_micro_batches"], row["schedule"]): row["most_in_flight"] for row in rows}
    assert in_flight[2, "gpipe"] == [8, 8]
    assert in_flight[2, "1f1b"] == in_flight[2, "drained"] == [2, 1]


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
