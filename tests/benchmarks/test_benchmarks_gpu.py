"""The GPU benchmarks on a machine without a GPU: the dry run in a child process, and the judges in this one.

The dry run chooses Triton's interpreter before Triton is imported, so it cannot run in the process of the tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))

from benchmarks import gpu, gpu_report, kernels  # noqa: E402


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the report of a dry run."""
    path = tmp_path_factory.mktemp("gpu") / "report.json"
    command = [sys.executable, "-m", "benchmarks.gpu", "--dry-run", "--output", str(path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return json.loads(path.read_text())


def rows_of(report: dict[str, Any], section: str) -> dict[str, Any]:
    return report["sections"][section]["rows"]


def test_the_dry_run_finishes_every_section(dry_run: dict[str, Any]) -> None:
    assert {name: entry["status"] for name, entry in dry_run["sections"].items()} == dict.fromkeys(gpu.SECTIONS, "done")


def test_the_dry_run_checks_each_kernel_and_finds_it_right(dry_run: dict[str, Any]) -> None:
    rows = rows_of(dry_run, "correctness")
    checks = ["lora float32", "lora float32 co-location", "cross entropy float32"]
    for direction in ("varlen causal", "varlen both directions"):
        checks += [direction, f"{direction} co-location", f"{direction} NaN isolation"]
    assert {name: row["is_right"] for name, row in rows.items()} == dict.fromkeys(checks, True)


def test_the_dry_run_holds_every_contender_against_float64(dry_run: dict[str, Any]) -> None:
    (row,) = rows_of(dry_run, "kernels").values()
    assert list(row["contenders"]) == list(kernels.CONTENDERS)
    for name, contender in row["contenders"].items():
        wanted = set() if name == "frozen" else set(kernels.Result._fields)
        assert set(contender["errors"]) == wanted, name
        assert all(0 < error <= 1e-5 for error in contender["errors"].values()), name
    assert len(row["kernels"]) == 6


def test_every_trainer_has_the_losses_of_plain_peft_also_after_an_update(dry_run: dict[str, Any]) -> None:
    for section in ("layer", "end_to_end"):
        rows = rows_of(dry_run, section)
        for name in ("hf", "mux", "padded"):
            found = [row for case, row in rows.items() if case.endswith(f": {name}")]
            assert found, f"{section} has no {name}"
            assert all(len(row["losses"]) == 2 and row["is_right"] for row in found), name


# ------------------------------------------------------------------- the judges


def tiny_problem() -> kernels.Problem:
    return kernels.Problem(kernels.Shape(24, 16, 48, 2, 8), torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("name", kernels.Result._fields)
def test_a_contender_that_is_wrong_in_one_quantity_is_found(name: str) -> None:
    problem = tiny_problem()
    right = kernels.unsloth_style(problem)

    def wrong(call: int) -> kernels.Result:
        result = right(call)
        value = getattr(result, name)
        return result._replace(**{name: [1.01 * part for part in value] if isinstance(value, list) else 1.01 * value})

    errors = kernels.errors(problem, wrong)
    assert errors.pop(name) > 5e-3
    assert all(error <= 1e-5 for error in errors.values())


def test_a_nan_of_a_single_task_is_an_error_whichever_comes_after_it() -> None:
    problem = tiny_problem()
    right = kernels.unsloth_style(problem)

    def poisoned(call: int) -> kernels.Result:
        result = right(call)
        return result._replace(da=[torch.full_like(result.da[0], float("nan")), result.da[1]])

    error = kernels.errors(problem, poisoned)["da"]
    assert error != error


def test_the_gathering_contender_refuses_copies_that_are_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = tiny_problem()
    needed = 48 * 8 * (24 + 16) * 4
    monkeypatch.setattr(kernels, "MAX_GATHERED_BYTES", needed)
    kernels.gather_bmm(problem)
    monkeypatch.setattr(kernels, "MAX_GATHERED_BYTES", needed - 1)
    with pytest.raises(kernels.CannotRunError, match="gathered factors take"):
        kernels.gather_bmm(problem)


def test_a_baseline_may_be_skipped_and_our_kernels_may_not() -> None:
    skipped = {"skipped": "absent"}
    assert kernels.wrong_contenders({"contenders": {"grouped_mm": skipped, "frozen": {"is_right": True}}}) == []
    assert kernels.wrong_contenders({"contenders": {"grouped_mm": skipped, "mux_triton": skipped}}) == ["mux_triton"]


def test_tokens_that_do_not_divide_go_to_the_last_task_in_groups_of_eight() -> None:
    problem = kernels.Problem(kernels.Shape(8, 8, 80, 3, 8), torch.device("cpu"), torch.float32)
    assert problem.lengths == [24, 24, 32]
    assert problem.bounds == [0, 24, 48, 80]


def test_losses_of_the_second_step_count_and_a_nan_is_no_agreement() -> None:
    reference = [[2.0, 4.0], [1.0, 3.0]]
    assert gpu.loss_difference([[2.0, 4.0], [1.0, 3.3]], reference) == pytest.approx(0.1)
    assert gpu.loss_difference([[2.0, 4.0]], reference) == 0.0
    error = gpu.loss_difference([[float("nan"), 4.0], [1.0, 3.0]], reference)
    assert error != error


def test_useful_work_is_that_of_the_formula() -> None:
    from benchmarks.workloads import ModelSpec, TaskWorkload, Workload

    settings = gpu.Settings(torch.device("cpu"), is_dry=True)
    backbone = gpu.llama(settings, ModelSpec(32, 2, 48, 4, 64))
    rows = tuple({"input_ids": [1] * length, "labels": [1] * length} for length in (2, 6))
    work = Workload("uniform", (TaskWorkload("a", "x", 4, 0, 2, rows),), 1, "full", "none")
    layer = 32 * 32 + 2 * 32 * 8 + 32 * 32 + 3 * 32 * 48
    widths = 2 * (4 * 32 + 2 * (32 + 8) + 3 * (32 + 48))
    wanted = 4 * (2 * layer + 32 * 64) + 6 * 4 * widths + 7 * 32 * 2 * (4 + 36) / 8
    assert gpu.flops_per_token(backbone, work) == pytest.approx(wanted)


# --------------------------------------------------------------- budget and report


def test_a_section_that_fails_costs_no_other_and_keeps_its_rows(tmp_path: Path) -> None:
    def failing(deadline: gpu_report.Deadline) -> Iterator[gpu_report.Row]:
        yield "first", 1.0
        raise RuntimeError("device lost")

    def working(deadline: gpu_report.Deadline) -> Iterator[gpu_report.Row]:
        assert json.loads(path.read_text())["sections"]["a"]["rows"] == {"first": 1.0}
        yield "second", {"is_right": False}

    path = tmp_path / "new" / "report.json"
    report = gpu_report.Report(path, {"head": 1})
    report.run([gpu_report.Section("a", 5, failing), gpu_report.Section("b", 5, working)], 60)
    written = json.loads(path.read_text())
    assert written["head"] == 1
    assert written["sections"]["a"]["status"] == "failed: RuntimeError: device lost"
    assert written["sections"]["b"]["status"] == "done"
    assert [fault.split(" ")[0] for fault in report.faults()] == ["a:", "b:"]
    assert [file.name for file in path.parent.iterdir()] == ["report.json"]


def test_a_spent_budget_skips_sections_with_a_note(tmp_path: Path) -> None:
    def never(deadline: gpu_report.Deadline) -> Iterator[gpu_report.Row]:
        raise AssertionError("ran without time")
        yield "x", 1

    report = gpu_report.Report(tmp_path / "report.json", {})
    report.run([gpu_report.Section("a", 5, never)], 0.0)
    assert report.values["sections"]["a"]["status"] == "skipped: the time budget is spent"
    assert report.faults() == ["a: skipped: the time budget is spent"]


def test_time_that_a_section_leaves_over_goes_to_later_ones(tmp_path: Path) -> None:
    seen: list[float] = []

    def watching(deadline: gpu_report.Deadline) -> Iterator[gpu_report.Row]:
        seen.append(deadline.left_s())
        yield "x", 1

    sections = [gpu_report.Section(name, 100, watching) for name in ("a", "b", "c")]
    gpu_report.Report(tmp_path / "report.json", {}).run(sections, 300)
    assert 90 < seen[0] <= 100
    assert 190 < seen[1] <= 200
    assert 290 < seen[2] <= 300
