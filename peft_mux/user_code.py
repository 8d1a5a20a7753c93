"""The one guard for code that belongs to a task: its callbacks, metrics, loss function and optimizer hooks.

Whatever this code raises fails its task and no other, `SystemExit` and `KeyboardInterrupt` included. Only the second
Ctrl-C of the run's user (`ForcedInterrupt`) passes. Process-wide settings that the code changes and that would change
the results of other tasks are restored. The guard also measures how long the code kept the other tasks waiting and
reports it to a listener; in a run that is `RunLog.note_user_code`.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]
import logging
import os
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch.utils import _device as device_modes
from torch.utils import _python_dispatch as dispatch_modes

from peft_mux.errors import ForcedInterrupt, PeftMuxError, printable

Listener = Callable[[str, str, float], None]
"""Called with the name of a task, which of its code ran, and the seconds that it took."""

_MAX_CHARACTERS, _MAX_TRACE_CHARACTERS = 2000, 20_000
_class_name = type.__dict__["__name__"].__get__
"""The name of a class, whatever its metaclass says."""
_PACKAGE = f"{Path(__file__).resolve().parent}{os.sep}"
_AUTOCAST_DEVICES = ("cpu", "cuda")
_FP32_KINDS = (
    ("generic", "all"),
    *((backend, kind) for backend in ("cuda", "mkldnn") for kind in ("all", "conv", "rnn", "matmul")),
)
_ATTENTION = ("flash", "mem_efficient", "math", "cudnn", "overrideable", "fa3")
_FLAGS = (
    "sdp_priority_order math_sdp_allow_fp16_bf16_reduction cublas_allow_fp16_reduced_precision_reduction "
    "cublas_allow_bf16_reduced_precision_reduction cublas_allow_fp16_accumulation cudnn_enabled cudnn_benchmark "
    "cudnn_deterministic mkldnn_enabled mkldnn_deterministic nnpack_enabled blas_preferred_backend "
    "linalg_preferred_backend cpu_allow_fp16_reduced_precision_reduction"
).split()
"""Settings of backends, by the end of the names of the functions of torch that read and set them."""
_SIGNAL_NAMES = "SIGINT SIGTERM SIGHUP SIGALRM SIGVTALRM SIGPROF SIGUSR1 SIGUSR2 SIGCHLD".split()


class UserCodeError(PeftMuxError):
    """A task's own code failed; the message is type and text of what it raised, which is the cause."""


def ignore_timing(task: str, what: str, seconds: float) -> None:
    """Do nothing: the listener where timings are not wanted."""


_running = threading.local()


@contextmanager
def watching_model(watch: Callable[[str, str], Callable[[], str]]) -> Iterator[None]:
    """Let guards of this thread watch the model that all tasks share, in the `with` block (`SharedModel.watch`)."""
    outer, _running.watch = getattr(_running, "watch", None), watch
    try:
        yield
    finally:
        _running.watch = outer


def running_task() -> str | None:
    """Return the task whose own code runs in this thread; `None` outside of such code."""
    return getattr(_running, "task", None)


class guard_user_code(AbstractContextManager[None]):
    """Run a task's own code in the `with` block, so that anything it does fails at most this task.

    A class rather than a generator: a generator that is closed would catch a `GeneratorExit` of the user's code.

    Args:
        task: name of the task.
        what: which of its code runs: "callback", "compute_metrics", "optimizer".
        listener: receives the seconds that it took, also when it fails.
        watches_model: whether the block runs code that could change the model that all tasks share.

    Raises:
        UserCodeError: caused by whatever the code raises, or because it has changed the model.
        ProcessError: if a change of the model cannot be undone.
    """

    def __init__(self, task: str, what: str, listener: Listener = ignore_timing, *, watches_model: bool = True) -> None:
        self._task, self._what, self._listener, self._watches = task, what, listener, watches_model

    def __enter__(self) -> None:
        self._outer, _running.task = running_task(), self._task
        # Code within other own code is watched by the outer guard.
        watch = getattr(_running, "watch", None) if self._watches and self._outer is None else None
        self._put_model_back = (lambda: "") if watch is None else watch(self._task, self._what)
        # This block restores the state of the thread: inference mode, gradients, and which keys operations dispatch on.
        self._thread, records_gradients = (
            torch._C._InferenceMode(torch.is_inference_mode_enabled()),
            torch.is_grad_enabled(),
        )
        self._thread.__enter__()
        torch.set_grad_enabled(records_gradients)
        self._modes, self._started = [mode.read() for mode in _MODES], time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        _running.task = self._outer
        for mode, before in zip(_MODES, self._modes, strict=True):
            try:
                if mode.read() != before:
                    mode.put_back(before)
            except ForcedInterrupt:
                raise
            # The code's own: a signal of its timer, or a mode in which nothing works; neither comes a second time.
            except BaseException as raised:
                error = raised if error is None else error
                mode.put_back(before)
        self._thread.__exit__(None, None, None)
        changed = self._put_model_back()
        self._listener(self._task, self._what, time.perf_counter() - self._started)
        # Not `isinstance`, which may call code of the error.
        if error is not None and not issubclass(type(error), ForcedInterrupt):
            raise UserCodeError(describe_error(error)) from error
        if changed and error is None:
            raise UserCodeError(changed)


# ------------------------------------------------------- modes of the process


class _Mode(NamedTuple):
    """State of this process or thread that affects the results of every task, or whether the run continues."""

    read: Callable[[], Any]
    put_back: Callable[[Any], object]


_SIGNALS = [number for name in _SIGNAL_NAMES if (number := getattr(signal, name, None)) is not None]
_TIMERS: dict[int, Callable[[], float]] = (
    {
        signal.ITIMER_REAL: time.monotonic,
        signal.ITIMER_VIRTUAL: lambda: os.times().user,
        signal.ITIMER_PROF: time.process_time,
    }
    if hasattr(signal, "setitimer")
    else {}
)
"""The interval timers, and the clock that each of them follows."""
_NOT_SET = [(0.0, 0.0)] * len(_TIMERS)
_TOLERANCE_S = 0.05


def _read_timers() -> list[tuple[float, float]]:
    """Return for each timer when it fires, by its clock, and its interval; zeros for one that is not set."""
    left_s = [signal.getitimer(timer) for timer in _TIMERS]
    if left_s == _NOT_SET:
        return left_s
    return [(left and left + now(), every) for (left, every), now in zip(left_s, _TIMERS.values(), strict=True)]


def _put_timers_back(before: list[tuple[float, float]]) -> None:
    for timer, (due, every), (due_now, every_now) in zip(_TIMERS, before, _read_timers(), strict=True):
        # A timer of the run's own program has advanced meanwhile, or fired.
        if every != every_now or bool(due) != bool(due_now) or (not every and abs(due - due_now) > _TOLERANCE_S):
            signal.setitimer(timer, due and max(due - _TIMERS[timer](), 1e-3), every)


def _put_handlers_back(before: list[Any]) -> None:
    for number, handler in zip(_SIGNALS, before, strict=True):
        # Only the main thread sets handlers. `None`: a handler that is not a Python function cannot be set from here.
        if handler is not None and handler is not _signal.getsignal(number):
            with suppress(ValueError):
                signal.signal(number, handler)


def _read_functions() -> list[Any]:
    """Return the default device and the modes of torch functions (a default device is such a mode)."""
    stack = [torch._C._get_function_stack_at(number) for number in range(torch._C._len_torch_function_stack())]
    return [device_modes.CURRENT_DEVICE, vars(torch._GLOBAL_DEVICE_CONTEXT).get("device_context"), *stack]


def _put_functions_back(before: list[Any]) -> None:
    device_modes.CURRENT_DEVICE, torch._GLOBAL_DEVICE_CONTEXT.device_context, *stack = before
    while torch._C._len_torch_function_stack():
        torch._C._pop_torch_function_stack()
    for mode in stack:
        torch._C._push_on_torch_function_stack(mode)


def _put_operations_back(before: list[Any]) -> None:
    while left := dispatch_modes._get_current_dispatch_mode_stack():
        torch._C._pop_torch_dispatch_stack(getattr(left[-1], "_mode_key", None))
    for mode in before:
        torch._C._push_on_torch_dispatch_stack(mode)


_hooks = torch._C._autograd


def _put_hooks_back(before: tuple[bool, Any]) -> None:
    are_enabled, pair = before
    if are_enabled:
        _hooks._saved_tensors_hooks_enable()
    while (left := _hooks._top_saved_tensors_default_hooks(True)) not in (None, pair):
        _hooks._pop_saved_tensors_default_hooks()
    if left is None and pair is not None:
        _hooks._push_saved_tensors_default_hooks(*pair)


def _read_autocast() -> tuple[Any, ...]:
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    kinds = [(torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _AUTOCAST_DEVICES]
    return depth, torch.is_autocast_cache_enabled(), *kinds


def _put_autocast_back(before: tuple[Any, ...]) -> None:
    depth, keeps, *kinds = before
    for kind, (is_enabled, dtype) in zip(_AUTOCAST_DEVICES, kinds, strict=True):
        torch.set_autocast_enabled(kind, is_enabled)
        torch.set_autocast_dtype(kind, dtype)
    torch.set_autocast_cache_enabled(keeps)
    for _ in range(depth, _read_autocast()[0]):
        torch.autocast_decrement_nesting()
    for _ in range(_read_autocast()[0], depth):
        torch.autocast_increment_nesting()
    # An autocast block that is never left keeps its casts: weights of an earlier step.
    torch.clear_autocast_cache()


def _read_precision() -> tuple[str, ...]:
    """Return the precision of products of fp32 as it is set for all of them, and of each kind on each backend."""
    try:
        whole = torch.get_float32_matmul_precision()
    except RuntimeError:  # it was set in the older and the newer way
        whole = ""
    read = torch._C._get_fp32_precision_getter
    return whole, *[read(backend, kind) for backend, kind in _FP32_KINDS]


def _put_precision_back(before: tuple[str, ...]) -> None:
    whole, *each = before
    if whole:
        torch.set_float32_matmul_precision(whole)
    # From the whole of a backend to its parts, which the setting of a whole changes.
    for kind, value in zip(_FP32_KINDS, each, strict=True):
        torch._C._set_fp32_precision_setter(*kind, value)


def _read_folder() -> str:
    try:
        return os.getcwd()
    except OSError:  # it was deleted
        return ""


def _put_folder_back(before: str) -> None:
    with suppress(OSError):
        os.chdir(before or ".")


_SWITCHES = [
    (getattr(torch._C, read), getattr(torch._C, write))
    for read, write in (
        *((f"_get_{name}", f"_set_{name}") for name in _FLAGS),
        *((f"_get_{name}_sdp_enabled", f"_set_sdp_use_{name}") for name in _ATTENTION),
    )
    if hasattr(torch._C, read) and hasattr(torch._C, write)
]


def _put_switches_back(before: list[Any]) -> None:
    for (_, write), value in zip(_SWITCHES, before, strict=True):
        write(*(value if isinstance(value, tuple) else [value]))


# Signals first, which may come at any moment, then the modes in which functions of torch would fail.
_MODES = (
    _Mode(_read_timers, _put_timers_back),
    # `signal.getsignal` makes enumerations of handlers, which takes twenty times as long.
    _Mode(lambda: [_signal.getsignal(number) for number in _SIGNALS], _put_handlers_back),
    _Mode(_read_functions, _put_functions_back),
    _Mode(dispatch_modes._get_current_dispatch_mode_stack, _put_operations_back),
    _Mode(
        lambda: (_hooks._saved_tensors_hooks_is_enabled(), _hooks._top_saved_tensors_default_hooks(True)),
        _put_hooks_back,
    ),
    _Mode(_read_autocast, _put_autocast_back),
    _Mode(_read_precision, _put_precision_back),
    _Mode(_read_folder, _put_folder_back),
    # `resetwarnings` also forgets which warnings were shown under other filters.
    _Mode(lambda: list(warnings.filters), lambda before: (warnings.resetwarnings(), warnings.filters.extend(before))),
    _Mode(lambda: (sys.stdout, sys.stderr), lambda before: vars(sys).update(stdout=before[0], stderr=before[1])),
    _Mode(torch.get_default_dtype, torch.set_default_dtype),
    _Mode(torch.get_num_threads, torch.set_num_threads),
    # Numbers too small for the usual form are halved to 0 if this processor is set to flush them.
    _Mode(lambda: sys.float_info.min / 2 == 0, torch.set_flush_denormal),
    _Mode(
        lambda: (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
        lambda before: torch.use_deterministic_algorithms(before[0], warn_only=before[1]),
    ),
    _Mode(
        lambda: (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        lambda before: torch.set_anomaly_enabled(*before),
    ),
    _Mode(lambda: [read() for read, _ in _SWITCHES], _put_switches_back),
)


def user_traceback(error: BaseException) -> TracebackType | None:
    """Return the traceback starting at the user's frame, without peft_mux's own frames."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        file = frame.tb_frame.f_code.co_filename
        if not file.startswith(_PACKAGE) and not file.endswith(("trainer_callback.py", "contextlib.py")):
            break
        frame = frame.tb_next
    return frame


def describe_error(error: BaseException) -> str:
    """Return type and text of an error; its text may be unreadable, endless or full of control characters."""
    try:
        # A string may be of a class of its own, whose methods are not called.
        text = printable(str.__getitem__(str(error), slice(_MAX_CHARACTERS)))
    except ForcedInterrupt:
        raise
    except BaseException:
        text = "its text cannot be read"
    name = printable(str.__getitem__(_class_name(type(error)), slice(100)))
    return f"{name}: {text}" if text else name


def log_warning(logger: logging.Logger, line: str, error: BaseException | None = None) -> None:
    """Log a line, with the traceback of an error; what the error or a handler of the program raises is ignored."""
    with suppress(UserCodeError), guard_user_code("", "log", watches_model=False):
        if error is not None:
            trace = traceback.format_exception(type(error), error, user_traceback(error))
            line = f"{line}\n{printable(''.join(trace)[-_MAX_TRACE_CHARACTERS:])}"
    with suppress(UserCodeError), guard_user_code("", "log", watches_model=False):
        logger.warning(line)
