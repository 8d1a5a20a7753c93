"""What was planned is what runs: passes of a step, tasks of each, order and tokens, in every layout of processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.engine.processes.cases import Part, launch, values
from tests.parallel.replicas import layout_cases as cases
from tests.records import run_records

SLOW, NIGHTLY = ([mark, pytest.mark.distributed] for mark in (pytest.mark.slow, pytest.mark.nightly))
PP2, TP2 = {"pipeline_parallel_size": 2}, {"tensor_parallel_size": 2}
LIGHT = (2, (12, 12, 12, 12))
"""Rows of a batch, and tokens of a row of each task."""
MIXED = (5, (6, 11, 24, 40))
APART = {"planner": "interleaved"}
MANY = {"num_micro_batches": 4}


def run(world_size: int, load: tuple[int, tuple[int, ...]], folder: Path, arguments: dict[str, Any]) -> Part:
    if world_size == 1:
        return cases.train_even(0, folder, None, *load, arguments)
    return values(launch(world_size, cases.train_even, folder, None, *load, arguments, limit_s=120))[0]


@pytest.mark.parametrize(
    ("world_size", "load", "arguments"),
    [
        pytest.param(1, LIGHT, {}, id="one process, light"),
        pytest.param(1, MIXED, {**APART, **MANY}, id="one process, tasks apart in four passes"),
        pytest.param(2, (5, (12, 24)), MANY, id="dp2, rows that two do not divide", marks=SLOW),
        pytest.param(2, MIXED, {**PP2, **MANY}, id="pp2, heavy", marks=SLOW),
        pytest.param(3, MIXED, {"replicas": "<2,1>, <1,1>"}, id="shards beside a whole one, heavy", marks=SLOW),
        pytest.param(2, MIXED, {**TP2, "interleaved_passes": 2}, id="tp2, in turns", marks=NIGHTLY),
        pytest.param(4, MIXED, {"pipeline_parallel_size": 4, **APART}, id="pp4, tasks apart", marks=NIGHTLY),
        pytest.param(4, LIGHT, {**PP2, **TP2}, id="pp2 x tp2, light", marks=NIGHTLY),
        pytest.param(3, MIXED, {"replicas": "<1,2>, <1,1>", "dispatch": "length"}, id="by length", marks=NIGHTLY),
    ],
)
def test_steps_of_whole_batches_have_exactly_the_planned_passes(
    world_size: int, load: tuple[int, tuple[int, ...]], arguments: dict[str, Any], tmp_path: Path
) -> None:
    part = run(world_size, load, tmp_path, arguments)
    assert part.step == 3
    for report in part.pass_reports:
        assert (report.num_steps, report.same_number, report.same_tasks, report.same_tokens) == (3, 3, 3, 3), report
        assert report.planned_passes == report.passes or "replicas" in arguments
    # All rows of all tasks, in some replica.
    assert sum(report.tokens for report in part.pass_reports) == 3 * load[0] * sum(load[1])
    found = run_records(tmp_path, "passes")
    assert [event["replica"] for event in found] == list(range(len(part.pass_reports)))
    assert [event["same_tokens"] for event in found] == [3] * len(found)
    assert [event["passes"] for event in found] == [report.passes for report in part.pass_reports]
