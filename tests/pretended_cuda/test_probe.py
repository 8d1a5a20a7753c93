"""Packing is proven on the device and by the kernels that a run will train with, not on the CPU before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.pretended_cuda.checks import VARLEN, seen_of

Found = dict[str, dict[str, Any]]
pytestmark = pytest.mark.timeout(900)  # of seconds on an idle machine; a busy one takes longer
CASES: dict[str, dict[str, Any]] = {
    "fp32 under autocast": {"architecture": "llama", "dtype": "fp32", "bf16": True},
    "bf16": {"architecture": "llama", "dtype": "bf16", "bf16": False},
    "already multiplexed": {"architecture": "llama", "dtype": "fp32", "bf16": True, "is_held_by_user": True},
}


@pytest.fixture(scope="module")
def found(run_cases: Callable[..., Found]) -> Found:
    return run_cases({name: {**fields, "kind": "load"} for name, fields in CASES.items()})


@pytest.mark.parametrize("name", CASES)
def test_packing_is_proven_where_and_in_which_precision_it_will_train(found: Found, name: str) -> None:
    seen = seen_of(found, name)
    built_by_user = [["cpu", "torch.float32"]] if name == "already multiplexed" else []
    assert seen["probes"] == [*built_by_user, ["cuda", "torch.bfloat16"]]
    assert seen["device"] == "cuda"


@pytest.mark.parametrize("name", CASES)
def test_the_proof_goes_through_flash_attention_and_the_kernels(found: Found, name: str) -> None:
    seen = seen_of(found, name)
    # Two layers, packed without and with adapters; then the last of them, for all rows and for some.
    assert seen["attention"][VARLEN] == 6
    assert seen["launches"]["shrink_kernel"] > 0
    assert seen["launches"]["expand_kernel"] > 0
