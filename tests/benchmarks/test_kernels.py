"""The kernel benchmark's judges and contenders, on a CPU."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from benchmarks.kernels import contenders, host_time
from benchmarks.kernels import mux as kernel_mux
from benchmarks.kernels import run as kernels
from benchmarks.kernels.problem import CannotRunError, Problem, Result, Shape, errors


def tiny_problem() -> Problem:
    return Problem(Shape(24, (16, 8), 48, 2, 8), torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("name", Result._fields)
def test_a_contender_that_is_wrong_in_one_quantity_is_found(name: str) -> None:
    problem = tiny_problem()
    right = contenders.unsloth_style(problem)

    def wrong(call: int) -> Result:
        result = right(call)
        value = getattr(result, name)
        return result._replace(**{name: [1.01 * part for part in value] if isinstance(value, list) else 1.01 * value})

    found = errors(problem, wrong)
    assert found.pop(name) > 5e-3
    assert all(error <= 1e-5 for error in found.values())


def test_a_nan_of_a_single_task_is_an_error_whichever_comes_after_it() -> None:
    problem = tiny_problem()
    right = contenders.unsloth_style(problem)

    def poisoned(call: int) -> Result:
        result = right(call)
        return result._replace(da=[torch.full_like(result.da[0], float("nan")), *result.da[1:]])

    error = errors(problem, poisoned)["da"]
    assert error != error


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


def test_a_block_is_the_sum_of_its_groups_over_all_contenders_that_ran_each() -> None:
    def table(frozen: float, mux: float, other: dict[str, object]) -> dict[str, object]:
        return {"contenders": {"frozen": {"eager_us": frozen}, "mux": {"eager_us": mux}, "grouped_mm": other}}

    found = kernels.layer_totals([table(1.0, 1.5, {"eager_us": 2.0}), table(3.0, 3.5, {"skipped": "absent"})])
    assert found["mux eager_us"] == 5.0
    assert found["mux eager_overhead_percent"] == pytest.approx(25)
    assert not any(name.startswith("grouped_mm") or "graph" in name for name in found)


def test_without_a_gpu_and_an_interpreter_slices_replace_them_and_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    found = kernels.measure(Shape(16, (8,), 16, 1, 8), torch.device("cpu"), torch.float32, names=["mux"], rounds=1)
    assert found["contenders"]["mux"]["path"] == "slices"
    assert "kernels" not in found
    assert "through slices" in kernels.describe(found)


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_the_hosts_time_is_that_of_a_pass_that_launches_every_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    host_time.main(["--layers", "2", "--tasks", "2", "--passes", "4"])
    hardware, row = capsys.readouterr().out.splitlines()
    assert "layers 2" in hardware
    # Seven layers in four groups: y, dB and dS of each layer; S and dA of each group, dx of all but the first.
    assert row.endswith(f"{(2 * (3 * 7 + 3 * 4) - 1) / 2:.1f} Triton launches a layer")
