"""Other threads ask things of a run while it loads and trains; each gets an answer, and the run goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from peft_mux import ConfigError, MultiTaskTrainer
from peft_mux.engine.parallelize import ModelPart
from tests.invariants.mux_lab import Recorder, make_trainer, small_task, train


class Background:
    """Threads whose errors are kept."""

    def __init__(self) -> None:
        self.errors: list[BaseException] = []
        self._threads: list[threading.Thread] = []

    def start(self, action: Callable[[], object]) -> None:
        def run() -> None:
            try:
                action()
            except BaseException as error:  # for the test to look at
                self.errors.append(error)

        thread = threading.Thread(target=run)
        self._threads.append(thread)
        thread.start()

    def join(self) -> None:
        for thread in self._threads:
            thread.join(60)
            assert not thread.is_alive(), "a thread never got its answer"


def test_a_task_that_another_thread_registers_while_the_model_loads_comes_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer([small_task("own", data_seed=1)], tmp_path)
    background, answers = Background(), []
    parallelize: Callable[..., Any] = ModelPart.parallelize

    def parallelize_meanwhile(self: ModelPart, *arguments: Any) -> Any:
        is_asked = threading.Event()

        def ask() -> None:
            is_asked.set()
            answers.append(trainer.register_tasks([small_task("late", data_seed=2, max_steps=3)]))

        background.start(ask)
        is_asked.wait()
        return parallelize(self, *arguments)

    monkeypatch.setattr(ModelPart, "parallelize", parallelize_meanwhile)
    trainer.train()
    background.join()
    assert background.errors == []
    assert answers[0].result(timeout=10) is None
    # Whether it came before the last step or after it is a matter of time.
    if "late" in trainer.task_statuses and trainer.task_statuses["late"] == "waiting":
        trainer.train()
    assert trainer.task_statuses == {"own": "succeeded", "late": "succeeded"}


def test_many_threads_that_ask_at_once_all_get_an_answer_and_the_run_continues(tmp_path: Path) -> None:
    background, accepted = Background(), []
    steady = small_task("steady", data_seed=1, max_steps=30, eval_dataset=small_task("x", data_seed=9).train_dataset)

    def come_and_go(trainer: MultiTaskTrainer, caller: int) -> None:
        for number in range(3):
            name = f"guest{caller}-{number}"
            trainer.register_tasks([small_task(name, data_seed=caller, max_steps=40)]).result(timeout=60)
            trainer.pause_task(name).result(timeout=60)
            assert trainer.evaluate("steady")["steady/eval_loss"] > 0
            trainer.resume_task(name).result(timeout=60)
            trainer.remove_task(name, save=False).result(timeout=60)
            accepted.append(name)

    def begin(trainer: MultiTaskTrainer) -> None:
        for caller in range(4):
            background.start(lambda caller=caller: come_and_go(trainer, caller))

    run = train([steady], tmp_path, recorder=Recorder(at_begin={1: begin}, watched=["steady"]))
    background.join()
    assert background.errors == []
    assert len(accepted) == 12
    assert run.trainer.task_statuses == {"steady": "succeeded"}
    alone = train([steady], tmp_path / "alone", recorder=Recorder(watched=["steady"]))
    assert run.losses["steady"] == pytest.approx(alone.losses["steady"], rel=1e-5)


def test_of_many_callers_of_one_name_one_is_accepted_and_the_others_are_refused(tmp_path: Path) -> None:
    background, accepted = Background(), []
    gate = threading.Barrier(4)

    def ask(trainer: MultiTaskTrainer, seed: int) -> None:
        gate.wait(60)
        accepted.append(trainer.register_tasks([small_task("late", data_seed=seed, max_steps=2)]))

    def begin(trainer: MultiTaskTrainer) -> None:
        for seed in range(4):
            background.start(lambda seed=seed: ask(trainer, seed))

    # The step waits for them, so that the task comes in while the run trains.
    recorder = Recorder(at_begin={1: begin}, at_end={2: lambda trainer: background.join()})
    run = train([small_task("own", data_seed=1)], tmp_path, recorder=recorder)
    assert [type(error) for error in background.errors] == [ConfigError] * 3
    assert all('"late"' in str(error) for error in background.errors)
    assert accepted[0].result(timeout=10) is None
    assert run.trainer.task_statuses == {"own": "succeeded", "late": "succeeded"}


def test_a_second_thread_that_trains_is_refused(tmp_path: Path) -> None:
    background = Background()

    def begin(trainer: MultiTaskTrainer) -> None:
        background.start(trainer.train)
        background.join()

    train([small_task("own", data_seed=1)], tmp_path, recorder=Recorder(at_begin={1: begin}))
    (error,) = background.errors
    assert isinstance(error, ConfigError)
    assert "train must be called once at a time, got a call while the run trains" in str(error)


def test_a_callback_that_waits_for_what_it_asked_for_fails_its_task_instead_of_hanging_the_run(tmp_path: Path) -> None:
    class Impatient(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            trainers[0].pause_task("own").result()

    tasks = [small_task("own", data_seed=1), small_task("impatient", data_seed=2, callbacks=[Impatient()])]
    trainers = [make_trainer(tasks, tmp_path)]
    trainers[0].train()
    assert trainers[0].task_statuses["impatient"] == "failed"
    assert (
        "a callback failed in on_step_end: ConfigError: pause own must not be waited for in the thread"
        in trainers[0].table["impatient"].reason
    )


def test_a_request_that_is_cancelled_leaves_the_run_training_and_its_name_free(tmp_path: Path) -> None:
    answers: list[Any] = []

    def ask(trainer: MultiTaskTrainer) -> None:
        for _ in range(2):
            answers.append(trainer.register_tasks([small_task("late", data_seed=2, max_steps=3)]))
            answers[0].cancel()

    recorder = Recorder(at_begin={2: ask})
    trainer = make_trainer([small_task("own", data_seed=1)], tmp_path, recorder=recorder)
    trainer.train()
    assert [answer.cancelled() for answer in answers] == [True, False]
    assert trainer.task_statuses == {"own": "succeeded", "late": "succeeded"}
