"""The GPU benchmarks on a machine without a GPU: rehearsals in child processes, and the judges in this one.

One rehearsal goes through Triton's interpreter, which must be chosen before Triton is imported. The other goes
without, and without the packages that a GPU machine may lack.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import default_run, roofline
from benchmarks.gpu import parts as gpu_parts
from benchmarks.gpu import report as gpu_report
from benchmarks.gpu import run as gpu
from benchmarks.gpu import settings as gpu_settings
from benchmarks.gpu import train as gpu_train
from benchmarks.gpu.backbones import Backbones
from benchmarks.gpu.checks import trainer as trainer_check
from benchmarks.gpu.checks import updates
from benchmarks.gpu.checks.small import small_workload
from benchmarks.kernels.contenders import CONTENDERS
from peft_mux.engine.tasks.task_run import TaskTable
from tests.paths import ROOT

ABSENT = ("datasets", "pulp", "bitsandbytes")
BLOCKED = (
    f"import sys; sys.modules.update(dict.fromkeys({ABSENT})); from benchmarks.gpu.run import main; sys.exit(main())"
)
CPU = gpu_settings.Settings(torch.device("cpu"), is_rehearsal=True)
TINY = roofline.Backbone(32, 1, 48, 4, 64)
# What differs from these in its numbers alone is left out, and more where the interpreter takes its time.
INTERPRETED = ("lora float", "cross", "attention", "task", "captured", "trainer float", "default", "gain", "kernels")
THROUGH_SLICES = ("device", "lora", "cross", "attention", "task", "captured", "trainer", "plain", "default", "gain",
                  "kernels")  # fmt: skip


@pytest.mark.nightly
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("path", ["slices", "kernels"])
def test_a_rehearsal_finishes_every_part_and_finds_all_of_them_right(path: str, tmp_path: Path) -> None:
    chosen = THROUGH_SLICES if path == "slices" else INTERPRETED
    command = ["-c", BLOCKED] if path == "slices" else ["-m", "benchmarks.gpu"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    environment["TRITON_INTERPRET"] = "1" if path == "kernels" else "0"
    arguments = [
        *command,
        "--parts",
        *chosen,
        "--rehearse",
        "--minutes",
        "15",
        "--output",
        str(tmp_path / "report.json"),
    ]
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    report = json.loads((tmp_path / "report.json").read_text())

    names = [part.name for part in gpu_parts.plan() if part.name.startswith(chosen)]
    assert {name: entry["status"] for name, entry in report["parts"].items()} == dict.fromkeys(names, "done")
    assert report["faults"] == []
    assert len(report["checks"]) > 20
    assert set(report["checks"].values()) == {"pass"}
    rows = {name: entry["rows"] for name, entry in report["parts"].items()}
    if path == "slices":
        reasons = ("TRITON_INTERPRET is not 1", "trl or datasets is not installed")
        assert [line for line in report["skipped"] if not line.endswith(reasons)] == []
        assert rows["default run"]["tiny tokens a step: default run"]["loss_difference"] <= 1e-4
    tables = [row for row in rows["kernels"].values() if "contenders" in row]
    assert [list(row["contenders"]) for row in tables] == [list(CONTENDERS)] * 2
    for row in (*(table["contenders"]["mux"] for table in tables), rows["trainer float32"]["trainer float32"]):
        assert row["path"] == path
    runs = {name.split(": ")[-1]: row for name, row in rows["default run"].items()}
    for name in (*default_run.BASELINES.values(), "default run"):
        assert runs[name]["is_right"] is True, name
    assert runs["default run"]["path"] == path


# ------------------------------------------------------------------- the judges


def test_losses_of_the_second_step_count_and_a_nan_is_no_agreement() -> None:
    reference = [[2.0, 4.0], [1.0, 3.0]]
    assert gpu_train.loss_difference([[2.0, 4.0], [1.0, 3.3]], reference) == pytest.approx(0.1)
    assert gpu_train.loss_difference([[2.0, 4.0]], reference) == 0.0
    error = gpu_train.loss_difference([[float("nan"), 4.0], [1.0, 3.0]], reference)
    assert error != error


@pytest.mark.parametrize(
    ("device", "calls", "is_right"),
    [
        ("cuda", {"kernels": 4, "slices": 0}, True),
        ("cuda", {"kernels": 4, "slices": 1}, False),
        ("cuda", {}, False),
        ("cpu", {"kernels": 0, "slices": 4}, True),  # there are no kernels
    ],
)
def test_slices_on_a_gpu_are_a_fault_even_with_the_right_losses(
    device: str, calls: dict[str, int], is_right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "NVIDIA H200")
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    settings = gpu_settings.Settings(torch.device(device), is_rehearsal=False)
    assert gpu_train.path_verdicts(settings, {"path": gpu_train.path_of(calls)}) == [is_right]


def _rate_by_company(self: Any, *args: Any, original: Any = TaskTable.apply) -> None:
    for run in self.running:
        for group in run.optimizer.optimizer.param_groups:
            group["lr"] /= len(self.running)
    original(self, *args)


@pytest.mark.parametrize(
    ("target", "name", "fault", "rows", "check"),
    [
        (torch.nn.utils, "clip_grads_with_norm_", lambda *given: None, updates.task_table_rows, "task table"),
        (
            TaskTable,
            "apply",
            _rate_by_company,
            lambda settings: trainer_check.trainer_rows(settings, torch.float32),
            "trainer float32",
        ),
    ],
    ids=["no clipping", "rate by company"],
)
def test_a_check_finds_its_fault(
    target: Any, name: str, fault: Any, rows: Callable[[Any], Iterator[Any]], check: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(target, name, fault)
    assert dict(rows(CPU))[check]["is_right"] is False


# -------------------------------------------------------------- what is computed


def test_all_parts_take_less_than_eight_of_nine_minutes_on_an_h100_by_their_computed_times() -> None:
    parts = gpu_parts.plan()
    assert roofline.START_S + sum(part.estimated_s for part in parts) <= 465 < 60 * gpu.MINUTES == 540
    assert len({part.name for part in parts}) == len(parts)
    tokens = [8 * 52 * rows for rows in default_run.BATCH_SIZES.values()]  # a row has 52 tokens on average
    assert tokens == pytest.approx([1000, 4000, 8000], rel=0.2)


# ------------------------------------------------------------ failures are survived


@pytest.mark.parametrize(
    ("contender", "error", "row"),
    [
        ("hf", torch.cuda.OutOfMemoryError("140 GiB"), {"skipped": "out of memory: 140 GiB"}),
        ("mux", RuntimeError("no kernel\nmore"), {"failed": "RuntimeError: no kernel", "is_right": False}),
    ],
)
def test_a_contender_that_fails_is_noted_and_the_next_one_gets_a_new_backbone(
    contender: str, error: Exception, row: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(settings: Any, backbone: Any, workload: Any, pass_tokens: int) -> Any:
        backbone.model.layers[0].self_attn.q_proj.weight.data.zero_()
        raise error

    monkeypatch.setitem(gpu_train.TRAINERS, contender, failing)
    backbones = Backbones(CPU)
    assert gpu_train.train_safely(CPU, backbones, TINY, contender, small_workload(TINY), 1024) == row
    assert gpu_train.train_safely(CPU, backbones, TINY, "padded", small_workload(TINY), 1024)["losses"]
    assert backbones.num_made == 2


class Clock:
    """Seconds that pass only when somebody works."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def work(self, seconds: float) -> Iterator[gpu_report.Row]:
        self.now_s += seconds
        yield "worked", {"seconds": seconds}


def test_parts_run_one_after_another_and_what_does_not_fit_is_named(tmp_path: Path) -> None:
    clock = Clock()
    parts = [("a", 40, 50), ("b", 60, 60), ("c", 30, 10), ("d", 41, 1), ("e", 40, 40), ("f", 1, 1)]
    made = [gpu_report.Part(name, estimate, lambda deadline, s=s: clock.work(s)) for name, estimate, s in parts]
    report = gpu_report.Report(tmp_path / "report.json", {}, clock=clock)
    report.run(made, 100)
    assert {name: entry["status"] for name, entry in report.values["parts"].items()} == {
        "a": "done",
        "b": "skipped: needs 60 s, and 50 s are left",
        "c": "done",
        "d": "skipped: needs 41 s, and 40 s are left",
        "e": "done",
        "f": "skipped: needs 1 s, and 0 s are left",
    }


def test_the_exit_code_reports_a_check_that_failed_and_a_name_of_no_part_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(SystemExit, match=r"--parts: part 'nothing' must be the start of a part's name \(device, lora"):
        gpu.main(["--rehearse", "--parts", "nothing"])
    command = ["--rehearse", "--parts", "task table", "--output", str(tmp_path / "report.json")]
    assert gpu.main(command) == 0
    monkeypatch.setattr(torch.nn.utils, "clip_grads_with_norm_", lambda *given: None)
    assert gpu.main(command) == 1
    assert "fail" in json.loads((tmp_path / "report.json").read_text())["checks"].values()


def test_a_part_that_fails_costs_no_other_and_keeps_its_rows_unless_the_device_is_lost(tmp_path: Path) -> None:
    def failing(deadline: gpu_report.Deadline) -> Iterator[gpu_report.Row]:
        yield "first", 1.0
        raise RuntimeError("no such kernel")

    def working(deadline: gpu_report.Deadline) -> Iterator[gpu_report.Row]:
        yield "second", {"is_right": False}
        yield "third", {"is_right": True}
        yield "fourth", {"skipped": "too large"}

    path = tmp_path / "new" / "report.json"
    parts = [gpu_report.Part("a", 5, failing), gpu_report.Part("b", 5, working, True)]
    gpu_report.Report(path, {"head": 1}, after_failure=lambda: None).run(parts, 60)
    written = json.loads(path.read_text())
    assert written["head"] == 1
    assert written["parts"]["a"]["status"] == "failed: RuntimeError: no such kernel"
    assert written["parts"]["a"]["rows"] == {"first": 1.0}
    assert written["checks"] == {"b: second": "fail", "b: third": "pass"}
    assert written["skipped"] == ["b: fourth: too large"]
    assert [fault.split(" ")[0] for fault in written["faults"]] == ["a:", "b:"]
    lost = gpu_report.Report(path, {}, after_failure=lambda: "the device is lost")
    lost.run(parts, 60)
    assert lost.faults() == ["a: failed: RuntimeError: no such kernel", "b: skipped: the device is lost"]
