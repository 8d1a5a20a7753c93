"""The kernel benchmark's judges and contenders, on a CPU."""

from __future__ import annotations

import pytest
import torch

from benchmarks.kernels import contenders
from benchmarks.kernels import mux as kernel_mux
from benchmarks.kernels import run as kernels
from benchmarks.kernels.problem import CannotRunError, Problem, Result, Shape, errors


def tiny_problem() -> Problem:
    return Problem(Shape(24, (16, 8), 48, 2, 8), torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("factor", [1.01, float("nan")])
@pytest.mark.parametrize("name", Result._fields)
def test_a_contender_that_is_wrong_in_one_quantity_is_found(name: str, factor: float) -> None:
    problem = tiny_problem()
    right = contenders.unsloth_style(problem)

    def wrong(call: int) -> Result:
        result = right(call)
        value = getattr(result, name)
        # Of several tasks the first alone is wrong.
        return result._replace(**{name: [factor * value[0], *value[1:]] if isinstance(value, list) else factor * value})

    found = errors(problem, wrong)
    assert not found.pop(name) <= 1e-3
    assert all(error <= 1e-5 for error in found.values())


@pytest.mark.parametrize("name", [name for name in contenders.CONTENDERS if name != "frozen"])
def test_layers_one_by_one_add_up_to_the_group(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    problem = tiny_problem()
    found = errors(problem, contenders.CONTENDERS[name](problem))
    assert all(error <= 1e-5 for error in found.values())


def test_a_baseline_may_be_skipped_and_our_kernels_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    skipped, right = {"skipped": "absent"}, {"is_right": True}
    assert kernels.wrong_contenders({"contenders": {"grouped_mm": skipped, "frozen": right}}) == []
    assert kernels.wrong_contenders({"contenders": {"grouped_mm": skipped, "mux": skipped}}) == ["mux"]
    monkeypatch.setattr(kernel_mux, "has_kernels", lambda device: False)
    problem = tiny_problem()
    problem.device = torch.device("cuda")
    with pytest.raises(CannotRunError, match="Triton"):
        kernel_mux.mux(problem)
