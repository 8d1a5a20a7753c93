"""What a pass keeps for its backward on CUDA is what plans count for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.pretended_cuda.checks import seen_of

Found = dict[str, dict[str, Any]]
pytestmark = pytest.mark.timeout(900)  # of seconds on an idle machine; a busy one takes longer
CASES: dict[str, dict[str, Any]] = {
    "llama 8B under autocast": {"architecture": "llama 8B", "dtype": "fp32", "bf16": True},
    "llama 8B": {"architecture": "llama 8B", "dtype": "bf16", "bf16": False},
    "qwen2 7B": {"architecture": "qwen2 7B", "dtype": "bf16", "bf16": True},
    "gemma2 9B": {"architecture": "gemma2 9B", "dtype": "bf16", "bf16": True},
    # Its GELU is written with a power, which autocast computes in fp32 on CUDA.
    "gpt2 medium": {"architecture": "gpt2 medium", "dtype": "bf16", "bf16": True},
}
TOO_LITTLE, TOO_MUCH = 0.99, 1.05
"""What is counted may be this share of what is kept: seen were 0.998 to 1.04. In fp32, whose attention is computed by
groups of sequences on CUDA too, it is 0.86, and not held to anything here."""


@pytest.fixture(scope="module")
def found(run_cases: Callable[..., Found]) -> Found:
    return run_cases({name: {**fields, "kind": "memory"} for name, fields in CASES.items()})


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_bytes_kept_for_each_token_are_those_that_plans_count(found: Found, name: str) -> None:
    seen = seen_of(found, name)
    assert TOO_LITTLE <= seen["counted"] / seen["on device"] <= TOO_MUCH, seen
