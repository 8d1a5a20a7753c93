"""`CommandQueue` alone: one queue, one owner, and an answer to each caller."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import pytest

from peft_mux import ConfigError
from peft_mux.errors import ProcessError
from peft_mux.trainer.membership import Command, CommandQueue


def carry_out_all(queue: CommandQueue) -> Callable[[bool], bool]:
    """Return what does all that waits, until nothing does."""

    def finish(failed: bool) -> bool:
        del failed
        for command in queue.take():
            command.carry_out()
        return True

    return finish


def in_a_thread(action: Callable[[], object]) -> None:
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()


def test_where_nobody_trains_a_command_is_done_at_once_and_its_error_is_the_callers() -> None:
    queue = CommandQueue()
    assert queue.give("count", lambda: 3).result() == 3
    with pytest.raises(ZeroDivisionError):
        queue.give("divide", lambda: 1 // 0)
    assert queue.ask("count", lambda: 4) == 4, "the queue has no owner again"


def test_while_a_run_trains_a_command_waits_for_its_owner_who_answers() -> None:
    queue, done = CommandQueue(), []
    with queue.training(lambda failed: False):
        answers: list[Command] = []
        in_a_thread(lambda: answers.append(queue.give("add", lambda: done.append("added") or 5)))
        (answer,) = answers
        assert not answer.done()
        assert queue.labels == ["add"]
        (command,) = queue.take()
        assert command.carry_out() is None
        assert done == ["added"]
        assert answer.result() == 5


def test_what_a_command_raises_is_its_answer() -> None:
    queue = CommandQueue()
    with queue.training(lambda failed: False):
        answer = queue.give("divide", lambda: 1 // 0)
        (command,) = queue.take()
        assert isinstance(command.carry_out(), ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        answer.result()


def test_the_owner_asks_itself_at_once_and_may_not_wait_for_what_it_has_to_do() -> None:
    queue = CommandQueue()
    with queue.training(carry_out_all(queue)):
        assert queue.ask("evaluate", lambda: 1.5) == 1.5
        answer = queue.give("pause a", lambda: "paused")
        for wait in (answer.result, answer.exception):
            with pytest.raises(ConfigError, match=r"pause a: got a wait for it in the thread that trains"):
                wait()
    assert answer.result() == "paused"


def test_another_thread_that_asks_waits_for_the_answer() -> None:
    queue, answers = CommandQueue(), []
    asked = threading.Event()

    def ask() -> None:
        asked.set()
        answers.append(queue.ask("evaluate", lambda: threading.get_ident()))

    with queue.training(carry_out_all(queue)):
        other = threading.Thread(target=ask)
        other.start()
        asked.wait()
        while not queue.labels:  # until it stands in the queue
            pass
    other.join()
    assert answers == [threading.get_ident()], "done by the owner"


def test_what_comes_while_the_end_is_worked_off_is_done_too() -> None:
    queue, done = CommandQueue(), []

    def first() -> None:
        queue.give("second", lambda: done.append("second"))
        done.append("first")

    with queue.training(carry_out_all(queue)):
        queue.give("first", first)
    assert done == ["first", "second"]


def test_what_is_left_when_a_run_has_failed_is_answered_as_not_done() -> None:
    queue = CommandQueue()

    def fail() -> None:
        with queue.training(lambda failed: False):
            answers.append(queue.give("pause a", lambda: None))
            raise RuntimeError("out of memory")

    answers: list[Command] = []
    with pytest.raises(RuntimeError, match="out of memory"):
        fail()
    with pytest.raises(ProcessError, match="pause a: not done, as the run has ended"):
        answers[0].result()


def test_a_run_is_trained_by_one_thread_at_a_time() -> None:
    queue, errors = CommandQueue(), []

    def train() -> None:
        try:
            with queue.training(lambda failed: False):
                pass
        except ConfigError as error:
            errors.append(str(error))

    with queue.training(lambda failed: False):
        in_a_thread(train)
    assert len(errors) == 1
    assert "train: got a call while the run trains" in errors[0]
    train()
    assert len(errors) == 1, "the run is free again"


def test_commands_are_taken_in_the_order_that_is_asked_for_and_as_often_as_they_were_given() -> None:
    queue = CommandQueue()
    with queue.training(lambda failed: False):
        queue.give("own", lambda: None)  # as a callback gives it
        in_a_thread(lambda: [queue.give(label, lambda: None) for label in ("a", "b", "a", "c")])
        assert queue.labels == ["a", "b", "a", "c"]
        assert [command.label for command in queue.take(())] == ["own"]
        assert [command.label for command in queue.take(["b", "a", "a"])] == ["b", "a", "a"]
        assert queue.labels == ["c"]


def test_a_command_that_was_cancelled_is_not_done_and_those_after_it_are() -> None:
    queue, done = CommandQueue(), []
    with queue.training(carry_out_all(queue)):
        first, second = (queue.give("add", lambda name=name: done.append(name)) for name in ("first", "second"))
        assert first.cancel()
        assert queue.labels == []
    assert done == ["second"]
    assert first.cancelled()
    assert not second.cancel(), "it is done"


def test_a_cancelled_command_of_a_thread_is_no_longer_shared_with_other_processes() -> None:
    queue, answers = CommandQueue(), []
    with queue.training(lambda failed: False):
        in_a_thread(lambda: answers.extend(queue.give("a", lambda: None) for _ in range(2)))
        answers[0].cancel()
        assert queue.labels == ["a"]
        assert queue.take(["a"]) == [answers[1]]
    assert answers[0].cancelled(), "the end of the run answers it too, and does not mind"


@pytest.mark.parametrize("end", ["done", "refused", "cancelled", "left"])
def test_an_answer_that_is_kept_holds_nothing_of_what_was_done(end: str) -> None:
    class Rows(list[int]):
        """Something large."""

    def ask(rows: Rows) -> Command:
        return queue.give("add", lambda: 1 // len(rows))

    queue, rows = CommandQueue(), Rows([1] if end != "refused" else [])
    held = weakref.ref(rows)
    with queue.training(lambda failed: False):
        answer = ask(rows)
        if end == "cancelled":
            answer.cancel()
        elif end != "left":
            (command,) = queue.take()
            error = command.carry_out()
            if error is not None:
                error.__traceback__ = None  # it shows where the error came from
            del command, error
    del rows
    assert answer.done()
    assert held() is None
