"""Rows of unequal length on the pretended device: tables and graphs are made for few sets of tasks, not for each pass.

`cases.py` with "steps": 50 and rows of 180, 256 and 128 tokens on average gives the figures of docs/log.md.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.pretended_cuda.checks import seen_of

pytestmark = pytest.mark.timeout(900)
SHORT = {"kind": "ragged", "tasks": 8, "rows": 8, "mean": 24, "sigma": 0.7, "max_tokens": 512}


@pytest.mark.slow
def test_tables_of_kernels_are_made_once_though_every_pass_holds_other_tasks(run_cases: Callable[..., Any]) -> None:
    seen = seen_of(run_cases({"ragged": {**SHORT, "steps": 5}}), "ragged")
    assert seen["sets"] > 10
    assert seen["misses"] <= 4


@pytest.mark.slow
@pytest.mark.parametrize(("tasks", "rows", "mean", "max_tokens"), [(8, 8, 180, 4096), (32, 4, 128, 4096)])
def test_few_graphs_serve_the_passes_of_rows_of_unequal_length(
    run_cases: Callable[..., Any], tasks: int, rows: int, mean: int, max_tokens: int
) -> None:
    sizes = {"tasks": tasks, "rows": rows, "mean": mean, "max_tokens": max_tokens}
    seen = seen_of(run_cases({"graphs": {**SHORT, **sizes, "steps": 12, "captured": True}}), "graphs")
    assert seen["sets"] > 30
    assert seen["misses"] <= 5
    assert seen["captures"] <= 12
