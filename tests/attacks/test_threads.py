"""Tasks come and go, pause and are evaluated from several threads at once: before, while and after `train` runs.

Each caller gets its answer, the run ends as with one caller, and no step sees half of a change.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from peft_mux import MultiTaskTrainer, PeftMuxError
from tests.attacks import attack_lab as attacks
from tests.attacks.attack_lab import COUNT, how_many, nano_task, rows, sampled
from tests.invariants import mux_lab as lab

pytestmark = pytest.mark.timeout(120)

PATIENCE_S = 60.0


@dataclass
class Answer:
    """What a caller got: a value, or an error."""

    value: Any = None
    error: BaseException | None = None


def ask(call: Callable[[], Any]) -> Answer:
    """Call, and wait until what was asked for has happened."""
    try:
        found = call()
        if hasattr(found, "result"):
            found = found.result(timeout=PATIENCE_S)
        return Answer(found)
    except BaseException as error:
        return Answer(error=error)


class Callers:
    """Threads that call at once, or after a while of their own.

    Args:
        scripts: what each thread calls, one call after another.
        delays_s: how long each of them waits first.
    """

    def __init__(self, scripts: Sequence[Sequence[Callable[[], Any]]], delays_s: Sequence[float] = ()) -> None:
        """Start no thread yet."""
        self.answers: list[list[Answer]] = [[] for _ in scripts]
        self._go, self._left = threading.Event(), len(scripts)
        self._lock = threading.Lock()
        self.done = threading.Event()
        delays = [*delays_s, *[0.0] * len(scripts)]
        self._threads = [
            threading.Thread(target=self._call, args=(number, script, delays[number]), daemon=True)
            for number, script in enumerate(scripts)
        ]
        for thread in self._threads:
            thread.start()

    def go(self) -> None:
        """Let all threads begin."""
        self._go.set()

    def _call(self, number: int, script: Sequence[Callable[[], Any]], delay_s: float) -> None:
        self._go.wait()
        time.sleep(delay_s)
        for call in script:
            self.answers[number].append(ask(call))
        with self._lock:
            self._left -= 1
            if not self._left:
                self.done.set()

    def assert_answered(self) -> list[Answer]:
        """Wait for all threads; return their answers; the package must have given every one."""
        assert self.done.wait(PATIENCE_S), "a caller was never answered"
        answers = [answer for own in self.answers for answer in own]
        strange = [answer.error for answer in answers if not isinstance(answer.error, (PeftMuxError, type(None)))]
        assert not strange, strange
        return answers


class Until(TrainerCallback):
    """Begins what threads do when a step begins, and ends the run when they are done and some steps are taken."""

    def __init__(self, callers: Callers, *, at: int = 1, steps: int = 3) -> None:
        """Wait for the step `at`."""
        self.callers, self.at, self.steps = callers, at, steps
        self.done_at: int | None = None

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.at:
            self.callers.go()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.callers.done.is_set() and self.done_at is None:
            self.done_at = state.global_step
        if self.done_at is not None and state.global_step >= self.done_at + self.steps:
            control.should_training_stop = True


def host(**settings: Any) -> Any:
    """Return a task that trains until the run ends."""
    return nano_task("host", 1, max_steps=100_000, eval_dataset=rows(9, 2), eval_steps=0, **settings)


def train_until(trainer: MultiTaskTrainer, callers: Callers, **options: Any) -> None:
    trainer.add_callback(Until(callers, **options))
    trainer.train()


# ------------------------------------------------------------------------ all at once


@pytest.mark.parametrize("seed", sampled(range(12), fast=1, ci=2))
def test_threads_that_ask_for_everything_at_once_are_all_answered(
    seed: int, tmp_path: Path, record_property: Any
) -> None:
    watcher = attacks.Watcher(keep_weights=False)
    trainer = attacks.make_trainer([host()], tmp_path, watcher=watcher)

    def script(number: int) -> list[Callable[[], Any]]:
        name = f"guest{number}"
        guest = nano_task(name, 20 + number, max_steps=100_000, eval_dataset=rows(number, 2), eval_steps=0)
        calls: list[Callable[[], Any]] = [
            lambda: trainer.register_tasks([guest]),
            lambda: trainer.pause_task(name),
            lambda: trainer.evaluate("host"),
            lambda: trainer.resume_task(name),
            lambda: trainer.evaluate(),
            lambda: trainer.plan(),
            lambda: trainer.report(),
            lambda: (trainer.task_statuses, trainer.task_states, trainer.tasks),
            lambda: trainer.remove_task(name, save=False),
        ]
        shift = (seed * number) % 3
        return [*calls[:1], *calls[1 + shift : 8], *calls[1 : 1 + shift], *calls[8:]]

    callers = Callers([script(number) for number in range(4)])
    train_until(trainer, callers)
    answers = callers.assert_answered()
    assert not [answer.error for answer in answers if answer.error is not None]
    assert list(trainer.task_statuses) == ["host"]
    alone = attacks.train([host()], tmp_path / "alone", at_end={len(watcher.losses["host"]): _stop})
    lab.assert_close(watcher.losses["host"], alone.losses["host"], 1e-5, "host")
    record_property(COUNT, len(answers))


def _stop(trainer: MultiTaskTrainer) -> None:
    trainer.control.should_training_stop = True


@pytest.mark.parametrize("num_callers", [2, 4])
def test_of_several_callers_of_one_name_exactly_one_is_accepted(num_callers: int, tmp_path: Path) -> None:
    trainer = attacks.make_trainer([host()], tmp_path)
    guests = [nano_task("guest", number, max_steps=100_000) for number in range(num_callers)]
    callers = Callers([[lambda guest=guest: trainer.register_tasks([guest])] for guest in guests])
    train_until(trainer, callers)
    answers = callers.assert_answered()
    refused = [answer.error for answer in answers if answer.error is not None]
    assert len(refused) == num_callers - 1
    assert all("guest" in str(error) for error in refused)
    assert trainer.table["guest"].step >= 1


def test_of_several_who_remove_one_task_the_run_survives_all(tmp_path: Path) -> None:
    trainer = attacks.make_trainer([host(), nano_task("guest", 2, max_steps=100_000)], tmp_path)
    callers = Callers([[lambda: trainer.remove_task("guest")] for _ in range(4)])
    train_until(trainer, callers)
    answers = callers.assert_answered()
    assert [answer.error for answer in answers].count(None) >= 1
    assert list(trainer.task_statuses) == ["host"]


# ------------------------------------------------------------------------ while it is loading, before and after


@pytest.mark.parametrize("delay_ms", sampled(range(0, 210, 15), fast=1, ci=5))
def test_a_task_registered_at_any_moment_of_loading_trains(delay_ms: int, tmp_path: Path) -> None:
    trainer = attacks.make_trainer([host()], tmp_path)
    guest = nano_task("guest", 2, max_steps=3)
    callers = Callers([[lambda: trainer.register_tasks([guest])]], [delay_ms / 1000])
    callers.go()
    train_until(trainer, callers, at=-1, steps=5)
    (answer,) = callers.assert_answered()
    assert answer.error is None
    assert trainer.task_statuses["guest"] == "succeeded"


def test_tasks_that_threads_register_before_a_run_train_in_it(tmp_path: Path) -> None:
    trainer = attacks.make_trainer([nano_task("host", 1)], tmp_path)
    guests = [nano_task(f"guest{number}", number, max_steps=2) for number in range(4)]
    callers = Callers([[lambda guest=guest: trainer.register_tasks([guest])] for guest in guests])
    callers.go()
    assert not [answer.error for answer in callers.assert_answered() if answer.error is not None]
    trainer.train()
    assert set(trainer.task_statuses.values()) == {"succeeded"}
    assert len(trainer.task_statuses) == 5


def test_after_a_run_threads_may_continue(tmp_path: Path) -> None:
    trainer = attacks.make_trainer([nano_task("host", 1, eval_dataset=rows(3, 2))], tmp_path)
    trainer.train()
    guests = [nano_task(f"guest{number}", number, max_steps=2) for number in range(3)]
    callers = Callers(
        [
            *([lambda guest=guest: trainer.register_tasks([guest])] for guest in guests),
            [lambda: trainer.evaluate("host")],
        ]
    )
    callers.go()
    assert not [answer.error for answer in callers.assert_answered() if answer.error is not None]
    trainer.train()
    assert set(trainer.task_statuses.values()) == {"succeeded"}


def test_a_second_thread_that_trains_is_refused_and_the_first_continues(tmp_path: Path) -> None:
    trainer = attacks.make_trainer([host()], tmp_path)
    callers = Callers([[trainer.train]])
    train_until(trainer, callers)
    (answer,) = callers.assert_answered()
    assert isinstance(answer.error, PeftMuxError)
    assert "train must be called once at a time, got a call while the run trains" in str(answer.error)
    assert trainer.table["host"].step >= 3


def test_a_run_in_a_thread_of_its_own_is_asked_by_the_main_one(tmp_path: Path) -> None:
    trainer = attacks.make_trainer([host()], tmp_path)
    begun, over = threading.Event(), threading.Event()

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            begun.set()
            if over.is_set():
                control.should_training_stop = True

    trainer.add_callback(Watch())
    runner = Callers([[trainer.train]])
    runner.go()
    assert begun.wait(PATIENCE_S)
    answers = [
        ask(lambda: trainer.register_tasks([nano_task("guest", 2, max_steps=100_000)])),
        ask(lambda: trainer.evaluate("host")),
        ask(lambda: trainer.remove_task("guest")),
    ]
    over.set()
    assert not [answer.error for answer in (*answers, *runner.assert_answered()) if answer.error is not None]
    assert answers[1].value["host/eval_loss"] > 0


# ------------------------------------------------------------------------ answers


def test_an_evaluation_asked_for_by_a_thread_changes_no_bit(tmp_path: Path) -> None:
    def train(folder: Path, times: int) -> attacks.Outcome:
        watcher = attacks.Watcher()
        trainer = attacks.make_trainer([host()], folder, watcher=watcher)
        callers = Callers([[lambda: trainer.evaluate("host")] * times])
        train_until(trainer, callers)
        answers = callers.assert_answered()
        assert all(isinstance(answer.value["host/eval_loss"], float) for answer in answers)
        return attacks.outcome_of(trainer, watcher)

    asked, left_alone = train(tmp_path / "asked", 5), train(tmp_path / "alone", 1)
    count = min(len(asked.losses["host"]), len(left_alone.losses["host"]))
    assert count >= 3
    assert asked.digests["host"][:count] == left_alone.digests["host"][:count]


def test_an_error_reaches_only_the_thread_that_asked(tmp_path: Path) -> None:
    trainer = attacks.make_trainer([host()], tmp_path)
    wrong = [
        lambda: trainer.register_tasks([nano_task("HOST", 2)]),
        lambda: trainer.register_tasks([nano_task("wrong", 2, train_dataset=[{"input_ids": [10**9]}])]),
        lambda: trainer.register_tasks([nano_task("good", 3), nano_task("good", 4)]),
        lambda: trainer.remove_task("nobody"),
        lambda: trainer.pause_task("nobody"),
        lambda: trainer.resume_task("nobody"),
        lambda: trainer.evaluate("nobody"),
    ]
    callers = Callers([[call] for call in wrong])
    train_until(trainer, callers)
    assert all(isinstance(answer.error, PeftMuxError) for answer in callers.assert_answered())
    assert list(trainer.task_statuses) == ["host"]


@pytest.mark.parametrize("joins", ["thread", "pool"])
def test_a_thread_that_a_callback_joins_gets_an_error_and_not_what_it_asked_for(joins: str, tmp_path: Path) -> None:
    trainer = attacks.make_trainer([host(save_steps=0)], tmp_path)
    answers: list[Answer] = []

    def save() -> None:
        answers.append(ask(trainer.save_model))

    class Joins(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            control.should_training_stop = True
            if joins == "pool":
                ThreadPoolExecutor(1).submit(save).result()
            else:
                thread = threading.Thread(target=save)
                thread.start()
                thread.join()

    trainer.add_callback(Joins())
    trainer.train()
    assert "save_model must not be waited for" in str(answers[0].error)
    assert not (tmp_path / "host" / "adapter_config.json").exists()


def test_a_callback_of_a_future_ends_no_run(tmp_path: Path) -> None:
    trainer = attacks.make_trainer([nano_task("one", 1), nano_task("two", 2)], tmp_path)

    def stop(_: object) -> None:
        raise SystemExit("boom")

    class Asks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            trainer.resume_task("two").add_done_callback(stop)

    trainer.add_callback(Asks())
    trainer.train()
    assert set(trainer.task_statuses.values()) == {"succeeded"}


@pytest.mark.slow
def test_of_hundreds_of_commands_none_is_lost(tmp_path: Path, record_property: Any) -> None:
    trainer = attacks.make_trainer([host()], tmp_path)
    rounds = how_many(usually=10, full=60)

    def script(number: int) -> list[Callable[[], Any]]:
        name = f"guest{number}"
        return [
            call
            for _ in range(rounds)
            for call in (
                lambda: trainer.register_tasks([nano_task(name, number, max_steps=100_000)]),
                lambda: trainer.pause_task(name),
                lambda: trainer.resume_task(name),
                lambda: trainer.remove_task(name, save=False),
            )
        ]

    callers = Callers([script(number) for number in range(4)])
    train_until(trainer, callers)
    answers = callers.assert_answered()
    assert not [answer.error for answer in answers if answer.error is not None]
    assert list(trainer.task_statuses) == ["host"]
    record_property(COUNT, len(answers))
