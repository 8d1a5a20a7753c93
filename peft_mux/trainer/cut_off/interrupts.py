"""Ends a run cleanly on Ctrl-C or SIGTERM: at the next step boundary, with everything saved; the second one forces."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from peft_mux.errors import ForcedInterrupt


@contextmanager
def stop_at_signal(request_stop: Callable[[int], None], *, echo_s: float = 0.0) -> Iterator[None]:
    """Call `request_stop` at the first SIGINT or SIGTERM, and let the second have its usual effect.

    Signals can only be handled in the main thread; elsewhere this does nothing.

    Args:
        request_stop: called in the handler, with the number of the signal.
        echo_s: seconds within which a second one is taken for an echo of the first: of Ctrl-C, the processes of a
            launcher hear twice, from the terminal and from the launcher.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    asked_at: dict[int, float] = {}

    def force(number: int) -> None:
        signal.signal(number, before[number])
        # An error of its own: a task's code may raise KeyboardInterrupt too, which fails that task alone.
        if before[number] is signal.default_int_handler:
            raise ForcedInterrupt
        signal.raise_signal(number)

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        # Told apart by number: a SIGTERM after a Ctrl-C is a first one of its kind, and asks for the same.
        if number not in asked_at:
            asked_at[number] = time.monotonic()
            request_stop(number)
        elif time.monotonic() - asked_at[number] >= echo_s:
            force(number)

    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        # The script that called has its own way with signals once training is over.
        for number, handler in before.items():
            signal.signal(number, handler)
