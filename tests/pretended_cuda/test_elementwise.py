"""Memory traffic of the backbone's elementwise operators on the pretended device, plain and with Liger."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest

from tests.pretended_cuda.checks import seen_of

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is None, reason="needs Liger"),
]


def test_a_layer_reads_and_writes_less_than_a_quarter_with_liger(run_cases: Callable[..., Any]) -> None:
    cases = {name: {"kind": "elementwise", "tokens": 8192, "is_fused": name == "liger"} for name in ("plain", "liger")}
    found = run_cases(cases)
    plain, fused = seen_of(found, "plain"), seen_of(found, "liger")
    assert plain["launches"] == {}
    assert fused["launches"]["_swiglu_forward_kernel"] == 2
    assert fused["launches"]["_triton_rope"] == 4
    assert fused["layer_bytes"] < 0.25 * plain["layer_bytes"], (fused, plain)
