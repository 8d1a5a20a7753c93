"""Requests through the run folder: each is done between two steps and answered, however many ask at once."""

from __future__ import annotations

import json
import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from peft_mux.cli.main import main
from peft_mux.reporting.mailbox import Mailbox
from peft_mux.storage import FolderLock, keeper_of
from tests.invariants import mux_lab as lab
from tests.invariants.mux_lab import make_trainer
from tests.runs import small_tasks, stop, stops_after
from tests.shell import Shell


class Holds(TrainerCallback):
    """Waits at the second step of the run until somebody has done something."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.thread = threading.Thread(target=self._act, args=(act,))
        self.errors: list[BaseException] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 2:
            self.thread.start()
        # The steps are fast: without it the run would be over before anybody has asked.
        if self.thread.is_alive():
            time.sleep(0.05)

    def _act(self, act: Callable[[], object]) -> None:
        try:
            act()
        except BaseException as error:
            self.errors.append(error)


def train(folder: Path, act: Callable[[], object]) -> Any:
    trainer = make_trainer(small_tasks("a", "b", max_steps=400), folder, save_strategy="steps", save_steps=100_000)

    holds = Holds(lambda: (act(), stop(trainer)))
    trainer.add_callback(holds)
    trainer.train()
    assert holds.errors == []
    return trainer


def test_tasks_pause_continue_and_leave_as_the_command_line_says(tmp_path: Path, shell: Shell) -> None:
    run, said = str(tmp_path), []
    at_once: list[int] = []
    seen: list[dict[str, Any]] = []

    def act() -> None:
        words = ["pause", "resume"] * 3
        together = [threading.Thread(target=lambda word=word: at_once.append(main([word, run, "b"]))) for word in words]
        for thread in together:
            thread.start()
        for thread in together:
            thread.join()
        shell("resume", run, "b")  # a run whose tasks are all paused would end
        shell("pause", run, "a")
        shell("pause", run, "a")  # as it is already
        seen.append(shell.json("status", run))
        shell("resume", run, "a")
        shell("remove", run, "b")
        said.append(shell("pause", run, "absent", status=2))

    trainer = train(tmp_path, act)
    assert at_once == [0] * 6
    (status,) = seen
    assert status["tasks"]["a"]["status"] == "paused"
    assert status["trained_by"].startswith("process ")
    assert trainer.task_statuses == {"a": "running"}
    assert (tmp_path / "b" / "adapter_model.safetensors").is_file()
    assert re.search(r'not done: the task must be one of a(, b)?, got "absent"', said[0])
    assert list((tmp_path / "control").iterdir()) == [], "nothing is left behind"


def test_what_is_asked_of_a_run_that_is_not_training_is_refused_or_left_for_the_next(
    tmp_path: Path, shell: Shell, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = small_tasks("a", "b", max_steps=4)
    stopped = lab.train(tasks, tmp_path, recorder=stops_after(2), save_strategy="steps")
    assert keeper_of(tmp_path) == ""
    assert "in which no process trains" in shell.refused("remove", tmp_path, "b")
    shell("remove", tmp_path, "b", "--next")
    said = shell("status", tmp_path)
    assert "not carried out yet: remove b" in said
    rows = [line.split()[:2] for line in said.splitlines()]
    assert rows[1:4] == [["a", "interrupted"], ["b", "interrupted"], ["run", "interrupted,"]]
    found = shell.json("status", tmp_path)
    assert (found["interrupted"], found["trained_by"]) == (True, None)
    assert {own["status"] for own in found["tasks"].values()} == {"running"}, "the recorded status stays"
    capsys.readouterr()
    stopped.trainer.show()
    table = capsys.readouterr().out
    assert "run  interrupted, " in table
    assert " running" not in table
    run = lab.train(tasks, tmp_path, resume=True, save_strategy="steps")
    assert run.trainer.task_statuses == {"a": "succeeded"}
    assert "interrupted" not in shell("status", tmp_path), "all have ended"
    assert "b" not in run.losses, "it was done before the first step"


def test_a_request_without_an_answer_in_time_is_taken_back(tmp_path: Path, shell: Shell) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    lock = FolderLock(tmp_path)  # somebody trains there, but does not look
    lock.acquire()
    try:
        said = shell.refused("pause", tmp_path, "a", "--timeout", "0.2")
    finally:
        lock.release()
    assert re.search(r"error: pause: no answer from process \d+ .* within 0.2 s; it was withdrawn", said)
    assert Mailbox(tmp_path).requests() == []


def test_a_request_to_a_run_that_ends_before_it_looks_is_reported_at_once(tmp_path: Path, shell: Shell) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    lock, said = FolderLock(tmp_path), []
    lock.acquire()
    thread = threading.Thread(target=lambda: said.append(shell.refused("pause", tmp_path, "a")))
    thread.start()
    try:
        while not Mailbox(tmp_path).requests():
            time.sleep(0.01)
    finally:
        lock.release()
    thread.join(20)
    assert said, "without waiting for 60 s"
    assert "before its training ended; it was withdrawn. Resume it with peft-mux train FILE --resume" in said[0]
    assert Mailbox(tmp_path).requests() == []


def test_adding_to_a_run_of_the_users_program_says_how_to_do_it_there(tmp_path: Path, shell: Shell) -> None:
    said: list[str] = []
    train(tmp_path, lambda: said.append(shell("add", tmp_path, "tasks.yaml", status=2)))
    assert "trainer.register_tasks" in said[0]


def test_a_look_shows_no_control_characters_of_requests_tasks_and_messages(tmp_path: Path, shell: Shell) -> None:
    evil = "\x1b[2J\r\x07gone"
    records = [
        {"event": "status", "task": f"a{evil}", "status": f"failed{evil}", "reason": f"b\n{evil}", "run_step": 0}
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))
    Mailbox(tmp_path).send({"command": evil, "task": evil})
    Mailbox(tmp_path).send({"command": "add", "file": evil})
    commands = {("status", tmp_path): 0, ("pause", tmp_path, evil, "--next"): 0, ("status", evil): 2}
    text = "".join(part for words, status in commands.items() for part in shell.streams(*words, status=status))
    assert text.count("gone") >= 6
    assert all(letter.isprintable() or letter == "\n" for letter in text)


@pytest.mark.parametrize("name", ["config.json", "metrics.jsonl", "control", "run.lock", "run.lock.json"])
def test_a_pipe_in_place_of_a_file_of_the_run_blocks_no_reader(name: str, tmp_path: Path, shell: Shell) -> None:
    (tmp_path / "state").mkdir()
    os.mkfifo(tmp_path / name)
    said: list[str] = []

    def look() -> None:
        said.append(shell("status", tmp_path))
        said.append(shell("pause", tmp_path, "a", "--next", status=2 if name == "control" else 0))

    thread = threading.Thread(target=look, daemon=True)
    thread.start()
    thread.join(10)
    assert len(said) == 2, "it waits, or has ended otherwise"
    assert "no process trains" in "".join(said)
