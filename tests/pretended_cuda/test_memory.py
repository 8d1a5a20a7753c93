"""What a pass keeps for its backward on CUDA is what plans count for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.pretended_cuda.allocator import OutOfMemory, reserved_bytes
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


def test_the_simulated_allocator_keeps_a_hole_that_is_too_small_and_merges_free_neighbours() -> None:
    mib = 2**20
    two_of_a_segment, first_ends = [(1, 8 * mib), (2, 8 * mib)], [(1, 0)]
    assert reserved_bytes([*two_of_a_segment, *first_ends, (3, 9 * mib)], 100 * mib) == 40 * mib
    assert reserved_bytes([*two_of_a_segment, *first_ends, (2, 0), (3, 20 * mib)], 100 * mib) == 20 * mib
    with pytest.raises(OutOfMemory, match="9,437,184 bytes do not fit beside 20,971,520 of 31,457,280"):
        reserved_bytes([*two_of_a_segment, *first_ends, (3, 9 * mib)], 30 * mib)


def test_the_simulated_allocator_takes_the_lower_of_two_holes_of_one_size() -> None:
    mib = 2**20
    segment = [(number, 4 * mib) for number in range(1, 6)]
    holes = [(3, 0), (1, 0)]  # 8 to 12 MiB, and 0 to 4 MiB
    filled_and_widened = [(6, 4 * mib), (4, 0), (7, 8 * mib)]  # from 8 to 16 MiB, if the lower hole was taken first
    assert reserved_bytes([*segment, *holes, *filled_and_widened], 100 * mib) == 20 * mib


TIGHT: dict[str, dict[str, Any]] = {
    "4.6 GB": {"memory_bytes": 4_600_000_000},
    "4.0 GB, recomputed activations": {"memory_bytes": 4_000_000_000, "gradient_checkpointing": True},
    "3.8 GB": {"memory_bytes": 3_800_000_000},
}
"""Cards that hold two layers of a Llama-3-8B and its vocabulary, 2.9 GB, and few activations."""


@pytest.fixture(scope="module")
def tight(run_cases: Callable[..., Found]) -> Found:
    sizes = {"kind": "whole run", "backbone": "llama 8B", "tasks": 6, "rows": 16, "mean": 180, "steps": 4}
    return run_cases({name: {**sizes, **fields, "use_liger_kernel": False} for name, fields in TIGHT.items()})


@pytest.mark.slow
@pytest.mark.parametrize("name", TIGHT)
def test_a_plan_that_fills_95_percent_of_a_card_holds_though_the_allocator_fragments_it(
    tight: Found, name: str
) -> None:
    memory = seen_of(tight, name)["memory"]  # a run whose allocations do not fit ends with an error
    assert memory["reserved"] <= TIGHT[name]["memory_bytes"]
    assert 0.8 * memory["limit"] < memory["predicted"] <= memory["limit"]
    assert 0.9 <= memory["allocated"] / memory["predicted"] <= 1.02, memory
