"""What happens during a run: tasks that come, leave and pause, tasks that fail, and interrupts."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig
from safetensors.torch import load_file

from peft_mux import ConfigError, MultiTaskTrainer, Task
from peft_mux.checkpoint.run_folder import RunFolder
from peft_mux.errors import ForcedInterrupt
from tests.invariants.mux_lab import Recorder, Run, make_trainer, small_task, train
from tests.records import run_records as records
from tests.runs import SAVING, Acts, assert_ended_with_the_same_weights, poison, raising, small_tasks


def act(at_begin: dict[int, Callable[[MultiTaskTrainer], object]]) -> Recorder:
    return Recorder(at_begin=at_begin)  # type: ignore[arg-type]


# -------------------------------------------------------- arrivals and departures


def test_a_task_that_leaves_is_written_first_and_the_others_continue(tmp_path: Path) -> None:
    recorder = Recorder(at_begin={3: lambda trainer: trainer.remove_task("gone")})
    run = train(small_tasks("own", "gone"), tmp_path, recorder=recorder, save_strategy="steps")
    assert run.trainer.task_statuses == {"own": "succeeded"}
    assert len(run.losses["gone"]) == 4
    assert len(run.losses["own"]) == 8
    assert (tmp_path / "gone" / "adapter_model.safetensors").is_file()
    assert "gone" not in run.trainer.model.tasks
    (line,) = [line for line in records(tmp_path, "status") if line["task"] == "gone"]
    assert (line["status"], line["step"]) == ("removed", 4)


@pytest.mark.parametrize("strategy", ["steps", "no"])
def test_the_settings_of_tasks_that_arrive_are_next_to_those_of_tasks_that_left_unwritten_or_not(
    tmp_path: Path, strategy: str
) -> None:
    late = small_task("late", data_seed=3, max_steps=2)
    recorder = Recorder(
        at_begin={
            1: lambda trainer: trainer.remove_task("gone", save=False),
            3: lambda trainer: trainer.register_tasks([late]),
        }
    )
    tasks = [small_task("own", data_seed=1, max_steps=6), small_task("gone", data_seed=2, max_steps=7)]
    train(tasks, tmp_path, recorder=recorder, save_strategy=strategy)
    assert not (tmp_path / "gone").exists()
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["tasks"]
    assert {name: own["num_steps"] for name, own in config.items()} == {"own": 6, "gone": 7, "late": 2}


def test_a_run_whose_tasks_are_all_paused_ends_and_continues_later(tmp_path: Path) -> None:
    recorder = Recorder(at_begin={2: lambda trainer: trainer.pause_task("own")})
    trainer = train([small_task("own", data_seed=1)], tmp_path, recorder=recorder).trainer
    assert trainer.task_statuses == {"own": "paused"}
    assert trainer.table["own"].step == 3
    assert trainer.plan().shares == ()
    recorder.at_begin = {}
    trainer.resume_task("own")
    trainer.train()
    assert trainer.task_statuses == {"own": "succeeded"}
    assert trainer.table["own"].step == 8


def test_a_bad_arrival_is_refused_in_the_callback_and_the_run_continues(tmp_path: Path) -> None:
    messages: list[str] = []

    def ask(trainer: MultiTaskTrainer) -> None:
        trainer.register_tasks([small_task("late", data_seed=2, max_steps=2)])
        for task in (
            small_task("OWN", data_seed=3),
            small_task("late", data_seed=3),
            small_task("wrong", data_seed=3, target_modules=["q_prj"]),
            small_task("wide", data_seed=3, rank=100_000),
            small_task("odd", data_seed=3, lr_scheduler_type="cosine_with_min_lr"),
        ):
            with pytest.raises(ConfigError) as caught:
                trainer.register_tasks([small_task(f"good{len(messages)}", data_seed=4), task])
            messages.append(str(caught.value))

    run = train([small_task("own", data_seed=1)], tmp_path, recorder=act({2: ask}))
    statuses = {"own": "succeeded", "late": "succeeded"}
    assert run.trainer.task_statuses == statuses, "of a list with one fault none is added"
    parts = ('"OWN" and "own"', "late", 'Did you mean "q_proj"?', "tasks.wide.peft_config.r", "tasks.odd")
    assert [part for part, message in zip(parts, messages, strict=True) if part not in message] == []


COMMANDS = ("remove_task", "pause_task", "resume_task")


def test_an_unknown_task_is_refused_with_the_nearest_one(tmp_path: Path) -> None:
    trainer = make_trainer([small_task("alpha", data_seed=1)], tmp_path)
    for command in COMMANDS:
        with pytest.raises(ConfigError, match=r'the task must be one of alpha, got "alhpa".*Did you mean "alpha"'):
            getattr(trainer, command)("alhpa")


def test_a_command_for_a_task_that_is_leaving_already_does_not_end_the_run(tmp_path: Path) -> None:
    def ask(trainer: MultiTaskTrainer) -> None:
        for command in COMMANDS:
            trainer.remove_task(command)
            getattr(trainer, command)(command)

    tasks = [small_task(name, data_seed=1, max_steps=5) for name in ("own", *COMMANDS)]
    assert train(tasks, tmp_path, recorder=act({2: ask})).trainer.task_statuses == {"own": "succeeded"}


def test_an_arrival_that_peft_refuses_when_it_makes_the_adapter_does_not_end_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing_left = LoraConfig(r=2, target_modules=["q_proj"], exclude_modules=["q_proj"])
    late = replace(small_task("late", data_seed=2), peft_config=nothing_left)
    run = train([small_task("own", data_seed=1)], tmp_path, recorder=act({2: lambda t: t.register_tasks([late])}))
    assert run.trainer.task_statuses == {"own": "succeeded"}
    assert [task.name for task in run.trainer.tasks] == ["own"]
    assert run.trainer.model.tasks == ("own",)
    assert "tasks.late.peft_config: PEFT refuses it" in capsys.readouterr().out
    (line,) = records(tmp_path, "command_refused")
    assert line["command"] == "register late"


# --------------------------------------------------------------------- failures


def test_a_quarantined_task_does_not_stop_the_others_and_train_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = small_tasks("good", "bad")
    run = train(tasks, tmp_path / "a", recorder=act({3: poison("bad")}), disable_tqdm=False, save_strategy="steps")
    printed = capsys.readouterr().out
    assert run.trainer.task_statuses == {"good": "succeeded", "bad": "failed"}
    assert run.trainer.table["bad"].step == 3
    assert "bad: failed (non_finite: loss is nan at step 3)" in printed
    assert "bad" in run.trainer.report()
    assert "failed" in run.trainer.report()
    (line,) = [line for line in records(tmp_path / "a") if line.get("status") == "failed"]
    assert (line["task"], line["step"], line["reason"]) == ("bad", 3, "non_finite: loss is nan at step 3")
    saved = load_file(tmp_path / "a" / "bad" / "adapter_model.safetensors")
    assert all(tensor.isfinite().all() for tensor in saved.values())
    assert run.losses["good"] == pytest.approx(train(tasks[:1], tmp_path / "b").losses["good"], rel=1e-5)


def test_a_run_that_stops_at_the_first_failure_says_so_without_progress_bars(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    run = train(small_tasks("good", "bad"), tmp_path, recorder=act({3: poison("bad")}), quarantine_policy="stop")
    assert run.trainer.task_statuses == {"good": "running", "bad": "failed"}
    captured = capfd.readouterr()
    assert "bad" in captured.out + captured.err + caplog.text


# -------------------------------------------------------------------- interrupts


def two_tasks() -> list[Task]:
    return [small_task("one", data_seed=1, lora_dropout=0.2), small_task("two", data_seed=2)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a run that is never interrupted."""
    return train(two_tasks(), tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_run_at_a_step_with_everything_saved_and_resumes_exactly(
    tmp_path: Path, number: signal.Signals, whole: Run
) -> None:
    before = signal.getsignal(number)
    recorder = Recorder(at_begin={2: lambda _: os.kill(os.getpid(), number)})
    run = train(two_tasks(), tmp_path, recorder=recorder, **SAVING)
    assert signal.getsignal(number) is before, "the handler of the caller is back in place"
    assert run.trainer.interrupted_by == number
    (line,) = records(tmp_path, "interrupted")
    assert (line["signal"], line["is_saved"], line["steps"]) == (number.name, True, {"one": 3, "two": 3})
    assert {entry.step for entry in run.trainer.table} == {3}
    assert (tmp_path / "state" / "run-00000003.json").is_file()
    rest = train(two_tasks(), tmp_path, resume=True, **SAVING)
    assert {name: run.losses[name] + rest.losses[name] for name in whole.losses} == whole.losses
    assert_ended_with_the_same_weights(rest, whole, "one", "two")


@pytest.mark.parametrize(
    ("strategy", "way_on"),
    [
        ("no", 'nothing is saved (save_strategy="no"); train() of this trainer continues from here'),
        ("steps", "this step could not be saved in {root}, so a new process resumes from the state before it"),
    ],
)
def test_an_interrupt_whose_step_is_not_on_the_disk_says_where_a_run_continues(
    strategy: str, way_on: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fill_disk(_: MultiTaskTrainer) -> None:
        monkeypatch.setattr(RunFolder, "save_record", raising(OSError(errno.ENOSPC, "No space left on device")))
        os.kill(os.getpid(), signal.SIGTERM)

    train([small_task("own", data_seed=1)], tmp_path, recorder=act({2: fill_disk}), save_strategy=strategy)
    said = capsys.readouterr()
    line = f"interrupted by SIGTERM after step 3; {way_on.format(root=tmp_path)}"
    assert line in " ".join((said.out + said.err).split())


def test_a_second_interrupt_ends_the_run_at_once(tmp_path: Path) -> None:
    def twice(_: MultiTaskTrainer) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    trainer = make_trainer([small_task("own", data_seed=1)], tmp_path, recorder=act({2: twice}))
    with pytest.raises(ForcedInterrupt):
        trainer.train()
    assert trainer.table["own"].step == 2
    assert not trainer.is_in_train


# ------------------------------------------------------------------ futures of requests


def test_a_callback_that_waits_for_what_it_asked_for_fails_its_task_instead_of_hanging_the_run(tmp_path: Path) -> None:
    waits = Acts(lambda **_: trainer.pause_task("own").result())
    tasks = [small_task("own", data_seed=1), small_task("impatient", data_seed=2, callbacks=[waits])]
    trainer = make_trainer(tasks, tmp_path)
    trainer.train()
    assert trainer.task_statuses["impatient"] == "failed"
    said = "a callback failed in on_step_end: ConfigError: pause own must not be waited for in the thread"
    assert said in trainer.table["impatient"].reason


def test_a_request_that_is_cancelled_leaves_the_run_training_and_its_name_free(tmp_path: Path) -> None:
    answers: list[Any] = []

    def ask(trainer: MultiTaskTrainer) -> None:
        for _ in range(2):
            answers.append(trainer.register_tasks([small_task("late", data_seed=2, max_steps=3)]))
            answers[0].cancel()

    trainer = train([small_task("own", data_seed=1)], tmp_path, recorder=act({2: ask})).trainer
    assert [answer.cancelled() for answer in answers] == [True, False]
    assert trainer.task_statuses == {"own": "succeeded", "late": "succeeded"}
