"""What happens during a run: tasks that come, leave and pause, tasks that fail, and interrupts."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from peft import LoraConfig
from transformers import TrainerCallback

from peft_mux import ConfigError, MultiTaskTrainer, Task
from peft_mux.errors import ForcedInterrupt
from tests.invariants.mux_lab import Recorder, Run, make_trainer, small_task, train
from tests.records import run_records as records
from tests.runs import (
    SAVING,
    Acts,
    assert_ended_with_the_same_weights,
    poison,
    small_tasks,
    weights_in_plain_peft,
)


def act(at_begin: dict[int, Callable[[MultiTaskTrainer], object]]) -> Recorder:
    return Recorder(at_begin=at_begin)  # type: ignore[arg-type]


# -------------------------------------------------------- arrivals and departures


def test_a_task_that_leaves_is_written_first_and_the_others_continue(tmp_path: Path) -> None:
    late = small_task("late", data_seed=3, max_steps=2)
    acts: dict[int, Callable[[MultiTaskTrainer], object]] = {
        1: lambda trainer: trainer.remove_task("unwritten", save=False),
        3: lambda trainer: (trainer.remove_task("gone"), trainer.register_tasks([late])),
    }
    run = train(small_tasks("own", "gone", "unwritten"), tmp_path, recorder=act(acts), save_strategy="steps")
    assert run.trainer.task_statuses == {"own": "succeeded", "late": "succeeded"}
    assert not (tmp_path / "unwritten").exists()
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["tasks"]
    steps = {"own": 8, "gone": 8, "unwritten": 8, "late": 2}
    assert {name: own["num_steps"] for name, own in config.items()} == steps
    assert len(run.losses["gone"]) == 4
    assert len(run.losses["own"]) == 8
    assert (tmp_path / "gone" / "adapter_model.safetensors").is_file()
    assert "gone" not in run.trainer.model.tasks
    (line,) = [line for line in records(tmp_path, "status") if line["task"] == "gone"]
    assert (line["status"], line["step"]) == ("removed", 4)


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


def test_commands_for_an_unknown_task_are_refused_and_for_one_that_is_leaving_do_not_end_the_run(
    tmp_path: Path,
) -> None:
    def ask(trainer: MultiTaskTrainer) -> None:
        for command in COMMANDS:
            with pytest.raises(ConfigError, match=r'the task must be one of own, .*got "onw".*Did you mean "own"'):
                getattr(trainer, command)("onw")
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


def test_a_task_that_fails_is_reported_and_saved_as_it_was_last_good(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ended: list[int] = []
    hears = Acts(lambda state, **_: ended.append(state.global_step))
    bad = small_task("bad", data_seed=2, max_steps=5, callbacks=[hears])
    tasks = [small_task("good", data_seed=1, max_steps=5), bad]
    trainer = train(tasks, tmp_path, recorder=act({3: poison("bad")}), disable_tqdm=False, **SAVING).trainer
    assert ended == [1, 2, 3], "it has not taken the step in which it failed"
    assert trainer.task_statuses == {"good": "succeeded", "bad": "failed"}
    assert "bad: failed (non_finite: loss is nan at step 3)" in capsys.readouterr().out
    assert "failed" in next(line for line in trainer.report().splitlines() if line.startswith("bad"))
    (line,) = [line for line in records(tmp_path) if line.get("status") == "failed"]
    assert (line["task"], line["step"], line["reason"]) == ("bad", 3, "non_finite: loss is nan at step 3")
    assert all(weight.isfinite().all() for weight in weights_in_plain_peft(tmp_path / "bad").values())


# -------------------------------------------------------------------- interrupts


def two_tasks() -> list[Task]:
    return [small_task("one", data_seed=1, lora_dropout=0.2), small_task("two", data_seed=2)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a run that is never interrupted."""
    return train(two_tasks(), tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
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


def test_a_launcher_of_one_worker_may_repeat_its_signal_until_all_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")

    class Repeats(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                self.on_save(args, state, control)

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)

    trainer = make_trainer([small_task("own", data_seed=1)], tmp_path, **{**SAVING, "save_steps": 100})
    trainer.add_callback(Repeats())
    trainer.train()
    (line,) = records(tmp_path, "interrupted")
    assert (line["signal"], line["is_saved"], line["steps"]) == ("SIGTERM", True, {"own": 3})


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
