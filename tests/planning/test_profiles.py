"""Which profile a run plans with, and what a plan says where that profile is of something else."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from peft_mux import ConfigError
from peft_mux.modeling.backbone.liger import has_liger
from peft_mux.parallel.cuda_graphs import AUTO_TOKENS
from peft_mux.planning.profiling.backbone import software_versions
from peft_mux.planning.targets import run_profile
from peft_mux.scheduler.costs.hardware import DEVICES
from peft_mux.scheduler.costs.latency import EAGER_PART, CostModel, whole_pass
from peft_mux.scheduler.costs.loads import ModelShape, TaskLoad
from peft_mux.scheduler.costs.profile import FUSED, Profile, analytic_profile
from peft_mux.scheduler.plan import Link
from peft_mux.trainer import trainer as trainer_module
from tests.invariants.mux_lab import make_trainer, small_task
from tests.planning.cases import llama

SHAPE = ModelShape(2, 64, 128, 64, 64, 97, 100_000, 2)


def profile_on_gpu(
    name: str, memory_gb: int, monkeypatch: pytest.MonkeyPatch, **arguments: Any
) -> tuple[Profile, tuple[str, ...]]:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    properties = SimpleNamespace(total_memory=memory_gb * 10**9)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    usual = {"use_liger_kernel": False, "pipeline_parallel_size": 1, "shard_backbone": False, "world_size": 1}
    usual |= {"cuda_graphs": "auto", "full_determinism": False, "cost_profile": None}
    args: Any = SimpleNamespace(device=torch.device("cuda"), **{**usual, **arguments})
    return run_profile(args, SHAPE)


@pytest.mark.parametrize(
    ("name", "memory_gb", "planned_as"),
    [
        ("NVIDIA A100-SXM4-40GB", 42, "A100-40GB"),
        ("NVIDIA A100 80GB PCIe", 85, "A100-80GB"),
        ("NVIDIA H100 80GB HBM3", 85, "H100-80GB"),
        ("NVIDIA GeForce RTX 4090", 25, "RTX4090"),
        ("NVIDIA B200", 192, "B200"),
        ("NVIDIA L40S", 47, "L40S"),
        ("NVIDIA A10G", 23, "A10G"),
        ("AMD Instinct MI300X", 206, "MI300X"),
    ],
)
def test_a_known_gpu_is_planned_by_its_own_data_sheet(
    name: str, memory_gb: int, planned_as: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile, (note,) = profile_on_gpu(name, memory_gb, monkeypatch)
    assert profile.device == planned_as
    assert "computed from the data sheet and what one H100 showed" in note


def test_an_unknown_gpu_is_named_in_the_plan_with_what_it_was_planned_as(monkeypatch: pytest.MonkeyPatch) -> None:
    profile, (note, _) = profile_on_gpu("NVIDIA L4", 24, monkeypatch)
    assert profile.device == "A100-80GB"
    assert "no data sheet of 'NVIDIA L4' is known; plans use the times of A100-80GB" in note
    assert "peft-mux profile" in note


def test_times_of_a_gpu_are_those_of_the_layers_that_will_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def layer_s(**arguments: Any) -> float:
        profile, notes = profile_on_gpu("NVIDIA H100 80GB HBM3", 85, monkeypatch, **arguments)
        fused = profile.layer == analytic_profile(DEVICES["H100-80GB"], SHAPE, execution=FUSED).layer
        assert ("for Liger's kernels" if fused else "for transformers' own layers") in notes[-1]
        return profile.layer(16384)

    eager_s, fused_s = layer_s(), layer_s(use_liger_kernel=True)
    assert fused_s < eager_s
    assert layer_s(use_liger_kernel="auto") == (fused_s if has_liger() else eager_s)
    for divided in ({"pipeline_parallel_size": 2}, {"shard_backbone": True}):
        assert layer_s(use_liger_kernel="auto", **divided) == eager_s


@pytest.mark.parametrize(
    ("arguments", "graph_tokens"),
    [
        ({}, AUTO_TOKENS),
        ({"full_determinism": True}, 0),
        ({"world_size": 2}, 0),
        ({"cuda_graphs": False}, 0),
        ({"cuda_graphs": True, "world_size": 2}, 2**31),
        ({"cuda_graphs": True, "shard_backbone": True}, 0),
    ],
)
def test_passes_are_priced_as_graphs_where_they_will_be_replayed(
    arguments: dict[str, Any], graph_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    profile, _ = profile_on_gpu("NVIDIA H100 80GB HBM3", 85, monkeypatch, **arguments)
    assert profile.graph_tokens == graph_tokens


def test_a_measured_profile_prices_replayed_passes_without_the_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data_sheet = analytic_profile(DEVICES["H100-80GB"], SHAPE, execution=FUSED)
    path = tmp_path / "profile.json"

    def pass_s(num_tokens: int, *, layer_host_s: float = 0.05, **arguments: Any) -> tuple[float, int]:
        path.write_text(replace(data_sheet, source="measured", layer_host_s=layer_host_s).to_json())
        profile, _ = profile_on_gpu("NVIDIA H100 80GB HBM3", 85, monkeypatch, cost_profile=str(path), **arguments)
        loads = [TaskLoad("a", (num_tokens,), num_tokens - 1, (), 0)]
        return float(CostModel(profile, SHAPE).passes_s(loads, [whole_pass(loads)]).sum()), profile.graph_tokens

    num_layers = SHAPE.num_layers
    eager_s, _ = pass_s(1000, cuda_graphs=False)
    replayed_s, graph_tokens = pass_s(1000)
    assert graph_tokens == AUTO_TOKENS
    assert eager_s - replayed_s == pytest.approx((1 - EAGER_PART) * num_layers * 0.05, rel=0.05)
    assert pass_s(2 * AUTO_TOKENS)[0] > num_layers * 0.05 > replayed_s, "only short passes are replayed"
    assert pass_s(1000, layer_host_s=0.0)[1] == 0, "times of an older profile include the host's"


@cache
def own_profile() -> Profile:
    """Return the profile of the backbone of `make_trainer` on this machine."""
    with TemporaryDirectory() as folder:
        trainer = make_trainer([small_task("own", data_seed=1)], Path(folder))
        trainer.plan()
    profile = trainer._plans.planner.profile
    assert profile is not None
    return profile


def stored(folder: Path, **changes: Any) -> Path:
    """Write the profile of the backbone of `make_trainer`, with some fields changed."""
    path = folder / "profile.json"
    path.write_text(replace(own_profile(), **changes).to_json(), encoding="utf-8")
    return path


def notes_with(path: Path, folder: Path, **arguments: Any) -> str:
    trainer = make_trainer([small_task("own", data_seed=1)], folder / "second", cost_profile=str(path), **arguments)
    return " | ".join(trainer.plan().notes)


def test_the_link_between_processes_is_measured_with_the_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer([small_task("own", data_seed=1)], tmp_path / "run")
    assert trainer.measure_profile(budget_s=0.2, folder=tmp_path / "kept").link is None
    monkeypatch.setattr(trainer_module, "measure_link", lambda device: Link(1e-5, 1e9))
    profile = trainer.measure_profile(budget_s=0.2, folder=tmp_path / "kept")
    assert profile.link == Link(1e-5, 1e9)
    path = tmp_path / "profile.json"
    path.write_text(profile.to_json(), encoding="utf-8")
    assert "cost_profile" not in notes_with(path, tmp_path), "a measured profile of this backbone"
    assert [path.stem for path in (tmp_path / "kept").iterdir()] == [profile.key]


def test_a_profile_of_another_device_backbone_dtype_or_of_other_software_is_named_in_the_plan(tmp_path: Path) -> None:
    assert "cost_profile" not in notes_with(stored(tmp_path), tmp_path)
    path = stored(tmp_path, device="NVIDIA H200")
    trainer = make_trainer([small_task("own", data_seed=1)], tmp_path / "second", cost_profile=str(path))
    said = " | ".join(trainer.plan().notes)
    assert "cost_profile is of another device (NVIDIA H200; this one is" in said
    assert "another backbone" not in said
    assert not any("cost_profile" in note for note in trainer.plan(devices="2xA40").notes), "a plan of other devices"
    said = notes_with(stored(tmp_path), tmp_path, model=llama(3))
    assert "cost_profile is of another backbone (L2-" in said
    assert "this one is L3-" in said
    assert "another device" not in said
    measured: dict[str, Any] = {"source": "measured", "dtype": "float32"}
    own = tuple(software_versions("cpu").items())
    assert "cost_profile" not in notes_with(stored(tmp_path, **measured, versions=own), tmp_path)
    half = notes_with(stored(tmp_path, **{**measured, "dtype": "bfloat16"}, versions=own), tmp_path)
    assert "cost_profile was measured in bfloat16; this run computes in 32 bits" in half
    older = notes_with(stored(tmp_path, **measured, versions=(("torch", "1.13"), ("profile", "1"))), tmp_path)
    assert "cost_profile was measured with torch 1.13, profile 1; here are torch " in older
    assert "measured in" not in older


def test_a_file_that_is_no_profile_or_has_a_number_out_of_range_is_refused_by_name_with_what_to_do(
    tmp_path: Path,
) -> None:
    path = stored(tmp_path)
    out_of_range = path.read_text(encoding="utf-8").replace('"forward_fraction": 0.5', '"forward_fraction": 7')
    for text in ("no JSON", "[]", '{"format_version": 1, "layer": [1, 2]}', '{"format_version": 99}', out_of_range):
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ConfigError, match=r"args\.cost_profile must be.*, got '.*profile\.json'.*") as refused:
            notes_with(path, tmp_path)
        expected = r"forward_fraction must be .*got 7" if text == out_of_range else r"Measure again"
        refused.match(expected)
