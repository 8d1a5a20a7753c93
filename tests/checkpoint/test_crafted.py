"""Records and states that were sealed by others are named; `tests/attacks/test_corruption.py` resumes such runs."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peft_mux import storage
from peft_mux.checkpoint.records import read_record, read_task_state
from peft_mux.errors import CheckpointError

NEWEST = "run-00000004.json"


def entry(**changes: Any) -> Callable[[dict[str, Any]], Any]:
    return lambda record: {**record, "tasks": {**record["tasks"], "a": {**record["tasks"]["a"], **changes}}}


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


# ------------------------------------------------------------------ state.json

STATES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a list": lambda state: [state],
    "settings a list": lambda state: {**state, "settings": []},
    "tokens huge": lambda state: {**state, "num_tokens": 10**400},
    "loss a word": lambda state: {**state, "last_loss": "much"},
    "mean of three": lambda state: {**state, "loss_mean": [1, 2, 3]},
    "status unknown": lambda state: {**state, "status": "done"},
    "history of numbers": lambda state: {**state, "trainer_state": {**state["trainer_state"], "log_history": [5]}},
    "history of words": lambda state: {
        **state,
        "trainer_state": {**state["trainer_state"], "log_history": [{"eval_loss": "much"}]},
    },
}


@pytest.mark.parametrize("craft", STATES)
def test_a_crafted_state_is_named(craft: str, crashed: Path, tmp_path: Path) -> None:
    state = json.loads((crashed / "a" / "checkpoint-4" / "state.json").read_text())
    (tmp_path / "state.json").write_text(json.dumps(STATES[craft](state)))
    with pytest.raises(CheckpointError, match=r"state\.json is not the state of a task"):
        read_task_state(tmp_path / "state.json")


@pytest.mark.parametrize(
    "content", [b"", b"\xff", b"[" * 200_000, b'{"step": NaN}'], ids=["empty", "bytes", "deep", "nan"]
)
def test_a_state_that_is_no_json_of_ours_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "state.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"state\.json"):
        read_task_state(tmp_path / "state.json")
