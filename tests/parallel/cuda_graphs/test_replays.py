"""Passes that are captured and replayed through the kernels are equal to eager ones in every respect.

Each case runs in one process with Triton's interpreter, and says how it failed.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.children import run_script

pytest.importorskip("triton")

from tests.parallel.cuda_graphs.cases import CASES

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def failures() -> dict[str, str]:
    return json.loads(run_script(Path(__file__).with_name("cases.py"), TRITON_INTERPRET="1"))


@pytest.mark.parametrize("case", CASES)
def test_captured_passes_are_eager_ones(case: str, failures: dict[str, str]) -> None:
    assert failures[case] == ""
