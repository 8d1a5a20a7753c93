"""Records and states that were sealed by others: named and passed over like torn ones, whatever they hold."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peft_mux import storage
from peft_mux.checkpoint.records import read_record, read_task_state
from peft_mux.errors import CheckpointError
from tests.checkpoint.crashes import SAVING
from tests.checkpoint.crashes import crashed_tasks as tasks
from tests.invariants import mux_lab as lab
from tests.invariants.mux_lab import Run
from tests.records import run_records


def resume(root: Path, capsys: pytest.CaptureFixture[str], **options: Any) -> tuple[Run, str]:
    run = lab.train(tasks(), root, resume=True, disable_tqdm=False, **{**SAVING, **options})
    return run, capsys.readouterr().out


NEWEST = "run-00000004.json"


def entry(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda record: {**record, "tasks": {**record["tasks"], "a": {**record["tasks"]["a"], **changes}}}


def deep(levels: int) -> Any:
    value: Any = []
    for _ in range(levels):
        value = [value]
    return value


RECORDS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a list": lambda record: [record],
    "no tasks": lambda record: {key: value for key, value in record.items() if key != "tasks"},
    "version true": lambda record: {**record, "format_version": True},
    "step of another file": lambda record: {**record, "run_step": 3},
    "step a fraction": lambda record: {**record, "run_step": 4.0},
    "step huge": lambda record: {**record, "run_step": 10**400},
    "a task that leads outside": lambda record: {**record, "tasks": {**record["tasks"], "../x": record["tasks"]["a"]}},
    "removed that leads outside": lambda record: {**record, "removed": {"/etc": record["tasks"]["a"]}},
    "removed a task of the run": lambda record: {**record, "removed": {"a": record["tasks"]["a"]}},
    "order of lists": lambda record: {**record, "order": [["a"], ["b"]]},
    "status unknown": entry(status="done"),
    "reason not printable": entry(reason="\ud800"),
    "generation a word": entry(generation="1"),
    "numerics a list": lambda record: {**record, "numerics": [1]},
    "numerics nested": lambda record: {**record, "numerics": {"bf16": {"x": 1}}},
}


@pytest.mark.parametrize("craft", RECORDS)
def test_a_crafted_record_is_named(craft: str, root: Path) -> None:
    path = root / "state" / NEWEST
    path.write_bytes(storage.sealed_json(RECORDS[craft](storage.unsealed_json(path))))
    with pytest.raises(CheckpointError, match=NEWEST):
        read_record(path)


def craft_list(path: Path) -> None:
    path.write_bytes(storage.sealed_json([storage.unsealed_json(path)]))


def put_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(("spoil", "fault"), [(craft_list, "is not the record of a run"), (put_pipe, "cannot be read")])
def test_a_crafted_record_or_a_pipe_is_passed_over_for_the_record_before_it(
    spoil: Callable[[Path], None], fault: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(root / "state" / NEWEST)
    run, said = resume(root, capsys)
    assert {name: len(losses) for name, losses in run.losses.items()} == {"a": 5, "b": 5}
    assert f"{NEWEST} {fault}" in said
    assert "Trying the record before it" in said


@pytest.mark.parametrize("plant", ["nested", "pipe", "folder", "numbers"])
def test_a_record_that_is_hard_to_read_is_named_without_hanging(plant: str, tmp_path: Path) -> None:
    path = tmp_path / NEWEST
    body = {"nested": "[" * 200_000 + "]" * 200_000, "numbers": "9" * 10_000}
    if plant in body:
        path.write_text(json.dumps({"sha256": "", "body": body[plant]}))
    else:
        os.mkfifo(path) if plant == "pipe" else path.mkdir()
    with pytest.raises(CheckpointError, match=rf"{NEWEST} cannot be read"):
        read_record(path)


def test_a_record_under_a_name_that_is_not_ours_is_passed_over(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("run-x.json", "run-99.json"):
        shutil.copy(root / "state" / NEWEST, root / "state" / name)
    run, said = resume(root, capsys)
    assert len(run.losses["a"]) == 3
    assert "run-x.json" in said
    assert "run-99.json" in said


# ------------------------------------------------------------------ state.json

STATES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a list": lambda state: [state],
    "settings a list": lambda state: {**state, "settings": []},
    "tokens huge": lambda state: {**state, "num_tokens": 10**400},
    "loss a word": lambda state: {**state, "last_loss": "much"},
    "mean of three": lambda state: {**state, "loss_mean": [1, 2, 3]},
    "best empty": lambda state: {**state, "best": {}},
    "status unknown": lambda state: {**state, "status": "done"},
    "history of numbers": lambda state: {**state, "trainer_state": {**state["trainer_state"], "log_history": [5]}},
    "history of words": lambda state: {
        **state,
        "trainer_state": {**state["trainer_state"], "log_history": [{"eval_loss": "much"}]},
    },
    "optimizer a number": lambda state: {**state, "optimizer": 5},
    "optimizer empty": lambda state: {**state, "optimizer": {"__map__": []}},
    "optimizer of other tensors": lambda state: {
        **state,
        "optimizer": {"__map__": [["moments", {"__tensor__": "x"}], ["settings", []], ["schedule", []]]},
    },
    "optimizer too deep": lambda state: {**state, "optimizer": deep(900)},
    "moments of words": lambda state: {
        **state,
        "optimizer": {"__map__": [["moments", "x"], ["settings", "y"], ["schedule", "z"]]},
    },
}


FITTING = (
    *("best empty", "optimizer a number", "optimizer empty", "optimizer of other tensors", "optimizer too deep"),
    "moments of words",
)
"""Those that are well-formed, but do not fit the task."""


def reseal(folder: Path, content: bytes) -> None:
    """Write another state into a checkpoint, under a manifest that fits it."""
    (folder / "state.json").write_bytes(content)
    facts = storage.unsealed_json(folder / "manifest.json")["facts"]
    (folder / "manifest.json").unlink()
    files = {path.name: list(storage.digest_file(path)) for path in sorted(folder.iterdir())}
    (folder / "manifest.json").write_bytes(storage.sealed_json({"facts": facts, "files": files}))
    storage.verify_folder(folder)


@pytest.mark.parametrize("craft", [craft for craft in STATES if craft not in FITTING])
def test_a_crafted_state_is_named(craft: str, crashed: Path, tmp_path: Path) -> None:
    state = json.loads((crashed / "a" / "checkpoint-4" / "state.json").read_text())
    (tmp_path / "state.json").write_text(json.dumps(STATES[craft](state)))
    with pytest.raises(
        CheckpointError,
        match=r"state\.json is not the state of a task",
    ):
        read_task_state(tmp_path / "state.json")


@pytest.mark.parametrize("crafts", list(zip(FITTING[::2], FITTING[1::2], strict=True)), ids=str)
def test_crafted_states_are_passed_over_for_the_checkpoints_before_them(
    crafts: tuple[str, str], root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, craft in zip("ab", crafts, strict=True):
        folder = root / name / "checkpoint-4"
        reseal(folder, json.dumps(STATES[craft](json.loads((folder / "state.json").read_text()))).encode())
    run, said = resume(root, capsys)
    assert {name: len(losses) for name, losses in run.losses.items()} == {"a": 5, "b": 5}
    for name in "ab":
        assert f'task "{name}": ' in said
        assert str(root / name / "checkpoint-4") in said
    assert said.count("Trying the checkpoint before it") == 2


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"[" * 200_000, b'{"step": NaN}'], ids=["empty", "bytes", "deep", "nan"]
)
def test_a_state_that_is_no_json_of_ours_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "state.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"state\.json"):
        read_task_state(tmp_path / "state.json")


# ------------------------------------------------------------------ what decides the bits


def test_resuming_with_what_decides_the_bits_changed_is_reported_and_recorded_once(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = root / "state" / NEWEST
    record = storage.unsealed_json(path)
    record["numerics"]["torch version"] = "1.0"
    path.write_bytes(storage.sealed_json(record))
    _, said = resume(root, capsys, max_tokens_per_micro_batch=64)
    assert said.count("resumed with another ") == 2
    assert "resumed with another max_tokens_per_micro_batch: " in said
    assert "resumed with another torch version: '1.0' before" in said
    events = {event["name"]: (event["now"], event["run_step"]) for event in run_records(root, "numerics_changed")}
    assert events["max_tokens_per_micro_batch"] == (64, 4)
    _, said = resume(root, capsys, max_tokens_per_micro_batch=64)
    assert "resumed with another" not in said


@pytest.mark.parametrize("strategy", ["steps", "no"])
def test_a_pipe_in_the_place_of_the_metrics_is_refused_at_once(strategy: str, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "metrics.jsonl")
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl must be .*, got a pipe"):
        lab.train(tasks(), tmp_path, save_strategy=strategy)
