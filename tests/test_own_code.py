"""The guard of a task's own code: all that it raises becomes one kind of error, and its time is told."""

from __future__ import annotations

import traceback

import pytest
from transformers import TrainerCallback, TrainerControl
from transformers.trainer_callback import CallbackHandler

from peft_mux.errors import ForcedInterrupt
from peft_mux.own_code import OwnCodeError, describe_error, own_code, own_frames


class Hostile(Exception):
    def __str__(self) -> str:
        raise SystemExit("no text")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("no column"), "ValueError: no column"),
        (KeyError("x"), "KeyError: 'x'"),
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (RecursionError("deep"), "RecursionError: deep"),
        (StopIteration(), "StopIteration"),
        (Hostile(), "Hostile: its text cannot be read"),
        (ValueError("a\ud800b"), r"ValueError: a\ud800b"),
    ],
)
def test_whatever_own_code_raises_is_one_kind_of_error_with_its_text_and_cause(error: BaseException, text: str) -> None:
    with pytest.raises(OwnCodeError) as caught, own_code("own", "callback"):
        raise error
    assert str(caught.value) == text
    assert caught.value.__cause__ is error


def test_an_endless_text_is_cut() -> None:
    assert len(describe_error(ValueError("x" * 10**6))) < 3000


@pytest.mark.parametrize("error", [ForcedInterrupt(), GeneratorExit()])
def test_what_the_user_of_the_run_asks_for_passes(error: BaseException) -> None:
    with pytest.raises(type(error)), own_code("own", "callback"):
        raise error


@pytest.mark.parametrize("fails", [False, True])
def test_the_listener_is_told_how_long_it_took_whether_it_failed_or_not(fails: bool) -> None:
    told: list[tuple[str, str, float]] = []

    def run() -> None:
        with own_code("own", "callback", lambda *facts: told.append(facts)):
            if fails:
                raise ValueError

    if fails:
        with pytest.raises(OwnCodeError):
            run()
    else:
        run()
    ((task, what, seconds),) = told
    assert (task, what) == ("own", "callback")
    assert seconds >= 0


def test_a_traceback_begins_in_the_own_code_and_not_in_what_called_it() -> None:
    def fails(*_: object, **__: object) -> None:
        raise ValueError("gone")

    callback = type("Own", (TrainerCallback,), {"on_step_end": fails})()
    handler = CallbackHandler([callback], None, None, None, None)
    with pytest.raises(OwnCodeError) as caught, own_code("own", "callback"):
        handler.call_event("on_step_end", None, None, TrainerControl())  # type: ignore[arg-type]
    error = caught.value.__cause__
    assert error is not None
    frames = traceback.extract_tb(own_frames(error))
    assert frames[-1].name == "fails"
    assert all(frame.filename == __file__ for frame in (frames[0], frames[-1]))
