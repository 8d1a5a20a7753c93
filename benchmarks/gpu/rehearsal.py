"""What replaces a GPU in a rehearsal without one."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from benchmarks.gpu.settings import Settings

_PADDED_ROWS = 32
"""Steps of the padding of captured passes; the interpreter takes its time for every row."""


class RepeatedCall:
    """Stands for a CUDA graph: replays by calling again what it was given to capture."""

    def warm_up(self, run: Callable[[], None]) -> None:
        run()

    def capture(self, run: Callable[[], None]) -> None:
        self._run = run

    def replay(self) -> None:
        self._run()


def graphs_here(settings: Settings) -> Callable[[], Any] | None:
    """Return what makes graphs: `None` on a GPU, which has its own, and where no kernel could be captured."""
    return RepeatedCall if settings.is_rehearsal and settings.has_kernels else None


@contextlib.contextmanager
def stand_ins(settings: Settings, *, with_attention: bool = False) -> Iterator[None]:
    """Let a CPU take the paths of a GPU: kernels where Triton's interpreter runs them, and attention in one call.

    Args:
        settings: where everything runs; on a GPU nothing is changed.
        with_attention: whether attention over packed sequences is one call too, as a captured pass needs it.
    """
    if settings.device.type == "cuda" or not settings.has_kernels:
        yield
        return
    from benchmarks.gpu.checks.attention import stand_in_varlen
    from peft_mux.modeling.adapters.lora import lora_pass
    from peft_mux.modeling.attention import packed, varlen
    from peft_mux.parallel import cuda_graphs as inputs

    kernel = varlen.as_kernel("torch", stand_in_varlen)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(lora_pass, "runs_kernels", return_value=True))
        if with_attention:
            stack.enter_context(mock.patch.object(inputs, "TOKEN_STEP", _PADDED_ROWS))
            stack.enter_context(mock.patch.object(packed, "varlen_support", return_value=None))
            stack.enter_context(mock.patch.object(packed, "runs_kernels", return_value=True))
            stack.enter_context(mock.patch.object(varlen, "varlen_kernel", return_value=kernel))
        yield
