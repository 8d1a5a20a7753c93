"""What holds for every training run on the pretended device."""

from __future__ import annotations

from typing import Any

VARLEN = "torch_attn._varlen_attn"
SLOWER_ATTENTION = "attention is computed by groups of sequences of equal length, as "


def seen_of(found: dict[str, dict[str, Any]], name: str) -> dict[str, Any]:
    """Return what was seen of a case, or fail with its error."""
    seen = found[name]
    assert "error" not in seen, seen["error"]
    return seen


def assert_trains_without_waiting(seen: dict[str, Any], slower_attention: str | None = None) -> None:
    """Hold passes to no wait and steps to one, the verdicts of all tasks, and attention to one call for all sequences.

    Args:
        seen: what `steps.train` returns.
        slower_attention: why attention is not one call; `None` where it is.
    """
    assert set(seen["steps"].values()) == {2}, seen["steps"]
    assert seen["num_passes"] > 1
    assert seen["refreshed"] == sum(seen["steps"].values()), "once a step, not once a pass"
    assert seen["pass_waits"] == {}
    assert [sum(waits.values()) for waits in seen["step_waits"]] == [1, 1], seen["step_waits"]
    assert seen["blocking_copies"] == {}
    said = [message for message in seen["said"] if message.startswith(SLOWER_ATTENTION)]
    assert said == ([] if slower_attention is None else [f"{SLOWER_ATTENTION}{slower_attention}."])
    kernels = seen["attention"].keys() | seen["launches"].keys()
    assert bool(kernels & {VARLEN, "attention_forward_kernel"}) == (slower_attention is None), kernels


def assert_on_kernels(seen: dict[str, Any]) -> None:
    assert {"shrink_kernel", "expand_kernel", "wgrad_kernel"} <= seen["launches"].keys()
