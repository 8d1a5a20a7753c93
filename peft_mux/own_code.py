"""The one guard for code that belongs to a task: its callbacks, its metrics, its streams, hooks of its optimizer.

Whatever such code raises fails its task and no other, `SystemExit` and `KeyboardInterrupt` included. What the user of
the run asks for passes: the second Ctrl-C (`ForcedInterrupt`). The guard also measures for how long such code kept the
other tasks waiting, and tells a listener; `reporting.delays` is the one that listens in a run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from peft_mux.errors import ForcedInterrupt, PeftMuxError

Listener = Callable[[str, str, float], None]
"""Told the name of a task, what of its own has run, and for how many seconds the others waited for it."""

_MAX_CHARACTERS = 2000
_PACKAGE = f"{Path(__file__).resolve().parent}{os.sep}"


class OwnCodeError(PeftMuxError):
    """Code of a task's own has failed; the message is kind and text of what it raised, which is the cause."""


def nobody(task: str, what: str, seconds: float) -> None:
    """Listen to nothing."""


@contextmanager
def own_code(task: str, what: str, listener: Listener = nobody) -> Iterator[None]:
    """Run code of a task's own, so that nothing of what it raises is more than the failure of this task.

    Args:
        task: name of the task.
        what: what of it runs: "callback", "compute_metrics", "optimizer".
        listener: told how long it took, also where it failed.

    Raises:
        OwnCodeError: whatever the code has raised, which is its cause.
    """
    started = time.perf_counter()
    try:
        yield
    except (ForcedInterrupt, GeneratorExit):
        raise
    except BaseException as error:
        raise OwnCodeError(describe_error(error)) from error
    finally:
        listener(task, what, time.perf_counter() - started)


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
    # Lone surrogates would break every stream and file that the text is written to.
    text = text[:_MAX_CHARACTERS].encode("utf-8", "backslashreplace").decode("utf-8")
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
