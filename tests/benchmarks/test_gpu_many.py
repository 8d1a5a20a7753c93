"""The benchmark of several GPUs without one: two processes with gloo, and the judge of layouts in this process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from benchmarks.gpu import many


@pytest.mark.nightly
@pytest.mark.distributed
@pytest.mark.timeout(600)
def test_every_layout_trains_what_one_process_does_and_reports_its_speed_and_exposed_communication(
    tmp_path: Path,
) -> None:
    path = tmp_path / "report.json"
    assert many.main(["--rehearse", "--output", str(path)]) == 0, path.read_text()
    parts = json.loads(path.read_text())["parts"]
    assert list(parts) == ["one process", "data", "shard", "tensor", "pipeline"]
    for layout in list(parts)[1:]:
        speed, compared = parts[layout]["rows"].values()
        assert speed["processes"] == 2
        assert speed["tokens_per_s"] > 0
        assert 0 < speed["exposed_communication_share"] < 1
        assert (compared["adapters"], compared["is_right"]) == (3, True)


def process_of(loss: float = 1.0, timed: float = 1.0, status: str = "succeeded") -> dict[str, Any]:
    return {
        "check": {"losses": [[loss, 2.0]], "statuses": [status]},
        "timed": {"losses": [[timed, 2.0]], "statuses": ["succeeded"]},
    }


@pytest.mark.parametrize(
    "wrong",
    [{"loss": 1.0001}, {"loss": float("nan")}, {"timed": 1.1}, {"status": "failed"}, {"weight": 1.001}],
    ids=str,
)
def test_a_process_that_differs_from_one_process_is_found(wrong: dict[str, Any], tmp_path: Path) -> None:
    def is_right(rank: dict[str, Any], weight: float = 1.0) -> bool:
        for name, value in (("one-process/check", 1.0), ("one-process/again", 1.0), ("data/check", weight)):
            own = tmp_path / name / "task-0"
            own.mkdir(parents=True, exist_ok=True)
            save_file({"lora_A": torch.tensor([value, 1.0])}, own / "adapter_model.safetensors")
        (tmp_path / "one-process" / "rank-0.json").write_text(json.dumps(process_of()))
        return many._comparison("data", [process_of(), rank], tmp_path)["is_right"]

    weight = wrong.pop("weight", 1.0)
    assert is_right(process_of()) is True
    assert is_right(process_of(**wrong), weight) is False


@pytest.mark.skipif(torch.cuda.is_available(), reason="there may be GPUs")
def test_all_layouts_fit_into_five_minutes_by_their_computed_times_and_without_gpus_only_a_rehearsal_runs() -> None:
    assert sum(many.ESTIMATED_S.values()) <= 60 * many.MINUTES <= 300
    with pytest.raises(SystemExit, match="--processes must be 2 to 0, the GPUs of this machine, except with --rehea"):
        many.main([])
