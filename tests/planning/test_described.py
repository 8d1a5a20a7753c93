"""A plan says which path adapters will take, as far as this machine can tell."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peft_mux.planning import planner as described


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


@pytest.mark.parametrize(
    ("device_type", "apart", "asked", "is_told"),
    [
        ("cuda", {"num_stages": 2}, "auto", True),
        ("cuda", {"devices_per_stage": 2}, "auto", True),
        ("cuda", {"backbone_shards": 2}, "auto", True),
        ("cuda", {"num_replicas": 2}, "auto", False),
        ("cuda", {"num_stages": 2}, False, False),
        ("cpu", {"num_stages": 2}, "auto", False),
    ],
)
def test_a_plan_says_where_passes_are_not_replayed_though_nobody_asked_for_that(
    device_type: str, apart: dict[str, int], asked: bool | str, is_told: bool
) -> None:
    sizes = {"num_stages": 1, "devices_per_stage": 1, "backbone_shards": 1, "num_replicas": 1, **apart}
    target: Any = SimpleNamespace(device_type=device_type, **sizes)
    args: Any = SimpleNamespace(cuda_graphs=asked)
    notes = described._graph_notes(target, args)
    assert [note for note in notes if "without CUDA graphs" in note] == list(notes)
    assert bool(notes) is is_told
