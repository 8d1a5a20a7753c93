"""The benchmarks of LobRA's planner: their tables are made of what the planner gives, and follow the paper's curves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.lobra.sensitivity import NUMBERS_OF_BUCKETS, print_alone, print_buckets
from benchmarks.lobra.steps import Inputs


@pytest.fixture(scope="module")
def inputs(shared_data: Path) -> Inputs:
    return Inputs(shared_data / "lobra")


@pytest.mark.slow
def test_more_buckets_pad_less_and_from_twelve_on_hardly_make_a_step_faster(
    inputs: Inputs, capsys: pytest.CaptureFixture[str]
) -> None:
    print_buckets(inputs, range(1), 4)
    rows = [
        line.strip("| ").split(" | ")
        for line in capsys.readouterr().out.splitlines()
        if re.fullmatch(r"[| \d.]+", line)
    ]
    assert [int(row[0]) for row in rows] == list(NUMBERS_OF_BUCKETS)
    ratios = {int(row[0]): float(row[1]) for row in rows}
    paddings = [float(row[2]) for row in rows]
    assert paddings == sorted(paddings, reverse=True)
    assert ratios[4] == 1.0
    assert ratios[12] < 0.7
    assert ratios[32] > 0.85 * ratios[12]


@pytest.mark.slow
def test_unequal_replicas_are_never_planned_to_lose_against_equal_ones(
    inputs: Inputs, capsys: pytest.CaptureFixture[str]
) -> None:
    print_alone(inputs, 0)
    rows = [line for line in capsys.readouterr().out.splitlines() if "<1,1>" in line or "<8,1>" in line]
    saved = [float(re.search(r"-?\d+\.\d+", line).group()) for line in rows]  # type: ignore[union-attr]
    assert len(saved) == 6
    assert min(saved) >= 0.0
    assert max(saved) > 25.0
