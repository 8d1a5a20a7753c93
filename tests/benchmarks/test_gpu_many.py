"""The benchmark of several GPUs without one: two processes with gloo, and the judge of layouts in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.gpu import many
from benchmarks.gpu.report import Deadline

LAYOUTS = ("data", "shard", "tensor", "pipeline")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    path = tmp_path_factory.mktemp("many") / "report.json"
    assert many.main(["--rehearse", "--output", str(path)]) == 0, path.read_text()
    return json.loads(path.read_text())


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_every_layout_trains_what_one_process_does_and_reports_its_speed_and_exposed_communication(
    report: dict[str, Any],
) -> None:
    assert list(report["parts"]) == ["one process", *LAYOUTS]
    for layout in LAYOUTS:
        speed, compared = report["parts"][layout]["rows"].values()
        assert speed["processes"] == 2
        assert speed["tokens_per_s"] > 0
        assert len(speed["exposed_communication_share_by_rank"]) == 2
        assert 0 < speed["exposed_communication_share"] < 1
        assert (compared["adapters"], compared["is_right"]) == (3, True)
        assert compared["losses"] <= 1e-5
        assert compared["weights"] <= 1e-4
    assert report["layouts"]["tensor"] == {"tensor_parallel_size": 2}


def process_of(loss: float = 1.0, timed: float = 1.0, status: str = "succeeded") -> dict[str, Any]:
    return {
        "check": {"losses": [[loss, 2.0]], "statuses": [status]},
        "timed": {"losses": [[timed, 2.0]], "statuses": ["succeeded"]},
    }


def compared(folder: Path, *ranks: dict[str, Any], weight: float = 1.0) -> bool:
    """Return the verdict about a layout with these processes, whose adapter has this first weight."""
    for name, value in (("one-process/check", 1.0), ("one-process/again", 1.0), ("data/check", weight)):
        own = folder / name / "task-0"
        own.mkdir(parents=True, exist_ok=True)
        save_file({"lora_A": torch.tensor([value, 1.0])}, own / "adapter_model.safetensors")
    (folder / "one-process" / "rank-0.json").write_text(json.dumps(process_of()))
    return many._comparison("data", list(ranks), folder)["is_right"]


@pytest.mark.parametrize(
    "wrong", [{"loss": 1.0001}, {"loss": float("nan")}, {"timed": 1.1}, {"status": "failed"}], ids=str
)
def test_a_process_that_differs_from_one_process_is_found(wrong: dict[str, Any], tmp_path: Path) -> None:
    assert compared(tmp_path, process_of(), process_of()) is True
    assert compared(tmp_path, process_of(), process_of(**wrong)) is False


def test_an_adapter_may_differ_as_much_as_those_of_one_process_with_passes_of_another_size(tmp_path: Path) -> None:
    assert compared(tmp_path, process_of(), weight=1.001) is False
    again = tmp_path / "one-process" / "again" / "task-0" / "adapter_model.safetensors"
    save_file({"lora_A": torch.tensor([1.001, 1.0])}, again)
    assert many._comparison("data", [process_of()], tmp_path)["is_right"] is True


def test_a_layout_that_fails_or_takes_too_long_is_reported_with_the_end_of_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(many, "ROOT", tmp_path)
    (tmp_path / "benchmarks" / "gpu").mkdir(parents=True)
    (tmp_path / "benchmarks" / "__init__.py").touch()
    (tmp_path / "benchmarks" / "gpu" / "__init__.py").touch()
    module = tmp_path / "benchmarks" / "gpu" / "many.py"
    monkeypatch.chdir(tmp_path)
    module.write_text("raise SystemExit('no such link')")
    with pytest.raises(RuntimeError, match=r"exit code 1; the log ends with:\nno such link"):
        list(many.layout_part("one process", 2, tmp_path / "a", Deadline(60), is_rehearsal=True))
    module.write_text("import time; print('waits', flush=True); time.sleep(60)")
    with pytest.raises(RuntimeError, match=r"the time is up; the log ends with:\nwaits"):
        list(many.layout_part("one process", 2, tmp_path / "b", Deadline(3), is_rehearsal=True))


def test_all_layouts_fit_into_five_minutes_by_their_computed_times(capsys: pytest.CaptureFixture[str]) -> None:
    assert sum(many.ESTIMATED_S.values()) <= 60 * many.MINUTES <= 300
    assert many.main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 6


@pytest.mark.skipif(torch.cuda.is_available(), reason="there may be GPUs")
def test_without_gpus_only_a_rehearsal_runs() -> None:
    with pytest.raises(
        SystemExit, match="--processes must be 2 to 0, the GPUs of this machine, except with --rehearse"
    ):
        many.main([])


@pytest.mark.parametrize(("shape", "stages"), [(many.CHECKED, 4), (many.TIMED, 4), (many.TINY, 2)])
def test_shapes_can_be_cut_into_stages_and_tensor_parallel_ranks(shape: Any, stages: int) -> None:
    assert shape.num_layers >= stages
    assert shape.num_heads // 4 % stages == 0
