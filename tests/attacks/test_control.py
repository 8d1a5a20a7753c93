"""What is put into the control folder of a run that trains: it is answered or ignored, and the run continues."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from peft_mux.cli.main import main
from peft_mux.reporting.mailbox import Mailbox
from tests.attacks import attack_lab as attacks
from tests.attacks.attack_lab import COUNT, nano_task, sampled
from tests.attacks.run_files import snapshot

pytestmark = pytest.mark.timeout(60)


def _asks(**request: Any) -> bytes:
    return json.dumps(request).encode()


REQUESTS: dict[str, bytes] = {
    "nothing": b"",
    "half a request": b'{"command": "pause", "ta',
    "a list": b"[]",
    "null": b"null",
    "deep lists": b"[" * 200_000,
    "a number of many digits": b'{"command": ' + b"9" * 10_000 + b"}",
    "too many bytes": b"x" * (2**20 + 1),
    "Latin-1": b'{"command": "pause", "task": "caf\xe9"}',
    "a lone surrogate": b'{"command": "pause", "task": "\\ud800"}',
    "an unknown command": _asks(command="explode", task="one"),
    "a command that is a dict": _asks(command={"pause": 1}, task="one"),
    "a task that is a list": _asks(command="pause", task=["one"]),
    "a task that is a number": _asks(command="pause", task=5),
    "a task that is not there": _asks(command="pause", task="nobody"),
    "a task of an endless name": _asks(command="pause", task="x" * 500_000),
    "a task that leads out": _asks(command="remove", task="../../outside"),
    "an addition without a file": _asks(command="add"),
    "an addition of a number of tasks": _asks(command="add", file="tasks.yaml", tasks=5),
    "an addition of a folder": _asks(command="add", file="/"),
    "an addition of a device": _asks(command="add", file="/dev/zero"),
    "an addition of a name with NUL": _asks(command="add", file="\0"),
}


def ask(folder: Path, content: bytes, number: int = 1) -> Path:
    """Put a request into a control folder; return where its answer comes."""
    control = folder / "control"
    control.mkdir(exist_ok=True)
    (control / f"{number}.request.json").write_bytes(content)
    return control / f"{number}.answer.json"


def two_tasks() -> list[Any]:
    return [nano_task("one", 1), nano_task("two", 2)]


def test_hostile_requests_are_refused_and_the_tasks_train_on(tmp_path: Path, record_property: Any) -> None:
    answers = {kind: ask(tmp_path, content, number) for number, (kind, content) in enumerate(REQUESTS.items())}
    run = attacks.train(two_tasks(), tmp_path)
    assert set(run.statuses.values()) == {"succeeded"}
    for kind, answer in answers.items():
        assert json.loads(answer.read_text(encoding="utf-8"))["ok"] is False, kind
    assert not list((tmp_path / "control").glob("*.request.json"))
    record_property(COUNT, len(REQUESTS))


def link_to_a_device(control: Path, outside: Path) -> None:
    control.mkdir()
    (control / "1.request.json").symlink_to("/dev/zero")


def pipe(control: Path, outside: Path) -> None:
    control.mkdir()
    os.mkfifo(control / "1.request.json")


def folder_instead_of_a_request(control: Path, outside: Path) -> None:
    (control / "1.request.json").mkdir(parents=True)


def link_to_a_folder(control: Path, outside: Path) -> None:
    (outside / "1.request.json").write_bytes(_asks(command="remove", task="one"))
    control.symlink_to(outside)


def file_instead_of_the_folder(control: Path, outside: Path) -> None:
    control.write_text("x", encoding="utf-8")


def answer_that_leads_out(control: Path, outside: Path) -> None:
    control.mkdir()
    (control / "1.request.json").write_bytes(b"{}")
    (control / "1.answer.json").symlink_to(outside / "precious")


TRAPS: dict[str, Callable[[Path, Path], None]] = {
    "a link to a device": link_to_a_device,
    "a link to a folder": link_to_a_folder,
    "a pipe": pipe,
    "a folder instead of a request": folder_instead_of_a_request,
    "a file instead of the folder": file_instead_of_the_folder,
    "an answer that leads out": answer_that_leads_out,
}


@pytest.mark.parametrize("trap", sampled(list(TRAPS), fast=2))
def test_a_trap_in_the_control_folder_is_harmless(trap: str, tmp_path: Path) -> None:
    folder, outside = tmp_path / "run", tmp_path / "outside"
    folder.mkdir()
    outside.mkdir()
    (outside / "precious").write_bytes(b"precious")
    TRAPS[trap](folder / "control", outside)
    before = snapshot(outside)
    run = attacks.train(two_tasks(), folder)
    assert set(run.statuses.values()) == {"succeeded"}
    assert snapshot(outside) == before


def test_rows_that_never_come_hold_up_neither_a_run_nor_the_requests_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peft_mux.reporting.control.END_S", 0.2)
    come = threading.Event()

    def read(file: str, names: Any) -> list[Any]:
        if file == "exits":
            raise SystemExit("boom")
        come.wait()
        return [nano_task("late", 3)]

    class Asks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                ask(tmp_path, _asks(command="add", file="exits"), 2)
                answers.append(ask(tmp_path, _asks(command="resume", task="one"), 3))
                until = time.monotonic() + 20
                while not trainer._membership.queue.labels() and time.monotonic() < until:
                    time.sleep(0.01)

    trainer = attacks.make_trainer(two_tasks(), tmp_path)
    trainer.control_channel.read_tasks = read
    trainer.add_callback(Asks())
    answer = ask(tmp_path, _asks(command="add", file="tasks.yaml"))
    answers = [tmp_path / "control" / "2.answer.json"]
    trainer.train()
    assert not answer.exists()
    assert [json.loads(own.read_text(encoding="utf-8"))["said"] for own in answers] == [
        "SystemExit: boom",
        "one: resumed",
    ]
    come.set()
    until = time.monotonic() + 20
    while not answer.exists() and time.monotonic() < until:
        time.sleep(0.01)
    assert "the run has ended" in json.loads(answer.read_text(encoding="utf-8"))["said"]
    assert trainer.task_statuses == {"one": "succeeded", "two": "succeeded"}


HOSTILE_LINES = [
    '{"event": "status", "task": ["one"], "status": {}}',
    '{"event": ["status"], "task": "one"}',
    '{"event": "train", "task": 5, "step": "x", "loss": "y", "run_step": 1}',
    '{"event": "eval", "task": "one", "step": null, "eval_loss": {}}',
    '{"event": "train", "task": "one", "step": 1e999, "loss": NaN, "run_step": -1}',
    '{"event": "interrupted"}',
    "5",
]


@pytest.mark.parametrize("line", HOSTILE_LINES)
def test_a_look_at_a_run_with_hostile_records_shows_the_others(
    line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sound = '{"event": "train", "task": "two", "step": 3, "loss": 1.5, "run_step": 3}'
    (tmp_path / "metrics.jsonl").write_text(f"{line}\n{sound}\n", encoding="utf-8")
    Mailbox(tmp_path).send({"command": ["pause"], "task": {}})
    assert main(["status", str(tmp_path)]) == 0
    assert "two" in capsys.readouterr().out
    assert main(["status", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["tasks"]["two"]["step"] == 3
