"""The one guard for code that belongs to a task: its callbacks, metrics, loss function and optimizer hooks.

Whatever this code raises fails its task and no other, `SystemExit` and `KeyboardInterrupt` included. Only the second
Ctrl-C of the run's user (`ForcedInterrupt`) passes. Process-wide settings that the code changes and that would change
the results of other tasks are restored. The guard also measures how long the code kept the other tasks waiting and
reports it to a listener; in a run that is `reporting.delays`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import torch

from peft_mux.errors import ForcedInterrupt, PeftMuxError, printable

Listener = Callable[[str, str, float], None]
"""Called with the name of a task, which of its code ran, and the seconds that it took."""

_MAX_CHARACTERS = 2000
_PACKAGE = f"{Path(__file__).resolve().parent}{os.sep}"
_AUTOCAST_DEVICES = ("cpu", "cuda")


class UserCodeError(PeftMuxError):
    """A task's own code failed; the message is type and text of what it raised, which is the cause."""


def ignore_timing(task: str, what: str, seconds: float) -> None:
    """Do nothing: the listener where timings are not wanted."""


class guard_user_code(AbstractContextManager[None]):
    """Run a task's own code in the `with` block, so that whatever it does is at most a failure of this task.

    A class and no generator: when a generator is closed, it would catch a `GeneratorExit` of the user's code.

    Args:
        task: name of the task.
        what: which of its code runs: "callback", "compute_metrics", "optimizer".
        listener: receives the seconds that it took, also when it fails.

    Raises:
        UserCodeError: caused by whatever the code raises.
    """

    def __init__(self, task: str, what: str, listener: Listener = ignore_timing) -> None:
        """Do nothing until the block begins."""
        self._task, self._what, self._listener = task, what, listener

    def __enter__(self) -> None:
        self._settings, self._started = _process_settings(), time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        left = _process_settings()
        if left != self._settings:
            _restore(self._settings, left)
        self._listener(self._task, self._what, time.perf_counter() - self._started)
        if error is not None and not isinstance(error, ForcedInterrupt):
            raise UserCodeError(describe_error(error)) from error


class _ProcessSettings(NamedTuple):
    """Settings of this process and thread that decide the results of every task, and where their files go."""

    folder: str
    records_gradients: bool
    dtype: torch.dtype
    device: torch.device
    matmul_precision: str
    is_deterministic: bool
    only_warns: bool
    num_threads: int
    autocast_depth: int
    autocast: tuple[tuple[bool, torch.dtype], ...]


def _process_settings() -> _ProcessSettings:
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    try:
        folder = os.getcwd()
    except OSError:  # it was deleted
        folder = ""
    return _ProcessSettings(
        folder,
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.empty(0).device,  # `torch.get_default_device` takes longer than everything else here
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_num_threads(),
        depth,
        tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _AUTOCAST_DEVICES),
    )


def _restore(before: _ProcessSettings, left: _ProcessSettings) -> None:
    with suppress(OSError):
        os.chdir(before.folder or ".")
    torch.set_grad_enabled(before.records_gradients)
    torch.set_default_dtype(before.dtype)
    if before.device != left.device:
        # An explicit default device costs every call a little, and without one tensors are made on the CPU.
        torch.set_default_device(None if before.device.type == "cpu" else before.device)
    torch.set_float32_matmul_precision(before.matmul_precision)
    torch.use_deterministic_algorithms(before.is_deterministic, warn_only=before.only_warns)
    if before.num_threads != left.num_threads:
        torch.set_num_threads(before.num_threads)
    for kind, (is_enabled, dtype) in zip(_AUTOCAST_DEVICES, before.autocast, strict=True):
        torch.set_autocast_enabled(kind, is_enabled)
        torch.set_autocast_dtype(kind, dtype)
    for _ in range(before.autocast_depth, left.autocast_depth):
        torch.autocast_decrement_nesting()
    for _ in range(left.autocast_depth, before.autocast_depth):
        torch.autocast_increment_nesting()
    # An autocast block that is never left keeps its casts: weights of an earlier step.
    torch.clear_autocast_cache()


def user_traceback(error: BaseException) -> TracebackType | None:
    """Return the traceback starting at the user's frame, without peft_mux's own frames."""
    found = error.__traceback__
    while found is not None and found.tb_next is not None:
        file = found.tb_frame.f_code.co_filename
        if not file.startswith(_PACKAGE) and not file.endswith(("trainer_callback.py", "contextlib.py")):
            break
        found = found.tb_next
    return found


def describe_error(error: BaseException) -> str:
    """Return type and text of an error; its text may be unreadable, endless or full of control characters."""
    try:
        text = str(error)
    except ForcedInterrupt:
        raise
    except BaseException:
        text = "its text cannot be read"
    text = printable(text[:_MAX_CHARACTERS])
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
