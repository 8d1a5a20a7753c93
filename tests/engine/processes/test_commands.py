"""`CommandQueue` alone: one queue, one reader, and an answer to each caller."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

import pytest

from peft_mux.trainer.membership import Command, CommandQueue


def carry_out_all(queue: CommandQueue) -> Callable[[bool], bool]:
    """Return a function that executes all waiting commands."""

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


def test_what_comes_while_the_end_is_worked_off_is_done_too() -> None:
    queue, done = CommandQueue(), []

    def first() -> None:
        queue.give("second", lambda: done.append("second"))
        done.append("first")

    with queue.training(carry_out_all(queue)):
        queue.give("first", first)
    assert done == ["first", "second"]


def test_commands_are_taken_in_the_order_that_is_asked_for_and_as_often_as_they_were_given() -> None:
    queue = CommandQueue()
    with queue.training(lambda failed: False):
        queue.give("own", lambda: None)  # as a callback gives it
        in_a_thread(lambda: [queue.give(label, lambda: None) for label in ("a", "b", "a", "c")])
        assert queue.labels() == ["a", "b", "a", "c"]
        assert [command.label for command in queue.take(())] == ["own"]
        assert [command.label for command in queue.take(["b", "a", "a"])] == ["b", "a", "a"]
        assert queue.labels() == ["c"]


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
