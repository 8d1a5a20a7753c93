"""A plan says which path adapters will take, as far as this machine can tell."""

from __future__ import annotations

import pytest
import torch

from peft_mux.planning import described


@pytest.mark.parametrize(
    ("device_type", "is_here", "has_triton", "reason", "told"),
    [
        ("cuda", True, True, None, None),
        ("cuda", True, True, "a first one cannot be launched", "a first one cannot be launched"),
        ("cuda", False, True, "not asked", None),  # a plan of a GPU that is not here
        ("cuda", False, False, "not asked", "Triton is absent"),
        ("cpu", False, False, "not asked", None),
    ],
)
def test_a_plan_says_why_kernels_will_not_run(
    monkeypatch: pytest.MonkeyPatch,
    device_type: str,
    is_here: bool,
    has_triton: bool,
    reason: str | None,
    told: str | None,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: is_here)
    monkeypatch.setattr(described, "has_triton", lambda: has_triton)
    monkeypatch.setattr(described, "reason_against_kernels", lambda device: reason)
    wanted = () if told is None else (f"adapters are computed task by task with torch, as {told}",)
    assert described._run_notes([], device_type) == wanted
