"""The GPU benchmarks on a machine without a GPU: dry runs in child processes, and the judges in this one.

One dry run goes through Triton's interpreter, which has to be chosen before Triton is imported. The other goes without,
and without the packages that a GPU machine may lack.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import report as gpu_report
from benchmarks.gpu import run as gpu
from benchmarks.gpu import settings as gpu_settings
from benchmarks.gpu import train as gpu_train
from benchmarks.gpu import trainers as gpu_trainers
from benchmarks.kernels import run as kernels
from benchmarks.kernels.contenders import CONTENDERS
from benchmarks.kernels.problem import Result
from tests.paths import ROOT

ABSENT = ("datasets", "pulp", "bitsandbytes")
BLOCKED = (
    f"import sys; sys.modules.update(dict.fromkeys({ABSENT})); from benchmarks.gpu.run import main; sys.exit(main())"
)
LORA_CHECKS = [f"lora{group} float32{kind}" for group in ("", " group") for kind in ("", " co-location")]


def dry_run(path: Path, interpret: str, *command: str) -> dict[str, Any]:
    """Return the report of a dry run."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    environment["TRITON_INTERPRET"] = interpret
    arguments = [sys.executable, *command, "--dry-run", "--output", str(path)]
    result = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def through_slices(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return dry_run(tmp_path_factory.mktemp("gpu") / "slices.json", "0", "-c", BLOCKED)


@pytest.fixture(scope="module")
def through_kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton, for its interpreter")
    return dry_run(tmp_path_factory.mktemp("gpu") / "kernels.json", "1", "-m", "benchmarks.gpu")


@pytest.fixture(params=["slices", pytest.param("kernels", marks=pytest.mark.slow)])
def path(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def report(path: str, request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.getfixturevalue(f"through_{path}")


def rows_of(report: dict[str, Any], section: str) -> dict[str, Any]:
    return report["sections"][section]["rows"]


def test_the_dry_run_finishes_every_section_also_without_optional_packages(report: dict[str, Any]) -> None:
    assert {name: entry["status"] for name, entry in report["sections"].items()} == dict.fromkeys(gpu.SECTIONS, "done")


def test_the_dry_run_checks_each_kernel_that_can_run_and_finds_it_right(path: str, report: dict[str, Any]) -> None:
    rows = dict(rows_of(report, "correctness"))
    checks = [*LORA_CHECKS, "cross entropy float32"] if path == "kernels" else []
    for direction in ("varlen causal", "varlen both directions"):
        checks = [*checks, direction, f"{direction} co-location", f"{direction} NaN isolation"]
    skipped = rows.pop("Triton kernels", None)
    assert (skipped is None) == (path == "kernels")
    assert {name: row["is_right"] for name, row in rows.items()} == dict.fromkeys(checks, True)


def test_the_dry_run_holds_every_contender_against_float64(path: str, report: dict[str, Any]) -> None:
    rows = rows_of(report, "kernels")
    tables = [row for row in rows.values() if "contenders" in row]
    assert len(tables) == 2
    for row in tables:
        assert list(row["contenders"]) == list(CONTENDERS)
        for name, contender in row["contenders"].items():
            wanted = set() if name == "frozen" else set(Result._fields)
            assert set(contender["errors"]) == wanted, name
            assert all(0 < error <= 1e-5 for error in contender["errors"].values()), name
        assert row["contenders"]["mux"]["path"] == path
    assert rows["all linear layers of a block"]["mux eager_us"] > 0


@pytest.mark.slow
def test_each_kernel_of_a_group_is_timed_by_itself(through_kernels: dict[str, Any]) -> None:
    counts = [len(row["kernels"]) for row in rows_of(through_kernels, "kernels").values() if "kernels" in row]
    assert counts == [6, 12]


def test_every_trainer_has_the_losses_of_plain_peft_also_after_an_update(report: dict[str, Any]) -> None:
    for section in ("layer", "end_to_end"):
        rows = rows_of(report, section)
        for name in ("hf", "mux", "padded"):
            found = [row for case, row in rows.items() if case.endswith(f": {name}")]
            assert found, f"{section} has no {name}"
            assert all(len(row["losses"]) == 2 and row["is_right"] for row in found), name


def test_the_report_tells_which_path_the_model_took(path: str, report: dict[str, Any]) -> None:
    groups = {"layer": 4, "end_to_end": 8}  # q/k/v, o, gate/up and down of each layer
    for section, count in groups.items():
        (row,) = (row for case, row in rows_of(report, section).items() if case.endswith(": mux"))
        assert row["path"] == path
        assert row["group_calls"][path] == 2 * count  # two steps of one micro-batch
        assert sum(row["group_calls"].values()) == 2 * count


# ------------------------------------------------------------------- the judges


def test_losses_of_the_second_step_count_and_a_nan_is_no_agreement() -> None:
    reference = [[2.0, 4.0], [1.0, 3.0]]
    assert gpu_train.loss_difference([[2.0, 4.0], [1.0, 3.3]], reference) == pytest.approx(0.1)
    assert gpu_train.loss_difference([[2.0, 4.0]], reference) == 0.0
    error = gpu_train.loss_difference([[float("nan"), 4.0], [1.0, 3.0]], reference)
    assert error != error


def test_useful_work_is_that_of_the_formula() -> None:
    from benchmarks.training.workloads import ModelSpec, TaskWorkload, Workload

    settings = gpu_settings.Settings(torch.device("cpu"), is_dry=True)
    backbone = gpu_train.llama(settings, ModelSpec(32, 2, 48, 4, 64))
    rows = tuple({"input_ids": [1] * length, "labels": [1] * length} for length in (2, 6))
    work = Workload("uniform", (TaskWorkload("a", "x", 4, 0, 2, rows),), 1, "full", "none")
    layer = 32 * 32 + 2 * 32 * 8 + 32 * 32 + 3 * 32 * 48
    widths = 2 * (4 * 32 + 2 * (32 + 8) + 3 * (32 + 48))
    wanted = 4 * (2 * layer + 32 * 64) + 6 * 4 * widths + 7 * 32 * 2 * (4 + 36) / 8
    assert gpu_train.flops_per_token(backbone, work) == pytest.approx(wanted)


def judged(device: str, calls: dict[str, int]) -> dict[str, Any]:
    settings = gpu_settings.Settings(torch.device(device), is_dry=False)
    reference = {"tokens_per_s": 1.0, "losses": [[2.0]]}
    row = {**reference, "path": gpu_train.path_of(calls)}
    return gpu_train.judged(settings, row, 1.0, {"floor": reference, "hf": reference})


@pytest.mark.parametrize("calls", [{"kernels": 0, "slices": 4}, {"kernels": 4, "slices": 1}, {}])
def test_slices_on_a_gpu_are_a_fault_even_with_the_right_losses(
    calls: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    assert judged("cuda", calls)["is_right"] is False
    assert judged("cuda", {"kernels": 4, "slices": 0})["is_right"] is True


def test_slices_are_right_where_there_are_no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert judged("cpu", {"kernels": 0, "slices": 4})["is_right"] is True
    assert judged("cpu", {"kernels": 4, "slices": 0})["is_right"] is False


def test_paths_are_counted_only_while_somebody_asks() -> None:
    from peft_mux.modeling.adapters.lora import layer as layers

    before = layers.grouped_lora_slices
    with gpu_trainers.counted_paths() as calls:
        assert layers.grouped_lora_slices is not before
    assert layers.grouped_lora_slices is before
    assert dict(calls) == {"kernels": 0, "slices": 0}


def test_the_first_shapes_are_the_groups_of_a_block() -> None:
    groups, others = gpu._kernel_shapes(gpu_settings.Settings(torch.device("cpu"), is_dry=False))
    assert [(shape.in_features, shape.out_features) for shape in groups] == list(kernels.LLAMA_LAYER)
    assert {(shape.num_tokens, shape.num_tasks, shape.rank) for shape in groups} == {(4096, 8, 16)}
    assert len({*groups, *others}) == len(groups) + len(others)


def test_the_sections_fit_into_nine_minutes() -> None:
    assert sum(seconds for seconds, _ in gpu.SECTIONS.values()) <= gpu.TOTAL_S
    assert gpu.TOTAL_S <= 500


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
