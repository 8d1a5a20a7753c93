"""The one guard for code that belongs to a task: its callbacks, its metrics, its loss, hooks of its optimizer.

Whatever such code raises fails its task and no other, `SystemExit` and `KeyboardInterrupt` included. What the user of
the run asks for passes: the second Ctrl-C (`ForcedInterrupt`). Settings of the whole process that such code leaves
behind, of which every task would compute otherwise, are put back. The guard also measures for how long such code kept
the other tasks waiting, and tells a listener; `reporting.delays` is the one that listens in a run.
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

from peft_mux.errors import ForcedInterrupt, PeftMuxError

Listener = Callable[[str, str, float], None]
"""Told the name of a task, what of its own has run, and for how many seconds the others waited for it."""

_MAX_CHARACTERS = 2000
_PACKAGE = f"{Path(__file__).resolve().parent}{os.sep}"


class OwnCodeError(PeftMuxError):
    """Code of a task's own has failed; the message is kind and text of what it raised, which is the cause."""


def nobody(task: str, what: str, seconds: float) -> None:
    """Listen to nothing."""


def own_code(task: str, what: str, listener: Listener = nobody) -> AbstractContextManager[None]:
    """Run code of a task's own in the `with` block, so that nothing of it is more than the failure of this task.

    Args:
        task: name of the task.
        what: what of it runs: "callback", "compute_metrics", "optimizer".
        listener: told how long it took, also where it failed.

    Raises:
        OwnCodeError: whatever the code has raised, which is its cause.
    """
    return _Guard(task, what, listener)


class _Guard(AbstractContextManager[None]):
    """What `own_code` returns. No generator: one that is thrown away would take the `GeneratorExit` of own code."""

    def __init__(self, task: str, what: str, listener: Listener) -> None:
        self._task, self._what, self._listener = task, what, listener

    def __enter__(self) -> None:
        self._settings, self._started = _settings(), time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        left = _settings()
        if left != self._settings:
            _put_back(self._settings, left)
        self._listener(self._task, self._what, time.perf_counter() - self._started)
        if error is not None and not isinstance(error, ForcedInterrupt):
            raise OwnCodeError(describe_error(error)) from error


class _Settings(NamedTuple):
    """What decides the results of every task on this thread, and where their files go."""

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


_AUTOCAST = ("cpu", "cuda")


def _settings() -> _Settings:
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    try:
        folder = os.getcwd()
    except OSError:  # somebody has deleted it
        folder = ""
    return _Settings(
        folder,
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.empty(0).device,  # asking for it by name takes longer than all the rest
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_num_threads(),
        depth,
        tuple((torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in _AUTOCAST),
    )


def _put_back(before: _Settings, left: _Settings) -> None:
    with suppress(OSError):
        os.chdir(before.folder or ".")
    torch.set_grad_enabled(before.records_gradients)
    torch.set_default_dtype(before.dtype)
    if before.device != left.device:
        # Without a device of their own tensors are made on the CPU; a set one costs each call a little.
        torch.set_default_device(None if before.device.type == "cpu" else before.device)
    torch.set_float32_matmul_precision(before.matmul_precision)
    torch.use_deterministic_algorithms(before.is_deterministic, warn_only=before.only_warns)
    if before.num_threads != left.num_threads:
        torch.set_num_threads(before.num_threads)
    _leave_autocast(before, left)


def _leave_autocast(before: _Settings, left: _Settings) -> None:
    for kind, (is_enabled, dtype) in zip(_AUTOCAST, before.autocast, strict=True):
        torch.set_autocast_enabled(kind, is_enabled)
        torch.set_autocast_dtype(kind, dtype)
    for _ in range(before.autocast_depth, left.autocast_depth):
        torch.autocast_decrement_nesting()
    for _ in range(left.autocast_depth, before.autocast_depth):
        torch.autocast_increment_nesting()
    # Where its last block is never left, torch keeps what it has cast: weights of a step before.
    torch.clear_autocast_cache()


def own_frames(error: BaseException) -> TracebackType | None:
    """Return where an error came from, from the task's own code on: the guard around it tells its owner nothing."""
    found = error.__traceback__
    while found is not None and found.tb_next is not None and _is_around(found.tb_frame.f_code.co_filename):
        found = found.tb_next
    return found


def _is_around(file: str) -> bool:
    return file.startswith(_PACKAGE) or file.endswith(("trainer_callback.py", "contextlib.py"))


def describe_error(error: BaseException) -> str:
    """Return kind and text of an error that may be hostile: unreadable, endless, or not to be printed."""
    try:
        text = str(error)
    except ForcedInterrupt:
        raise
    except BaseException:
        text = "its text cannot be read"
    text = printable(text[:_MAX_CHARACTERS])
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def printable(text: str) -> str:
    """Return a text of a task's own as it may be printed beside those of the others.

    Control characters, which move a terminal's cursor, and lone surrogates, which no file takes, are written out; its
    further lines are moved in, so that none can be taken for a line of the run.
    """
    lines = text.expandtabs().splitlines()
    shown = ["".join(one if one.isprintable() else repr(one)[1:-1] for one in line) for line in lines]
    return "\n  ".join(shown)
