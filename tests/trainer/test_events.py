"""What happens to a run under way: tasks that come, leave and pause, tasks that fail, and interrupts."""

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
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from transformers import TrainerCallback

from peft_mux import CheckpointError, ConfigError, MultiTaskTrainer, Task
from peft_mux.checkpoint.run_folder import RunFolder
from peft_mux.errors import ForcedInterrupt
from tests.invariants.mux_lab import Recorder, Run, make_trainer, small_task, train


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def act(at_begin: dict[int, Callable[[MultiTaskTrainer], object]]) -> Recorder:
    return Recorder(at_begin=at_begin)  # type: ignore[arg-type]


# -------------------------------------------------------- arrivals and departures


def alone(task: Task, folder: Path) -> Run:
    return train([task], folder)


def test_a_task_that_arrives_from_a_callback_trains_as_if_alone(tmp_path: Path) -> None:
    late = small_task("late", data_seed=2, max_steps=5)
    run = train(
        [small_task("own", data_seed=1)],
        tmp_path / "a",
        recorder=act({3: lambda trainer: trainer.register_tasks([late])}),
    )
    assert run.trainer.task_statuses == {"own": "succeeded", "late": "succeeded"}
    assert run.losses["late"] == pytest.approx(alone(late, tmp_path / "b").losses["late"], rel=1e-5)
    assert [task.name for task in run.trainer.tasks] == ["own", "late"]
    assert run.trainer.state.global_step == 9, "asked for in the fourth step, it begins with the fifth and takes five"


def test_callbacks_of_a_task_that_arrives_later_see_its_training_begin(tmp_path: Path) -> None:
    begun: list[int] = []

    class Begin(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            begun.append(state.global_step)

    late = small_task("late", data_seed=2, max_steps=2, callbacks=[Begin()])
    train([small_task("own", data_seed=1)], tmp_path, recorder=act({2: lambda trainer: trainer.register_tasks([late])}))
    assert begun == [0]


def test_a_task_that_leaves_is_written_first_and_the_others_go_on(tmp_path: Path) -> None:
    recorder = act({3: lambda trainer: trainer.remove_task("gone")})
    run = train(
        [small_task("own", data_seed=1), small_task("gone", data_seed=2)],
        tmp_path,
        recorder=recorder,
        save_strategy="steps",
    )
    assert run.trainer.task_statuses == {"own": "succeeded"}
    assert len(run.losses["gone"]) == 4
    assert len(run.losses["own"]) == 8
    assert (tmp_path / "gone" / "adapter_model.safetensors").is_file()
    assert "gone" not in run.trainer.model.tasks
    (line,) = [line for line in records(tmp_path) if line["event"] == "status" and line["task"] == "gone"]
    assert (line["status"], line["step"]) == ("removed", 4)


@pytest.mark.parametrize("strategy", ["steps", "no"])
def test_the_settings_of_tasks_that_arrive_stand_beside_those_of_tasks_that_left(tmp_path: Path, strategy: str) -> None:
    late = small_task("late", data_seed=3, max_steps=2)
    recorder = act({1: lambda trainer: trainer.remove_task("gone"), 3: lambda trainer: trainer.register_tasks([late])})
    tasks = [small_task("own", data_seed=1), small_task("gone", data_seed=2, max_steps=7)]
    train(tasks, tmp_path, recorder=recorder, save_strategy=strategy)
    config = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))["tasks"]
    assert {name: own["num_steps"] for name, own in config.items()} == {"own": 8, "gone": 7, "late": 2}


def test_a_task_may_leave_without_being_written(tmp_path: Path) -> None:
    recorder = act({3: lambda trainer: trainer.remove_task("gone", save=False)})
    tasks = [small_task("own", data_seed=1), small_task("gone", data_seed=2)]
    train(tasks, tmp_path, recorder=recorder, save_strategy="steps")
    assert not (tmp_path / "gone").exists()


def test_a_paused_task_takes_no_steps_until_it_is_resumed_and_ends_as_if_alone(tmp_path: Path) -> None:
    recorder = act({2: lambda trainer: trainer.pause_task("own"), 5: lambda trainer: trainer.resume_task("own")})
    task = small_task("own", data_seed=1, max_steps=6)
    run = train([task, small_task("other", data_seed=2, max_steps=8)], tmp_path / "a", recorder=recorder)
    assert run.trainer.task_statuses == {"own": "succeeded", "other": "succeeded"}
    statuses = [
        (line["run_step"], line["status"])
        for line in records(tmp_path / "a")
        if line["event"] == "status" and line["task"] == "own"
    ]
    assert statuses == [(3, "paused"), (6, "running"), (9, "succeeded")]
    assert run.losses["own"] == pytest.approx(alone(task, tmp_path / "b").losses["own"], rel=1e-5)


def test_a_run_whose_tasks_are_all_paused_ends_and_goes_on_later(tmp_path: Path) -> None:
    recorder = act({2: lambda trainer: trainer.pause_task("own")})
    trainer = train([small_task("own", data_seed=1)], tmp_path, recorder=recorder).trainer
    assert trainer.task_statuses == {"own": "paused"}
    assert trainer.table["own"].step == 3
    assert trainer.plan().shares == ()
    recorder.at_begin = {}
    trainer.resume_task("own")
    trainer.train()
    assert trainer.task_statuses == {"own": "succeeded"}
    assert trainer.table["own"].step == 8


def test_a_bad_arrival_is_refused_in_the_callback_and_the_run_goes_on(tmp_path: Path) -> None:
    messages: list[str] = []

    def ask(trainer: MultiTaskTrainer) -> None:
        for task in (
            small_task("OWN", data_seed=3),
            small_task("wrong", data_seed=3, target_modules=["q_prj"]),
            small_task("wide", data_seed=3, rank=100_000),
        ):
            with pytest.raises(ConfigError) as caught:
                trainer.register_tasks([small_task(f"good{len(messages)}", data_seed=4), task])
            messages.append(str(caught.value))

    run = train([small_task("own", data_seed=1)], tmp_path, recorder=act({2: ask}))
    assert run.trainer.task_statuses == {"own": "succeeded"}, "of a list with one fault none is added"
    assert '"OWN" beside "own"' in messages[0]
    assert 'Did you mean "q_proj"?' in messages[1]
    assert "tasks.wide.peft_config.r" in messages[2]


@pytest.mark.parametrize("method", ["remove_task", "pause_task", "resume_task"])
def test_an_unknown_task_is_refused_with_the_nearest_one(tmp_path: Path, method: str) -> None:
    trainer = make_trainer([small_task("alpha", data_seed=1)], tmp_path)
    with pytest.raises(ConfigError, match=r'got task "alhpa"; allowed: alpha\. Did you mean "alpha"'):
        getattr(trainer, method)("alhpa")


@pytest.mark.parametrize("second", ["remove_task", "pause_task", "resume_task"])
def test_a_command_for_a_task_that_is_leaving_already_does_not_end_the_run(tmp_path: Path, second: str) -> None:
    def ask(trainer: MultiTaskTrainer) -> None:
        trainer.remove_task("gone")
        getattr(trainer, second)("gone")

    tasks = [small_task("own", data_seed=1), small_task("gone", data_seed=2)]
    assert train(tasks, tmp_path, recorder=act({2: ask})).trainer.task_statuses == {"own": "succeeded"}


def test_two_arrivals_of_one_name_in_one_step_do_not_end_the_run(tmp_path: Path) -> None:
    def ask(trainer: MultiTaskTrainer) -> None:
        trainer.register_tasks([small_task("late", data_seed=2)])
        with pytest.raises(ConfigError, match="late"):
            trainer.register_tasks([small_task("late", data_seed=3)])

    run = train([small_task("own", data_seed=1)], tmp_path, recorder=act({2: ask}))
    assert run.trainer.task_statuses == {"own": "succeeded", "late": "succeeded"}


def test_an_arrival_whose_schedule_cannot_be_built_does_not_end_the_run(tmp_path: Path) -> None:
    def ask(trainer: MultiTaskTrainer) -> None:
        with pytest.raises(ConfigError, match="late"):
            trainer.register_tasks([small_task("late", data_seed=2, lr_scheduler_type="cosine_with_min_lr")])

    run = train([small_task("own", data_seed=1)], tmp_path, recorder=act({2: ask}))
    assert run.trainer.task_statuses == {"own": "succeeded"}


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
    (line,) = [line for line in records(tmp_path) if line["event"] == "command_refused"]
    assert line["command"] == "register late"


# --------------------------------------------------------------------- failures


@torch.no_grad()
def poison(trainer: MultiTaskTrainer) -> None:
    next(iter(trainer.model.task_parameters("bad").values())).fill_(float("nan"))


def test_a_quarantined_task_does_not_stop_the_others_and_train_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tasks = [small_task("good", data_seed=1), small_task("bad", data_seed=2)]
    run = train(tasks, tmp_path / "a", recorder=act({3: poison}), disable_tqdm=False, save_strategy="steps")
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
    assert run.losses["good"] == pytest.approx(alone(tasks[0], tmp_path / "b").losses["good"], rel=1e-5)


def test_a_quarantined_task_is_told_of_without_progress_bars_too(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    train([small_task("good", data_seed=1), small_task("bad", data_seed=2)], tmp_path, recorder=act({3: poison}))
    captured = capfd.readouterr()
    assert "bad" in captured.out + captured.err + caplog.text


def test_a_run_that_shall_stop_at_the_first_failure_does(tmp_path: Path) -> None:
    tasks = [small_task("good", data_seed=1), small_task("bad", data_seed=2)]
    run = train(tasks, tmp_path, recorder=act({3: poison}), quarantine_policy="stop")
    assert run.trainer.task_statuses == {"good": "running", "bad": "failed"}
    assert run.trainer.table["good"].step == 4


# -------------------------------------------------------------------- interrupts


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_the_run_at_a_step_with_everything_saved_and_resumes_exactly(
    tmp_path: Path, number: signal.Signals
) -> None:
    tasks = [small_task("one", data_seed=1, lora_dropout=0.2), small_task("two", data_seed=2)]
    before = signal.getsignal(number)
    run = train(
        tasks,
        tmp_path / "a",
        recorder=act({2: lambda _: os.kill(os.getpid(), number)}),
        save_strategy="steps",
        save_steps=100,
    )
    assert signal.getsignal(number) is before, "the handler of the caller is back in place"
    assert run.trainer.interrupted_by == number
    (line,) = [line for line in records(tmp_path / "a") if line["event"] == "interrupted"]
    assert (line["signal"], line["is_saved"], line["steps"]) == (number.name, True, {"one": 3, "two": 3})
    assert {entry.step for entry in run.trainer.table} == {3}
    assert (tmp_path / "a" / "state" / "run-00000003.json").is_file()
    whole = train(tasks, tmp_path / "b")
    rest = train(tasks, tmp_path / "a", resume=True, save_strategy="steps", save_steps=100)
    for name in ("one", "two"):
        assert run.losses[name] + rest.losses[name] == whole.losses[name]
        assert all(torch.equal(value, whole.weights(name)[key]) for key, value in rest.weights(name).items())


@pytest.mark.parametrize(
    ("strategy", "way_on"),
    [
        ("no", 'nothing is saved (save_strategy="no"); train() of this trainer goes on from here'),
        ("steps", "this step could not be saved in {root}, so that a new process goes on from the state before it"),
    ],
)
def test_an_interrupt_whose_step_is_not_on_the_disk_says_where_a_run_goes_on(
    strategy: str, way_on: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fill_disk(_: MultiTaskTrainer) -> None:
        monkeypatch.setattr(RunFolder, "save_record", fail)
        os.kill(os.getpid(), signal.SIGTERM)

    def fail(*args: Any, **options: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

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


def test_a_run_in_a_folder_that_holds_one_is_refused_unless_it_is_resumed(tmp_path: Path) -> None:
    tasks = [small_task("own", data_seed=1)]
    train(tasks, tmp_path, save_strategy="steps")
    with pytest.raises(CheckpointError, match=r"output_dir: got .* which holds a run"):
        train(tasks, tmp_path, save_strategy="steps")
