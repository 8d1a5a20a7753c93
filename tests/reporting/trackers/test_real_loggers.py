"""W&B, MLflow and Trackio themselves, if installed, without a network: two tasks, and one that continues."""

from __future__ import annotations

import json
import sqlite3
import struct
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from tests.invariants import mux_lab as lab


class FailsAtStep3(TrainerCallback):
    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 3:
            raise ValueError("no more")


SAVING = {"save_strategy": "steps", "save_steps": 2}


def train_in_two_goes(name: str, folder: Path, **arguments: Any) -> None:
    """Train `a` for 4 steps, and `b` for 8, cut off behind the sixth and resumed; `c` is removed, and `d` fails."""

    def tasks() -> list[Any]:
        names = {"a": 4, "b": 8, "c": 8, "d": 8}
        return [
            lab.small_task(
                task,
                data_seed=seed,
                max_steps=steps,
                learning_rate=1e-3 * (seed + 1),
                callbacks=[FailsAtStep3()] if task == "d" else [],
            )
            for seed, (task, steps) in enumerate(names.items())
        ]

    def stop(trainer: Any) -> None:
        trainer.control.should_training_stop = True

    options = {"report_to": name, "report_per_task": True, "logging_strategy": "steps", "logging_steps": 2, **SAVING}
    options |= {"run_name": "both", **arguments}
    acts: dict[int, Any] = {2: lambda trainer: trainer.remove_task("c"), 6: stop}
    lab.train(tasks(), folder, recorder=lab.Recorder(at_end=acts), **options)
    lab.train(tasks()[:2], folder, resume=True, **options)


def test_wandb_keeps_a_run_for_each_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for key, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(key, value)
    train_in_two_goes("wandb", tmp_path / "run")
    found: dict[str, list[Any]] = {"both/a": [], "both/b": [], "both/c": [], "both/d": []}
    for path in sorted((tmp_path / "wandb").glob("offline-run-*/run-*.wandb")):
        records = list(_wandb_records(path))
        run = next(record.run for record in records if record.HasField("run"))
        assert (run.run_group, run.project) == ("both", "huggingface")
        found[run.display_name].append((run.run_id, records))
    assert [len(parts) for parts in found.values()] == [1, 2, 1, 1]
    (first, _), (second, _) = found["both/b"]
    assert first == second, "the run that was cut off goes on"
    steps = {name: [_wandb_steps(records) for _, records in parts] for name, parts in found.items()}
    assert steps == {"both/a": [[2, 4]], "both/b": [[2, 4, 6], [8]], "both/c": [[2]], "both/d": [[2, 3]]}
    rates = {name: _wandb_settings(parts[0][1])["learning_rate"] for name, parts in found.items()}
    assert rates == pytest.approx({"both/a": 1e-3, "both/b": 2e-3, "both/c": 3e-3, "both/d": 4e-3})
    codes = {
        name: [record.exit.exit_code for _, records in parts for record in records if record.HasField("exit")]
        for name, parts in found.items()
    }
    assert codes == {"both/a": [0], "both/b": [0, 0], "both/c": [0], "both/d": [1]}


def _wandb_records(path: Path) -> Iterator[Any]:
    """Yield what W&B keeps of a run without a network: a log of LevelDB's form, behind a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2  # type: ignore[import-not-found]

    content, place, parts = path.read_bytes(), 7, b""
    while place + 7 <= len(content):
        if (left := 2**15 - place % 2**15) < 7:  # a header of a part does not begin in one block and end in the next
            place += left
            continue
        length, kind = struct.unpack_from("<HB", content, place + 4)
        parts += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            parts = b""
            yield record


def _wandb_steps(records: list[Any]) -> list[int]:
    rows = [record.history for record in records if record.HasField("history")]
    items = [{item.key or "/".join(item.nested_key): item.value_json for item in row.item} for row in rows]
    return [int(own["train/global_step"]) for own in items if "train/loss" in own]


def _wandb_settings(records: list[Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    for record in records:
        changes = record.config if record.HasField("config") else record.run.config
        settings |= {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in changes.update}
    return settings


def test_mlflow_keeps_a_run_for_each_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "ours")
    monkeypatch.setenv("MLFLOW_TAGS", '{"color": "blue"}')
    train_in_two_goes("mlflow", tmp_path / "run")
    client = mlflow.MlflowClient()
    experiment = client.get_experiment_by_name("ours")
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert sorted(runs) == ["both/a", "both/b", "both/c", "both/d"]
    assert {name: run.info.status for name, run in runs.items()} == {
        "both/a": "FINISHED",
        "both/b": "FINISHED",
        "both/c": "KILLED",
        "both/d": "FAILED",
    }
    steps = {
        name: sorted(one.step for one in client.get_metric_history(run.info.run_id, "train/loss"))
        for name, run in runs.items()
    }
    assert steps == {"both/a": [2, 4], "both/b": [2, 4, 6, 8], "both/c": [2], "both/d": [2, 3]}
    assert [float(run.data.params["learning_rate"]) for _, run in sorted(runs.items())] == [1e-3, 2e-3, 3e-3, 4e-3]
    tags = runs["both/c"].data.tags
    assert (tags["group"], tags["color"], tags["task_status"]) == ("both", "blue", "removed")


def test_trackio_keeps_a_run_for_each_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # It reads its folder when it is imported.
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for module in [name for name in sys.modules if name.partition(".")[0] == "trackio"]:
        monkeypatch.delitem(sys.modules, module)
    pytest.importorskip("trackio")
    train_in_two_goes("trackio", tmp_path / "run", project="ours")
    with closing(sqlite3.connect(tmp_path / "trackio" / "ours.db")) as base:
        rows = base.execute("SELECT run_name, run_id, step, metrics FROM metrics ORDER BY id").fetchall()
        configs = {name: json.loads(text) for name, text in base.execute("SELECT run_name, config FROM configs")}
    steps: dict[tuple[str, str], list[int]] = {}
    for name, run_id, step, numbers in rows:
        if "train/loss" in (numbers := json.loads(numbers)):
            assert numbers["train/global_step"] == step
            steps.setdefault((name, run_id), []).append(step)
    assert sorted((name, own) for (name, _), own in steps.items()) == [
        ("both/a", [2, 4]),
        ("both/b", [2, 4, 6, 8]),
        ("both/c", [2]),
        ("both/d", [2, 3]),
    ]
    assert {config["_Group"] for config in configs.values()} == {"both"}
    assert [config["learning_rate"] for _, config in sorted(configs.items())] == [1e-3, 2e-3, 3e-3, 4e-3]
