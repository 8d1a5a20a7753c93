"""The guard of a task's own code: all that it raises becomes one kind of error, and its time is reported."""

from __future__ import annotations

import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback, TrainerControl
from transformers.trainer_callback import CallbackHandler

from peft_mux.errors import ForcedInterrupt, printable
from peft_mux.user_code import UserCodeError, describe_error, guard_user_code, user_traceback


class Hostile(Exception):
    def __str__(self) -> str:
        raise SystemExit("no text")


def exits(*_: object) -> Any:
    raise SystemExit


Nameless = type("Kind", (type,), {"__name__": property(exits)})("Nameless", (Exception,), {})
Text = type("Text", (str,), {"__getitem__": exits, "expandtabs": exits})


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("no column"), "ValueError: no column"),
        (KeyError("x"), "KeyError: 'x'"),
        (SystemExit(3), "SystemExit: 3"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (RecursionError("deep"), "RecursionError: deep"),
        (StopIteration(), "StopIteration"),
        (GeneratorExit(), "GeneratorExit"),
        (Hostile(), "Hostile: its text cannot be read"),
        (ValueError("a\ud800b"), r"ValueError: a\ud800b"),
        (Nameless("boom"), "Nameless: boom"),
        (type("\x1b[2J\ngone", (Exception,), {})("boom"), "\\x1b[2J\n  gone: boom"),
        (type("Own", (Exception,), {"__str__": lambda _: Text("boom")})(), "Own: boom"),
    ],
)
def test_whatever_own_code_raises_is_one_kind_of_error_with_its_text_and_cause(error: BaseException, text: str) -> None:
    with pytest.raises(UserCodeError) as caught, guard_user_code("own", "callback"):
        raise error
    assert str(caught.value) == text
    assert len(describe_error(type("X" * 10**6, (Exception,), {})("x" * 10**6))) < 3000, "endless texts are cut"
    assert caught.value.__cause__ is error


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("", ""),
        ("caf\xe9", "caf\xe9"),
        ("\x1b[2Jgone", r"\x1b[2Jgone"),
        ("first\nsecond", "first\n  second"),
        ("first\rsecond\u2028third", "first\n  second\n  third"),
    ],
)
def test_a_text_is_shown_without_what_moves_a_cursor_and_begins_no_line(text: str, shown: str) -> None:
    assert printable(text) == shown


def enter(block: Any) -> None:
    block.__enter__()


SETTINGS: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
    "gradients": (lambda: torch.set_grad_enabled(False), torch.is_grad_enabled),
    "dtype": (lambda: torch.set_default_dtype(torch.float64), torch.get_default_dtype),
    "device": (lambda: torch.set_default_device("meta"), torch.get_default_device),
    "precision": (lambda: torch.set_float32_matmul_precision("medium"), torch.get_float32_matmul_precision),
    "deterministic": (lambda: torch.use_deterministic_algorithms(True), torch.are_deterministic_algorithms_enabled),
    "threads": (lambda: torch.set_num_threads(torch.get_num_threads() + 1), torch.get_num_threads),
    "autocast": (lambda: torch.autocast("cpu").__enter__(), lambda: torch.is_autocast_enabled("cpu")),
    "folder": (lambda: os.chdir("/"), os.getcwd),
    "attention": (lambda: torch.backends.cuda.enable_math_sdp(False), torch.backends.cuda.math_sdp_enabled),
    "anomalies": (lambda: torch.autograd.set_detect_anomaly(True), torch.is_anomaly_enabled),
    "denormals": (lambda: torch.set_flush_denormal(True), lambda: sys.float_info.min / 2),
    "precision of one backend": (
        lambda: setattr(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
        lambda: torch.backends.mkldnn.matmul.fp32_precision,
    ),
    "precision of all backends": (
        lambda: setattr(torch.backends, "fp32_precision", "tf32"),
        lambda: (torch.backends.fp32_precision, torch.backends.cuda.matmul.fp32_precision),
    ),
    "inference": (lambda: enter(torch.inference_mode()), torch.is_inference_mode_enabled),
    "functions": (lambda: enter(TorchFunctionMode()), torch._C._len_torch_function_stack),
    "operations": (lambda: enter(TorchDispatchMode()), torch._C._len_torch_dispatch_stack),
    "hooks": (
        lambda: enter(torch.autograd.graph.saved_tensors_hooks(abs, abs)),
        lambda: torch._C._autograd._top_saved_tensors_default_hooks(True),
    ),
    "warnings": (lambda: warnings.simplefilter("error"), lambda: list(warnings.filters)),
    "outputs": (lambda: vars(sys).update(stdout=object(), stderr=object()), lambda: (sys.stdout, sys.stderr)),
    "handler": (lambda: signal.signal(signal.SIGUSR1, signal.SIG_IGN), lambda: signal.getsignal(signal.SIGUSR1)),
    "timer": (lambda: signal.setitimer(signal.ITIMER_PROF, 99), lambda: signal.getitimer(signal.ITIMER_PROF)),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_of_the_process_that_own_code_leaves_is_put_back(name: str) -> None:
    change, asked = SETTINGS[name]
    before = asked()
    for fails in (False, True):
        with suppress(UserCodeError), guard_user_code("own", "callback"):
            change()
            assert asked() != before
            if fails:
                raise ValueError
        assert asked() == before


def test_a_timer_of_the_program_continues_and_one_that_own_code_sets_does_not_ring() -> None:
    rung: list[int] = []
    before = signal.signal(signal.SIGVTALRM, lambda *_: rung.append(1))
    try:
        signal.setitimer(signal.ITIMER_VIRTUAL, 50)
        with guard_user_code("own", "callback"):
            pass
        assert 49 < signal.getitimer(signal.ITIMER_VIRTUAL)[0] <= 50.1
        with guard_user_code("own", "callback"):
            signal.setitimer(signal.ITIMER_VIRTUAL, 0.2, 0.2)
        left, every = signal.getitimer(signal.ITIMER_VIRTUAL)
        assert 49 < left <= 50.1
        assert not every
        assert not rung
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def test_a_block_of_autocast_that_is_never_left_keeps_no_weights_of_a_step_before() -> None:
    weight, x = torch.nn.Parameter(torch.ones(2, 2)), torch.ones(1, 2)
    with guard_user_code("own", "callback"):
        torch.autocast("cpu", torch.bfloat16).__enter__()
    with torch.autocast("cpu", torch.bfloat16):
        before = torch.nn.functional.linear(x, weight).sum().item()
    with torch.no_grad():
        weight.fill_(3)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.nn.functional.linear(x, weight).sum().item() == 3 * before


def test_what_the_user_of_the_run_asks_for_passes() -> None:
    with pytest.raises(ForcedInterrupt), guard_user_code("own", "callback"):
        raise ForcedInterrupt


@pytest.mark.parametrize("fails", [False, True])
def test_the_listener_gets_how_long_it_took_whether_it_failed_or_not(fails: bool) -> None:
    calls: list[tuple[str, str, float]] = []
    with suppress(UserCodeError), guard_user_code("own", "callback", lambda *facts: calls.append(facts)):
        if fails:
            raise ValueError
    ((task, what, seconds),) = calls
    assert (task, what) == ("own", "callback")
    assert seconds >= 0


def test_a_traceback_begins_in_the_own_code_and_not_in_what_called_it() -> None:
    def fails(*_: object, **__: object) -> None:
        raise ValueError("gone")

    callback = type("Own", (TrainerCallback,), {"on_step_end": fails})()
    handler = CallbackHandler([callback], None, None, None, None)
    with pytest.raises(UserCodeError) as caught, guard_user_code("own", "callback"):
        handler.call_event("on_step_end", None, None, TrainerControl())  # type: ignore[arg-type]
    error = caught.value.__cause__
    assert error is not None
    frames = traceback.extract_tb(user_traceback(error))
    assert frames[-1].name == "fails"
    assert all(frame.filename == __file__ for frame in (frames[0], frames[-1]))
