"""Kernels are used where a first one runs, and nowhere else; one warning says why not.

That the first one writes what it should is tested in Triton's interpreter (`lora/test_device.py`).
"""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from peft_mux.kernels import availability

pytest.importorskip("triton")

CUDA = torch.device("cuda")


@pytest.fixture(autouse=True)
def _forget_cards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    caches: list[Any] = [availability.has_triton, availability._card_runs_kernels, availability._reason_against_card]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "A Card")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def stub_trial(monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> list[torch.device]:
    tried: list[torch.device] = []

    def try_kernel(device: torch.device) -> None:
        tried.append(device)
        if error is not None:
            raise error

    monkeypatch.setattr(availability, "try_kernel", try_kernel)
    return tried


def test_a_cpu_runs_no_kernels_and_gets_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not availability.runs_kernels(torch.device("cpu"))
    assert availability.reason_against_kernels(torch.device("cpu")) == "there are none for cpu"


def test_a_card_is_tried_once_and_then_used(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = stub_trial(monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(availability.runs_kernels(device) for device in (CUDA, CUDA, torch.device("cuda", 0)))
        assert availability.runs_kernels(torch.device("cuda", 1))
    assert tried == [torch.device("cuda", 0), torch.device("cuda", 1)]


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Failed to find C compiler. Please specify via CC environment variable.\nmore"),
        RuntimeError(""),
    ],
)
def test_a_launch_that_fails_leaves_the_card_to_torch_with_one_warning(
    monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    tried = stub_trial(monkeypatch, error)
    cause = (str(error) or "no message").splitlines()[0]
    with pytest.warns(UserWarning, match="computed in torch, task by task") as caught:
        answers = [availability.runs_kernels(CUDA) for _ in range(2)]
    assert answers == [False, False]
    assert len(caught) == len(tried) == 1
    assert f"({type(error).__name__}: {cause})" in str(caught[0].message)


def test_a_card_without_bf16_products_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = stub_trial(monkeypatch)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    with pytest.warns(UserWarning, match="A Card has compute capability 7.5, but they need 8.0"):
        assert not availability.runs_kernels(CUDA)
    assert tried == []


def test_absent_triton_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.warns(UserWarning, match="because Triton is not installed"):
        assert not availability.runs_kernels(CUDA)


def test_a_kernel_that_writes_something_else_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from peft_mux.kernels.lora import lora_kernels

    class Idle:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            return lambda out: None

    monkeypatch.setattr(lora_kernels, "trial_kernel", Idle())
    with pytest.raises(RuntimeError, match=r"wrote \[0.0\] instead of \[1.0\]"):
        availability.try_kernel(torch.device("cpu"))
