"""Ends a run cleanly on Ctrl-C or SIGTERM: at the next step boundary, with everything saved; the second one forces."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


@contextmanager
def stop_at_signal(request_stop: Callable[[], None]) -> Iterator[None]:
    """Call `request_stop` at the first SIGINT or SIGTERM, and let the second have its usual effect.

    Signals can only be handled in the main thread; elsewhere this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before: dict[int, Any] = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def handle(number: int, frame: FrameType | None) -> None:
        del frame
        request_stop()
        signal.signal(number, before[number])

    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
