"""The GPU benchmarks on a machine without a GPU: rehearsals in child processes, and the judges in this one.

One rehearsal goes through Triton's interpreter, which must be chosen before Triton is imported. The other goes
without, and without the packages that a GPU machine may lack.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.gpu import default_run, roofline
from benchmarks.gpu import parts as gpu_parts
from benchmarks.gpu import profiler as gpu_profiler
from benchmarks.gpu import report as gpu_report
from benchmarks.gpu import run as gpu
from benchmarks.gpu import settings as gpu_settings
from benchmarks.gpu import train as gpu_train
from benchmarks.gpu import trainers as gpu_trainers
from benchmarks.gpu.backbones import Backbones, llama
from benchmarks.gpu.checks import trainer as trainer_check
from benchmarks.gpu.checks import updates
from benchmarks.kernels.contenders import CONTENDERS
from benchmarks.kernels.problem import Result
from benchmarks.training.workloads import make_workload
from peft_mux.engine.tasks.task_run import TaskTable
from peft_mux.kernels import adamw as multi_adamw
from tests.paths import ROOT

ABSENT = ("datasets", "pulp", "bitsandbytes")
BLOCKED = (
    f"import sys; sys.modules.update(dict.fromkeys({ABSENT})); from benchmarks.gpu.run import main; sys.exit(main())"
)
LORA_CHECKS = [f"lora{group} float32{kind}" for group in ("", " group") for kind in ("", " co-location")]
CPU = gpu_settings.Settings(torch.device("cpu"), is_rehearsal=True)
END_TO_END = "end to end 8 uniform x 32 rows"
# What differs from these in its numbers alone is left out, and more where the interpreter takes its time.
INTERPRETED = ("lora float", "lora group float", "cross", "attention", "adamw", "task", "captured", "trainer float",
               END_TO_END, "kernels")  # fmt: skip
THROUGH_SLICES = ("device", "lora", "cross", "attention", "adamw", "task", "captured", "trainer", "plain", "default",
                  "gain", "kernels", END_TO_END, "layer")  # fmt: skip


def rehearse(path: Path, interpret: str, *command: str) -> dict[str, Any]:
    """Return the report of a rehearsal."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    environment["TRITON_INTERPRET"] = interpret
    arguments = [sys.executable, *command, "--rehearse", "--output", str(path)]
    result = subprocess.run(arguments, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return json.loads(path.read_text())


@pytest.fixture(scope="module")
def through_slices(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return rehearse(tmp_path_factory.mktemp("gpu") / "slices.json", "0", "-c", BLOCKED, "--parts", *THROUGH_SLICES)


@pytest.fixture(scope="module")
def through_kernels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("needs Triton, for its interpreter")
    path = tmp_path_factory.mktemp("gpu") / "kernels.json"
    return rehearse(path, "1", "-m", "benchmarks.gpu", "--parts", *INTERPRETED)


@pytest.fixture(params=["slices", pytest.param("kernels", marks=pytest.mark.timeout(1200))])
def path(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def report(path: str, request: pytest.FixtureRequest) -> dict[str, Any]:
    return request.getfixturevalue(f"through_{path}")


def rows_of(report: dict[str, Any], part: str) -> dict[str, Any]:
    return report["parts"][part]["rows"]


@pytest.mark.slow
def test_the_rehearsal_finishes_every_part_also_without_optional_packages(path: str, report: dict[str, Any]) -> None:
    chosen = THROUGH_SLICES if path == "slices" else INTERPRETED
    names = [part.name for part in gpu_parts.plan() if part.name.startswith(chosen)]
    assert {name: entry["status"] for name, entry in report["parts"].items()} == dict.fromkeys(names, "done")
    assert report["faults"] == []
    assert {"torch", "transformers", "peft", "python"} <= set(report["versions"])
    assert len(report["checks"]) > 20
    assert set(report["checks"].values()) == {"pass"}
    row = rows_of(report, "trainer float32")["trainer float32"]
    assert (row["path"], row["statuses"]) == (path, "succeeded")
    if path == "slices":
        reasons = ("TRITON_INTERPRET is not 1", "trl or datasets is not installed")
        assert [line for line in report["skipped"] if not line.endswith(reasons)] == []
        assert report["skipped"]
    else:
        assert [len(row["kernels"]) for row in rows_of(report, "kernels").values() if "kernels" in row] == [6, 12]


@pytest.mark.slow
def test_the_rehearsal_checks_each_kernel_that_can_run_and_finds_it_right(path: str, report: dict[str, Any]) -> None:
    checks = [*LORA_CHECKS, "cross entropy float32", "captured pass", "captured pass NaN isolation"]
    checks = checks if path == "kernels" else []
    for direction in ("varlen causal", "varlen both directions"):
        checks += [direction, f"{direction} co-location", f"{direction} NaN isolation"]
    checks += ["adamw float32", "adamw float32 co-location", "adamw float32 NaN isolation"]
    checks += ["task table", "task table NaN isolation", "trainer float32", "trainer float32 adapters"]
    checks += ["trainer bfloat16", "trainer bfloat16 adapters"] if path == "slices" else []
    names = ("lora", "cross", "attention", "adamw", "task", "captured", "trainer")
    rows = {
        row: value
        for part, entry in report["parts"].items()
        if part.startswith(names)
        for row, value in entry["rows"].items()
        if "skipped" not in value
    }
    assert {name: row["is_right"] for name, row in rows.items()} == dict.fromkeys(sorted(checks), True)


@pytest.mark.slow
def test_gains_are_ratios_of_the_times_of_all_tasks(through_slices: dict[str, Any]) -> None:
    rows = rows_of(through_slices, "gain 8B")
    row = rows["32 tokens a task"]
    assert row["tokens_per_step"] == 8 * 32
    assert row["gain_over_hf"] == pytest.approx(row["hf_s"] / row["together_s"])
    assert row["gain_over_packed"] == pytest.approx(row["packed_s"] / row["together_s"])
    assert row["gain_over_alone"] == pytest.approx(row["alone_s"] / row["together_s"])
    assert row["is_right"] is True
    assert row["loss_difference"] <= 1e-4
    assert rows["gains by tokens a task"] == {"32": {key: row[key] for key in row if key.startswith("gain")}}


@pytest.mark.slow
def test_the_rehearsal_compares_every_contender_with_float64(path: str, report: dict[str, Any]) -> None:
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
def test_every_trainer_has_the_losses_of_plain_peft_also_after_an_update(report: dict[str, Any]) -> None:
    for part in {"layer", END_TO_END} & set(report["parts"]):
        rows = rows_of(report, part)
        for name in ("hf", "packed", "mux", "mux_graphs", "padded"):
            found = [row for case, row in rows.items() if case.endswith(f": {name}")]
            assert found, f"{part} has no {name}"
            assert all(len(row["losses"]) == 2 and row["is_right"] for row in found), name


@pytest.mark.slow
def test_the_report_says_which_path_the_model_took(path: str, report: dict[str, Any]) -> None:
    groups = {"layer": 4, END_TO_END: 8}  # q/k/v, o, gate/up and down of each layer
    for part, count in groups.items():
        if part not in report["parts"]:
            assert path == "kernels"  # left out there for the time that it takes
            continue
        (row,) = (row for case, row in rows_of(report, part).items() if case.endswith(": mux"))
        assert row["path"] == path
        assert row["group_calls"][path] == 2 * count  # two steps of one micro-batch
        assert sum(row["group_calls"].values()) == 2 * count
        (row,) = (row for case, row in rows_of(report, part).items() if case.endswith(": mux_graphs"))
        assert (row["num_captures"] > 0) is (path == "kernels")


# ------------------------------------------------------------------- the judges


def test_losses_of_the_second_step_count_and_a_nan_is_no_agreement() -> None:
    reference = [[2.0, 4.0], [1.0, 3.0]]
    assert gpu_train.loss_difference([[2.0, 4.0], [1.0, 3.3]], reference) == pytest.approx(0.1)
    assert gpu_train.loss_difference([[2.0, 4.0]], reference) == 0.0
    error = gpu_train.loss_difference([[float("nan"), 4.0], [1.0, 3.0]], reference)
    assert error != error


def test_useful_work_is_that_of_the_formula() -> None:
    from benchmarks.training.workloads import TaskWorkload, Workload

    rows = tuple({"input_ids": [1] * length, "labels": [1] * length} for length in (2, 6))
    work = Workload("uniform", (TaskWorkload("a", "x", 4, 0, 2, rows),), 1, "full", "none")
    layer = 32 * 32 + 2 * 32 * 8 + 32 * 32 + 3 * 32 * 48
    widths = 2 * (4 * 32 + 2 * (32 + 8) + 3 * (32 + 48))
    wanted = 4 * (2 * layer + 32 * 64) + 6 * 4 * widths + 7 * 32 * 2 * (4 + 36) / 8
    assert gpu_train.flops_per_token(roofline.Backbone(32, 2, 48, 4, 64), work) == pytest.approx(wanted)


def judged(device: str, calls: dict[str, int]) -> dict[str, Any]:
    settings = gpu_settings.Settings(torch.device(device), is_rehearsal=False)
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
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert judged("cpu", {"kernels": 0, "slices": 4})["is_right"] is True, "there are no kernels"
    assert judged("cpu", {"kernels": 4, "slices": 0})["is_right"] is False


# ------------------------------------------------------------- checks can fail


def rows_found(rows: Iterator[gpu_report.Row]) -> dict[str, bool]:
    return {name: value["is_right"] for name, value in rows}


def test_an_update_that_lets_one_task_clip_another_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    norms = multi_adamw.total_norms

    def joint(gradients: Any) -> list[torch.Tensor]:
        return [torch.stack(norms(gradients)).norm()] * len(gradients)

    monkeypatch.setattr(multi_adamw, "total_norms", joint)
    found = rows_found(updates.adamw_rows(CPU))
    assert found["adamw float32"] is False
    assert found["adamw float32 co-location"] is False


def test_an_update_without_weight_decay_and_a_table_that_does_not_clip_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = multi_adamw.foreach_update

    def without(pages: Any, verdicts: torch.Tensor) -> Any:
        return step([page._replace(weight_decay=0.0) for page in pages], verdicts)

    with monkeypatch.context() as patch:
        patch.setattr(multi_adamw, "foreach_update", without)
        assert rows_found(updates.adamw_rows(CPU))["adamw float32"] is False
    monkeypatch.setattr(torch.nn.utils, "clip_grads_with_norm_", lambda *given: None)
    assert rows_found(updates.task_table_rows(CPU))["task table"] is False


def test_a_run_whose_tasks_depend_on_their_company_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def rate_by_company(self: Any, *args: Any, original: Any = TaskTable.apply) -> None:
        for run in self.running:
            for group in run.optimizer.optimizer.param_groups:
                group["lr"] /= len(self.running)
        original(self, *args)

    monkeypatch.setattr(TaskTable, "apply", rate_by_company)
    assert rows_found(trainer_check.trainer_rows(CPU, torch.float32))["trainer float32"] is False


def test_an_update_of_a_task_that_is_not_finite_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    step = multi_adamw.foreach_update
    monkeypatch.setattr(multi_adamw, "foreach_update", lambda pages, verdicts: step(pages, verdicts.nan_to_num()))
    assert rows_found(updates.adamw_rows(CPU))["adamw float32 NaN isolation"] is False


# -------------------------------------------------------------- what is computed


def test_all_parts_take_less_than_eight_of_nine_minutes_on_an_h100_by_their_computed_times() -> None:
    parts = gpu_parts.plan()
    assert roofline.START_S + sum(part.estimated_s for part in parts) <= 465 < 60 * gpu.MINUTES == 540
    assert all(part.estimated_s > 0 for part in parts)
    assert len({part.name for part in parts}) == len(parts)


def test_the_default_run_has_one_four_and_eight_thousand_tokens_a_step() -> None:
    tokens = [gpu_train.Case("nonuniform", 8, rows).num_tokens for rows in default_run.BATCH_SIZES.values()]
    assert tokens == pytest.approx([1000, 4000, 8000], rel=0.2)


@pytest.mark.slow
def test_the_default_run_is_compared_with_packed_peft_on_the_same_rows(through_slices: dict[str, Any]) -> None:
    rows = rows_of(through_slices, "default run")
    baseline, run = rows["tiny tokens a step: PEFT, packed"], rows["tiny tokens a step: default run"]
    assert len(run["losses"]) == default_run.NUM_STEPS
    assert run["loss_difference"] <= 1e-4
    assert run["is_right"] is True
    assert run["gain_over_packed"] == pytest.approx(run["tokens_per_s"] / baseline["tokens_per_s"])


@pytest.mark.slow
def test_the_default_run_is_profiled_in_its_last_steps(through_slices: dict[str, Any]) -> None:
    run = rows_of(through_slices, "default run")["tiny tokens a step: default run"]
    profile = run["profile"]
    assert profile["watched"] == "operators of the host instead"
    assert 0 < profile["busy_s"] <= profile["step_s"]
    assert run["gpu_idle_share"] == pytest.approx(1 - profile["busy_s"] / profile["step_s"])
    assert profile["kernels_s"]


def test_trl_trains_the_same_losses_one_task_after_another() -> None:
    pytest.importorskip("trl")
    work = make_workload("nonuniform", num_tasks=2, num_steps=2, vocab_size=64, batch_size=2)
    shape = roofline.Backbone(32, 1, 48, 4, 64)
    mux, trl = (gpu_trainers.TRAINERS[name](CPU, llama(CPU, shape), work, 4096) for name in ("mux", "trl"))
    assert gpu_train.loss_difference(trl.losses, mux.losses) <= 1e-4
    assert [len(found.steps_s) for found in (mux, trl)] == [2, 2]


def test_the_device_is_busy_wherever_a_kernel_runs_and_communication_is_exposed_where_nothing_else_does() -> None:
    def event(name: str, start_us: float, end_us: float, category: str = "kernel") -> dict[str, Any]:
        return {"ph": "X", "cat": category, "name": name, "ts": start_us, "dur": end_us - start_us}

    events = [
        event("gemm", 0, 40),
        event("gemm", 30, 50),  # on another stream
        event("ncclDevKernel_AllReduce", 45, 70),
        event("Memcpy HtoD", 80, 90, "gpu_memcpy"),
        event("Optimizer.step", 0, 100, "gpu_user_annotation"),
        {"ph": "i", "name": "mark", "ts": 95},
    ]
    found = gpu_profiler.summary(events, 1e-4, 2, gpu_profiler.ON_DEVICE)
    assert found["busy_s"] == pytest.approx(80e-6 / 2)
    assert found["idle_share"] == pytest.approx(0.2)
    assert found["exposed_communication_s"] == pytest.approx(20e-6 / 2)
    assert found["launches"] == 2
    assert found["kernels_s"]["gemm"] == pytest.approx(60e-6 / 2)


@pytest.mark.slow
def test_gradients_and_adapters_are_compared_with_plain_peft_in_fp32(through_slices: dict[str, Any]) -> None:
    rows = rows_of(through_slices, "plain peft")
    assert [0 < row["error"] <= row["tolerance"] == 1e-4 for row in rows.values()] == [True, True]


@pytest.mark.parametrize("shape", [roofline.LLAMA_8B.of_layers(2), roofline.Backbone(2048, 3, 8192, 32, 1000)])
def test_a_shape_counts_what_the_backbone_and_its_adapters_have(shape: roofline.Backbone) -> None:
    from peft import LoraConfig, get_peft_model

    from peft_mux.modeling.backbone.shape import model_shape
    from peft_mux.scheduler.costs.memory import activation_bytes_per_token

    settings = gpu_settings.Settings(torch.device("meta"), is_rehearsal=False)
    model = llama(settings, shape)
    found = model_shape(model, model.config, dtype=torch.bfloat16, activation_dtype=torch.bfloat16)
    norms = (2 * shape.num_layers + 1) * shape.hidden_size
    assert found.backbone_bytes == shape.weight_bytes + 2 * norms
    assert activation_bytes_per_token(found, checkpointing=False) == shape.num_layers * shape.layer_bytes
    linear = [m for m in model.modules() if isinstance(m, torch.nn.Linear)]
    assert sum(layer.weight.numel() for layer in linear) == shape.linear_weights
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM"))
    trained = sum(p.numel() for key, p in adapted.named_parameters() if "lora_" in key)
    assert trained == 4 * shape.rank_weights


def test_a_pass_has_the_tokens_that_fit_and_a_padded_batch_that_does_not_is_left_out_with_its_size(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shape, card_bytes = roofline.LLAMA_8B, 85 * 10**9
    trained = 8 * 8 * shape.rank_weights
    room = roofline.pass_tokens(shape, "mux", trained, card_bytes, 16384)
    assert 7 * 1024 <= room <= 10 * 1024
    allowed = roofline.USABLE_SHARE * card_bytes
    assert roofline.peak_bytes(shape, "mux", room, trained) <= allowed
    assert roofline.peak_bytes(shape, "mux", room + 1024, trained) > allowed
    assert roofline.pass_tokens(shape, "mux", trained, None, 16384) == 16384
    monkeypatch.setattr(gpu_settings.Settings, "device_bytes", card_bytes)
    settings = gpu_settings.Settings(torch.device("cpu"), is_rehearsal=False)
    reason = gpu_train.too_large(settings, shape, gpu_train.CASES[0], "padded", 8 * 32 * 69)
    assert reason is not None
    assert "GB for 17664 tokens at once, of 76 GB" in reason
    small = gpu_train.Case("nonuniform", 8, 8)
    assert gpu_train.too_large(settings, shape, small, "padded", 8 * 8 * 69) is None


def test_large_batches_of_plain_peft_are_accumulated_by_their_targets() -> None:
    rows = [{"input_ids": [1] * n, "labels": [-100, *[1] * (n - 1)]} for n in (5, 3, 4)]
    parts = gpu_trainers.shares_of(rows, 10)
    assert [len(part) for part, _ in parts] == [2, 1]
    assert [share for _, share in parts] == pytest.approx([6 / 9, 3 / 9])
    assert [share for _, share in gpu_trainers.shares_of(rows, 1000)] == [1.0]


# ------------------------------------------------------------ failures are survived


def compared(monkeypatch: pytest.MonkeyPatch, contender: str, error: Exception) -> tuple[dict[str, Any], Backbones]:
    """Return the rows of a case in which one contender attaches adapters to the backbone, and then fails."""

    def failing(settings: Any, backbone: Any, workload: Any, pass_tokens: int) -> Any:
        backbone.model.layers[0].self_attn.q_proj.weight.data.zero_()
        raise error

    monkeypatch.setitem(gpu_train.TRAINERS, contender, failing)
    backbones = Backbones(CPU)
    case, shape = gpu_train.Case("uniform", 2, 4), roofline.Backbone(32, 1, 48, 4, 64)
    rows = dict(gpu_train.compare(CPU, gpu_report.Deadline(1e6), backbones, shape, case))
    return {name.split(": ")[-1]: row for name, row in rows.items()}, backbones


def test_an_out_of_memory_is_noted_and_the_next_contender_gets_a_new_backbone(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, backbones = compared(monkeypatch, "hf", torch.cuda.OutOfMemoryError("tried to allocate 140 GiB"))
    assert rows["hf"] == {"skipped": "out of memory: tried to allocate 140 GiB"}
    assert backbones.num_made == 2
    for name in ("mux", "mux_graphs", "padded"):
        assert rows[name]["is_right"] is True
    assert rows["mux"]["loss_difference"] <= 1e-4  # of the floor, on the backbone of before


def test_a_contender_that_fails_is_a_fault_and_costs_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, backbones = compared(monkeypatch, "mux", RuntimeError("no such kernel\nmore"))
    assert rows["mux"] == {"failed": "RuntimeError: no such kernel", "is_right": False}
    assert backbones.num_made == 2
    assert rows["padded"]["is_right"] is True
    held = weakref.ref(backbones.of(one := roofline.Backbone(32, 1, 48, 4, 64)))
    assert backbones.of(one) is held()
    backbones.of(roofline.Backbone(32, 2, 48, 4, 64))
    assert held() is None, "one backbone is held at a time"


# ------------------------------------------------------------- budget and report


class Clock:
    """Seconds that pass only when somebody works."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def work(self, seconds: float) -> Iterator[gpu_report.Row]:
        self.now_s += seconds
        yield "worked", {"seconds": seconds}


def ran(tmp_path: Path, total_s: float, *parts: tuple[str, float, float]) -> dict[str, str]:
    """Return what became of parts, each of a name, an estimate, and the seconds that it really takes."""
    clock = Clock()
    made = [gpu_report.Part(name, estimate, lambda deadline, s=s: clock.work(s)) for name, estimate, s in parts]
    report = gpu_report.Report(tmp_path / "report.json", {}, clock=clock)
    report.run(made, total_s)
    return {name: entry["status"] for name, entry in report.values["parts"].items()}


def test_parts_run_one_after_another_and_what_does_not_fit_is_named(tmp_path: Path) -> None:
    found = ran(tmp_path, 100, ("a", 40, 50), ("b", 60, 60), ("c", 30, 10), ("d", 41, 1), ("e", 40, 40), ("f", 1, 1))
    assert found == {
        "a": "done",
        "b": "skipped: needs 60 s, and 50 s are left",
        "c": "done",
        "d": "skipped: needs 41 s, and 40 s are left",
        "e": "done",
        "f": "skipped: needs 1 s, and 0 s are left",
    }


def test_all_planned_parts_run_in_their_time_and_the_first_of_them_on_a_machine_half_as_fast(tmp_path: Path) -> None:
    planned, total_s = gpu_parts.plan(), 60 * gpu.MINUTES - roofline.START_S
    found = ran(tmp_path, total_s, *((part.name, part.estimated_s, part.estimated_s) for part in planned))
    assert set(found.values()) == {"done"}
    slow = [
        *ran(tmp_path, total_s, *((part.name, part.estimated_s, 2 * part.estimated_s) for part in planned)).values()
    ]
    assert set(slow[: len(planned) // 2]) == {"done"}
    assert slow[-1].startswith("skipped: needs")


def test_time_that_a_part_leaves_over_goes_to_later_ones(tmp_path: Path) -> None:
    clock, seen = Clock(), []

    def watching(deadline: gpu_report.Deadline) -> Iterator[gpu_report.Row]:
        seen.append(deadline.left_s())
        yield from clock.work(10)

    made = [gpu_report.Part(name, 100, watching) for name in ("a", "b", "c")]
    gpu_report.Report(tmp_path / "report.json", {}, clock=clock).run(made, 300)
    assert seen == [200, 200, 280]


def test_the_exit_code_reports_a_check_that_failed_and_a_name_of_no_part_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match=r"--parts: part 'nothing' must be the start of a part's name \(device, lora"):
        gpu.main(["--rehearse", "--parts", "nothing"])
    assert gpu.main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(gpu_parts.plan()) + 1
    command = ["--rehearse", "--parts", "adamw", "--output", str(tmp_path / "report.json")]
    assert gpu.main(command) == 0
    monkeypatch.setattr(multi_adamw, "foreach_update", lambda pages, verdicts: verdicts.tolist())
    assert gpu.main(command) == 1
    assert "fail" in json.loads((tmp_path / "report.json").read_text())["checks"].values()


def test_a_part_that_fails_costs_no_other_and_keeps_its_rows(tmp_path: Path) -> None:
    def failing(deadline: gpu_report.Deadline) -> Iterator[gpu_report.Row]:
        yield "first", 1.0
        raise RuntimeError("no such kernel")

    def working(deadline: gpu_report.Deadline) -> Iterator[gpu_report.Row]:
        assert json.loads(path.read_text())["parts"]["a"]["rows"] == {"first": 1.0}
        assert json.loads(path.read_text())["parts"]["b"]["status"] == "running"
        yield "second", {"is_right": False}
        yield "third", {"is_right": True}
        yield "fourth", {"skipped": "too large"}

    path = tmp_path / "new" / "report.json"
    freed: list[int] = []
    report = gpu_report.Report(path, {"head": 1}, after_failure=lambda: freed.append(1))
    report.run([gpu_report.Part("a", 5, failing), gpu_report.Part("b", 5, working)], 60)
    written = json.loads(path.read_text())
    assert written["head"] == 1
    assert freed == [1]
    assert written["parts"]["a"]["status"] == "failed: RuntimeError: no such kernel"
    assert written["parts"]["b"]["status"] == "done"
    assert written["checks"] == {"b: second": "fail", "b: third": "pass"}
    assert written["skipped"] == ["b: fourth: too large"]
    assert [fault.split(" ")[0] for fault in written["faults"]] == ["a:", "b:"]
    assert [file.name for file in path.parent.iterdir()] == ["report.json"]


def test_where_the_device_is_lost_the_rest_is_not_tried_and_checks_among_it_are_faults(tmp_path: Path) -> None:
    def failing(deadline: gpu_report.Deadline) -> Iterator[gpu_report.Row]:
        raise RuntimeError("an illegal memory access")
        yield "x", 1

    def never(deadline: gpu_report.Deadline) -> Iterator[gpu_report.Row]:
        raise AssertionError("ran on a lost device")
        yield "x", 1

    parts = [gpu_report.Part("a", 5, failing), gpu_report.Part("b", 5, never, True), gpu_report.Part("c", 5, never)]
    report = gpu_report.Report(tmp_path / "report.json", {}, after_failure=lambda: "the device is lost")
    report.run(parts, 60)
    assert report.skipped() == ["b: the device is lost", "c: the device is lost"]
    assert report.faults() == ["a: failed: RuntimeError: an illegal memory access", "b: skipped: the device is lost"]
