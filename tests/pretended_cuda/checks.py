"""What holds for every training run on the pretended device."""

from __future__ import annotations

from typing import Any

VARLEN = "torch_attn._varlen_attn"
SLOWER_ATTENTION = "attention is computed by groups of sequences of equal length, as "
REASONS = {"gemma2": "scores are soft-capped"}
"""Why attention is not one call for all sequences, where it is not."""


def seen_of(found: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    """Return what was seen of a case, or fail with its error."""
    seen = found[name]
    assert "error" not in seen, seen["error"]
    return seen


def assert_trained(seen: dict[str, Any], num_steps: int = 2) -> None:
    assert set(seen["steps"].values()) == {num_steps}, seen["steps"]
    assert seen["num_passes"] > 1


def assert_nothing_waits(seen: dict[str, Any]) -> None:
    """Hold passes to no wait, and steps to one: the verdicts of all tasks."""
    assert seen["pass_waits"] == {}
    for waits in seen["step_waits"]:
        assert sum(waits.values()) == 1, waits
    assert seen["blocking_copies"] == {}


def slower_attention(seen: dict[str, Any]) -> list[str]:
    """Return why attention was not one call for all sequences."""
    said = [message for message in seen["said"] if message.startswith(SLOWER_ATTENTION)]
    return [message.removeprefix(SLOWER_ATTENTION).rstrip(".") for message in said]


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
