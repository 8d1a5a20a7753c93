"""`ReadAhead`: the next item while the caller works, a limit on waiting, and no thread that outlives what it reads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from peft_mux.data.streams import ReadAhead
from peft_mux.errors import ConfigError, DataError
from tests.children import run_script

LIMIT_S = 60.0


def reader_of(items: Iterator[Any], timeout_s: float = LIMIT_S) -> ReadAhead[Any]:
    return ReadAhead(items, where="tasks.own.train_dataset", timeout_s=timeout_s)


def own_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("peft_mux tasks.own")]


def test_errors_of_our_own_keep_their_kind() -> None:
    with pytest.raises(ConfigError, match="no such setting"):
        reader_of(raising_at_once(ConfigError("no such setting"))).take()


def raising_at_once(error: BaseException) -> Iterator[int]:
    raise error
    yield 0


def test_an_iterator_that_gives_nothing_in_time_is_reported_of_and_waited_for_no_longer() -> None:
    goes_on = threading.Event()

    def items() -> Iterator[int]:
        goes_on.wait(LIMIT_S)
        yield 1

    reader = reader_of(items(), timeout_s=0.05)
    try:
        with pytest.raises(
            DataError,
            match=r"tasks\.own\.train_dataset must deliver all rows of a step within.*data_timeout_s",
        ):
            reader.take()
        assert len(own_threads()) == 1
        with pytest.raises(DataError, match="got no rows"):
            reader.settle()
    finally:
        goes_on.set()


def test_a_time_limit_beyond_what_a_lock_can_wait_for_is_none() -> None:
    assert reader_of(iter([1]), timeout_s=1e300).take() == 1


def test_a_thousand_readers_leave_no_thread() -> None:
    for number in range(1000):
        reader = reader_of(iter([number, number]))
        assert reader.take() == number
        reader.begin()
    for thread in own_threads():
        thread.join(LIMIT_S)
    assert own_threads() == []


def test_a_process_that_may_have_no_more_threads_fails_the_task_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    reader = reader_of(iter([1]))
    reader.begin()
    with pytest.raises(DataError, match="RuntimeError: can't start new thread"):
        reader.take()


def test_a_blocked_thread_does_not_keep_the_interpreter_from_ending(tmp_path: Path) -> None:
    script = tmp_path / "blocked.py"
    script.write_text(
        "import threading\n"
        "from peft_mux.data.streams import ReadAhead\n"
        "def items():\n"
        "    threading.Event().wait()\n"
        "    yield 1\n"
        "ReadAhead(items(), where='x', timeout_s=1.0).begin()\n"
        "print('ended')\n",
        encoding="utf-8",
    )
    assert run_script(script, timeout_s=60.0).strip() == "ended"
