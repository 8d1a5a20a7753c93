"""W&B, MLflow and Trackio themselves, if installed, without a network: two tasks, and one that continues."""

from __future__ import annotations

import json
import sqlite3
import sys
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.invariants import mux_lab as lab
from tests.runs import SAVING, Acts, raising, stop


def train_in_two_goes(name: str, folder: Path, **arguments: Any) -> None:
    """Train `a` for 4 steps, and `b` for 8, cut off behind the sixth and resumed; `c` is removed, and `d` fails."""

    def tasks() -> list[Any]:
        fails = Acts(raising(ValueError("no more")), step=3)
        settings = {"a": {"max_steps": 4}, "b": {}, "c": {}, "d": {"callbacks": [fails]}}
        return [
            lab.small_task(task, data_seed=seed, learning_rate=1e-3 * (seed + 1), **own)
            for seed, (task, own) in enumerate(settings.items())
        ]

    options = {"report_to": name, "report_per_task": True, "logging_strategy": "steps", "logging_steps": 2, **SAVING}
    options |= {"save_steps": 2, "run_name": "both", **arguments}
    acts: dict[int, Any] = {2: lambda trainer: trainer.remove_task("c"), 6: stop}
    lab.train(tasks(), folder, recorder=lab.Recorder(at_end=acts), **options)
    lab.train(tasks()[:2], folder, resume=True, **options)


def test_wandb_keeps_a_run_for_each_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for key, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path), "WANDB_SILENT": "true"}.items():
        monkeypatch.setenv(key, value)
    train_in_two_goes("wandb", tmp_path / "run")
    # The folder of a run without a network ends with the id of the run.
    ids = Counter(path.name.rpartition("-")[2] for path in (tmp_path / "wandb").glob("offline-run-*"))
    assert sorted(ids.values()) == [1, 1, 1, 2], "the run that was cut off continues"


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
    statuses = {"both/a": "FINISHED", "both/b": "FINISHED", "both/c": "KILLED", "both/d": "FAILED"}
    assert {name: run.info.status for name, run in runs.items()} == statuses
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
