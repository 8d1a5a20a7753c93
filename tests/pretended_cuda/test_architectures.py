"""Ten architectures train on the pretended device: nothing waits, attention is what it should be, kernels are used."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.pretended_cuda.checks import VARLEN, assert_nothing_waits, assert_trained, seen_of, slower_attention

pytestmark = pytest.mark.timeout(900)  # of seconds on an idle machine; a busy one takes longer
REASONS = {"gemma2": "scores are soft-capped"}
"""Why attention is not one call for all sequences, where it is not."""

FAST_NAMES = ("llama", "mistral", "gemma2", "gpt2", "bert")
NAMES = ("llama", "qwen2", "qwen3", "mistral", "phi3", "gemma2", "gemma3", "gpt2", "opt", "bert")
FORMS: dict[str, dict[str, Any]] = {
    "bf16": {"dtype": "bf16"},
    "fp16": {"dtype": "fp16"},
    "fp32": {"dtype": "fp32"},
    "fp32 under autocast": {"dtype": "fp32", "autocast": True},
    "checkpointing": {"dtype": "bf16", "checkpointing": True},
}
FAST = "fp32 under autocast"
"""What Trainer makes of a backbone that is given as an object, and where the most can go wrong."""


@pytest.fixture(scope="module")
def fast(run_cases: Callable[..., dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    return run_cases({name: {"architecture": name, **FORMS[FAST]} for name in FAST_NAMES})


@pytest.fixture(scope="module", params=FORMS)
def slow(
    request: pytest.FixtureRequest, run_cases: Callable[..., dict[str, dict[str, Any]]]
) -> tuple[str, dict[str, dict[str, Any]]]:
    return request.param, run_cases({name: {"architecture": name, **FORMS[request.param]} for name in NAMES})


def assert_as_promised(seen: dict[str, Any], name: str, form: str) -> None:
    assert_trained(seen)
    assert_nothing_waits(seen)
    reasons = slower_attention(seen)
    if form == "fp32":
        assert reasons == ["the kernel computes in bf16 or fp16, not in float32"]
    elif name in REASONS:
        assert reasons == [REASONS[name]]
    else:
        assert reasons == []
    assert (VARLEN in seen["attention"]) == (not reasons), seen["attention"]
    for kernel in ("shrink_kernel", "expand_kernel", "wgrad_kernel"):
        assert seen["launches"].get(kernel, 0) > 0, kernel


@pytest.mark.parametrize("name", FAST_NAMES)
def test_an_architecture_trains_without_a_wait(fast: dict[str, dict[str, Any]], name: str) -> None:
    assert_as_promised(seen_of(fast, name), name, FAST)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_an_architecture_trains_in_every_form(slow: tuple[str, dict[str, dict[str, Any]]], name: str) -> None:
    form, found = slow
    assert_as_promised(seen_of(found, name), name, form)
