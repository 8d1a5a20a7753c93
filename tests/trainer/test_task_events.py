"""What callbacks of a run learn about its tasks, when, and what they may do then."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from peft_mux import ConfigError, EarlyStopping, MultiTaskTrainerCallback
from peft_mux.log.callbacks import Observer
from peft_mux.task import EVENTS
from tests.invariants.mux_lab import Recorder, make_trainer, rows, small_task, train
from tests.paths import ROOT
from tests.records import run_records
from tests.runs import Acts, hearing, poison, raising, small_tasks, stop


class Diary(MultiTaskTrainerCallback):
    """Writes down every event of tasks, and acts at one of them."""

    def __init__(self, at: str = "", act: Any = None) -> None:
        self.at = at
        self.act: Any = act
        self.lines: list[tuple[int, str, str]] = []
        self.facts: list[dict[str, Any]] = []

    def hear(self, event: str, args: Any, state: Any, control: Any, facts: dict[str, Any]) -> Any:
        self.lines.append((state.global_step, event, facts.get("task", "")))
        self.facts.append({"event": event, **facts})
        acts = f"{event} {facts.get('task', '')}".strip() == self.at
        return self.act(control) if acts else None

    def of(self, task: str) -> list[tuple[int, str]]:
        return [(step, event) for step, event, name in self.lines if name == task]


for _event in EVENTS:
    setattr(Diary, _event, hearing(_event))


def at_steps(**acts: Any) -> Recorder:
    """Return a callback that acts before steps, each given as `step_3=...`."""
    return Recorder(at_begin={int(name.removeprefix("step_")): act for name, act in acts.items()})


def trained(tasks: list[Any], folder: Path, diary: Diary, recorder: Recorder | None = None, **arguments: Any) -> Any:
    """Train tasks with a diary, and return the trainer."""
    trainer = make_trainer(tasks, folder, recorder=recorder, **arguments)
    trainer.add_callback(diary)
    trainer.train()
    return trainer


def test_tasks_that_begin_and_end_are_reported_once_when_their_adapter_is_on_the_disk(tmp_path: Path) -> None:
    on_disk: list[bool] = []
    diary = Diary("on_task_end a", lambda _: on_disk.append((tmp_path / "a/adapter_model.safetensors").is_file()))
    tasks = [small_task("a", data_seed=1, max_steps=3), small_task("b", data_seed=2, max_steps=5)]
    trainer = trained(tasks, tmp_path, diary, save_strategy="steps")
    assert diary.of("a") == [(0, "on_task_begin"), (3, "on_task_end")]
    assert diary.of("b") == [(0, "on_task_begin"), (5, "on_task_end")]
    assert on_disk == [True]
    (end,) = [fact for fact in diary.facts if fact["event"] == "on_task_end" and fact["task"] == "a"]
    assert (end["status"], end["reason"], end["adapter_folder"]) == ("succeeded", "", tmp_path / "a")
    assert end["task_state"] is trainer.task_states["a"]
    assert end["task_state"].global_step == 3
    assert end["model"] is trainer.model


def test_no_event_comes_before_training_and_a_plain_callback_may_have_a_single_event(tmp_path: Path) -> None:
    ended: dict[str, tuple[str, bool]] = {}

    def note(task: str, status: str, reason: str, **_: Any) -> None:
        ended[task] = (status, bool(reason))

    stopping = EarlyStopping(patience=1, min_delta=1e9)
    diary, trainer = Diary(), make_trainer([small_task("a", data_seed=1, max_steps=2)], tmp_path)
    trainer.add_callback(diary)
    trainer.add_callback(Acts(note, event="on_task_end"))
    trainer.pause_task("a")
    trainer.resume_task("a")
    held_out = rows(5, 4, 12, 12)
    trainer.register_tasks([small_task("b", data_seed=2, eval_dataset=held_out, eval_steps=1, early_stopping=stopping)])
    trainer.train()
    assert diary.of("a") == diary.of("b") == [(0, "on_task_begin"), (2, "on_task_end")]
    assert ended == {"a": ("succeeded", False), "b": ("stopped_early", True)}


def test_observers_hear_what_happens_in_a_run_in_its_order(tmp_path: Path) -> None:
    heard: list[tuple[int, str]] = []
    trainer = make_trainer(small_tasks("a", "b", max_steps=4), tmp_path, save_strategy="steps", save_steps=2)

    def hear(event: str) -> Any:
        return lambda self, *facts: heard.append((trainer.state.global_step, event))

    events = [event for event in vars(Observer) if event.startswith("on_") and event != "on_task_event"]
    trainer._run.log.observers += [type("Hearing", (Observer,), {event: hear(event) for event in events})()]
    trainer.add_callback(Acts(lambda **_: trainer.remove_task("b"), step=1))
    trainer.train()
    saved = ["on_saving", "on_saved"]
    assert heard == [
        (0, "on_begin"),
        (1, "on_task_remove"),
        *((2, event) for event in saved),
        *((4, event) for event in ("on_task_end", *saved, "on_end", "on_close")),
    ]
    trainer.add_callback(Acts(raising(OSError("here")), event="on_train_begin"))
    with pytest.raises(OSError, match="here"):
        trainer.train()
    assert heard[-1][1] == "on_failure"


def test_a_task_that_fails_is_reported_with_its_reason_and_the_others_end(tmp_path: Path) -> None:
    diary = Diary()
    trained(small_tasks("good", "bad", max_steps=5), tmp_path, diary, Recorder(at_begin={3: poison("bad")}))
    assert [event for _, event in diary.of("bad")] == ["on_task_begin", "on_task_fail"]
    assert [event for _, event in diary.of("good")] == ["on_task_begin", "on_task_end"]
    (failed,) = [fact for fact in diary.facts if fact["event"] == "on_task_fail"]
    assert (failed["status"], failed["reason"]) == ("failed", "non_finite: loss is nan at step 3")


def test_arrivals_pauses_and_departures_are_reported_in_their_order(tmp_path: Path) -> None:
    late = small_task("late", data_seed=3, max_steps=6)
    recorder = at_steps(
        step_1=lambda trainer: trainer.register_tasks([late]),
        step_3=lambda trainer: trainer.pause_task("late"),
        step_5=lambda trainer: trainer.resume_task("late"),
        step_7=lambda trainer: trainer.remove_task("late"),
    )
    diary = Diary()
    trained([small_task("own", data_seed=1, max_steps=9)], tmp_path, diary, recorder, save_strategy="steps")
    assert diary.of("late") == [
        (2, "on_task_register"),
        (2, "on_task_begin"),
        (4, "on_task_pause"),
        (6, "on_task_resume"),
        (8, "on_task_remove"),
    ]
    (gone,) = [fact for fact in diary.facts if fact["event"] == "on_task_remove"]
    assert (gone["status"], gone["adapter_folder"]) == ("removed", tmp_path / "late")


def test_plans_are_reported_when_steps_follow_another_one(tmp_path: Path) -> None:
    diary = Diary()
    trained([small_task("a", data_seed=1, max_steps=2), small_task("b", data_seed=2, max_steps=4)], tmp_path, diary)
    plans = [(fact["before"], fact["plan"]) for fact in diary.facts if fact["event"] == "on_plan"]
    assert [step for step, event, _ in diary.lines if event == "on_plan"] == [0, 2]
    assert [sorted(name for htask in plan.htasks for name in htask.tasks) for _, plan in plans] == [["a", "b"], ["b"]]
    assert plans[0][0] is None
    assert plans[1][0] is plans[0][1]


@pytest.mark.parametrize("fails", [False, True])
def test_a_run_continues_with_what_is_registered_when_its_last_task_has_ended_or_failed(
    fails: bool, tmp_path: Path
) -> None:
    # It fails before its first step.
    broken = {"eval_on_start": True, "compute_metrics": raising(ValueError("no such column"))} if fails else {}
    first = small_task("first", data_seed=1, max_steps=2, eval_dataset=rows(5, 4, 12, 12), **broken)
    trainer = make_trainer([first], tmp_path)
    follower = small_task("next", data_seed=2, max_steps=2)
    diary = Diary(f"on_task_{'fail' if fails else 'end'} first", lambda _: trainer.register_tasks([follower]))
    trainer.add_callback(diary)
    trainer.train()
    assert trainer.task_statuses == {"first": "failed" if fails else "succeeded", "next": "succeeded"}
    begin = 0 if fails else 2
    assert diary.of("next") == [(begin, "on_task_register"), (begin, "on_task_begin"), (begin + 2, "on_task_end")]


def test_what_a_callback_of_the_run_raises_ends_the_run_after_every_task_was_saved(tmp_path: Path) -> None:
    fail = raising(ValueError("no such mailbox"))
    tasks = [*small_tasks("a", "b", max_steps=2), small_task("c", data_seed=3, max_steps=6)]
    with pytest.raises(ValueError, match="no such mailbox"):
        trained(tasks, tmp_path / "run", Diary("on_task_end a", fail), save_strategy="steps", save_steps=1)
    statuses = run_records(tmp_path / "run", "status")
    assert [line["task"] for line in statuses if line["status"] == "succeeded"] == ["a", "b"]
    assert all((tmp_path / "run" / name / "adapter_model.safetensors").is_file() for name in "ab")
    again = train(tasks, tmp_path / "run", resume=True, save_strategy="steps", save_steps=1).trainer
    whole = train(tasks, tmp_path / "whole").trainer
    assert set(again.task_statuses.values()) == {"succeeded"}
    assert again.table["c"].last_loss == whole.table["c"].last_loss


@pytest.mark.slow
def test_a_resumed_run_reports_tasks_that_continue_and_not_of_those_that_ended_or_rest(tmp_path: Path) -> None:
    tasks = [small_task("a", data_seed=3, max_steps=2), *small_tasks("b", "c", max_steps=6)]
    acts = at_steps(step_1=lambda trainer: trainer.pause_task("c"), step_2=stop)
    train(tasks, tmp_path, recorder=acts, save_strategy="steps", save_steps=1)
    diary = Diary()
    goes_on = at_steps(step_4=lambda trainer: trainer.resume_task("c"))
    trainer = make_trainer(tasks, tmp_path, recorder=goes_on, save_strategy="steps", save_steps=1)
    trainer.add_callback(diary)
    trainer.train(resume_from_checkpoint=True)
    assert diary.of("a") == []
    assert diary.of("b") == [(3, "on_task_begin"), (6, "on_task_end")]
    assert [event for _, event in diary.of("c")] == ["on_task_resume", "on_task_begin", "on_task_end"]


class Misspelt(TrainerCallback):
    def on_task_ends(self, **facts: Any) -> None:
        raise AssertionError


def test_an_event_that_would_never_be_called_is_refused(tmp_path: Path) -> None:
    trainer = make_trainer([small_task("a", data_seed=1)], tmp_path)
    with pytest.raises(ConfigError, match=r'callbacks\.Misspelt\.on_task_ends must be .*Did you mean "on_task_end"'):
        trainer.add_callback(Misspelt())
    said = r"tasks\.a\.callbacks must be .*got Diary with on_task_register.*MultiTaskTrainer\("
    with pytest.raises(ConfigError, match=said):
        small_task("a", data_seed=1, callbacks=[Diary()])
    assert small_task("a", data_seed=1, callbacks=[MultiTaskTrainerCallback()]), "it hears nothing of tasks"


def test_the_queue_of_the_documentation_trains_every_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/arguments.md").read_text(encoding="utf-8")
    block = next(text for text in page.split("```python\n")[1:] if text.startswith("class Queue"))
    trainer = make_trainer([small_task("first", data_seed=1, max_steps=1)], tmp_path)
    jobs = [small_task(name, data_seed=2, max_steps=1) for name in ("third", "second")]
    names: dict[str, Any] = {"MultiTaskTrainerCallback": MultiTaskTrainerCallback, "trainer": trainer, "jobs": jobs}
    exec(block.split("```")[0], names)
    trainer.add_callback(names["Queue"]())
    trainer.train()
    assert trainer.task_statuses == dict.fromkeys(("first", "second", "third"), "succeeded")
    assert "third after 1 steps: None" in capsys.readouterr().out
