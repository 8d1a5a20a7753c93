"""CUDA graphs as the engine uses them: all share one memory pool, and nothing in it outlives a replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

_NUM_WARM_UPS = 2
"""In the first one tables are built, kernels compiled and groups of layers settled; the second one is as captured."""


class CannotCaptureError(Exception):
    """A pass does something that no graph can repeat, or finds no room; the message is a clause that says what."""


class Graph(Protocol):
    """Launches that are recorded once and repeated over the same memory."""

    def warm_up(self, run: Callable[[], None]) -> None:
        """Run what will be captured until nothing is left that happens only at first."""
        ...

    def capture(self, run: Callable[[], None]) -> None:
        """Record what a call launches, without launching it."""
        ...

    def replay(self) -> None:
        """Launch what was recorded, without waiting."""
        ...


class CudaGraphs:
    """Makes graphs that share a pool.

    They may be replayed in any order, one after another: what a replay leaves behind lies outside of the pool.

    Args:
        device: the CUDA device that the graphs run on.
    """

    def __init__(self, device: torch.device) -> None:
        """Make nothing yet: what fails then fails the first capture, and not a run that may do without."""
        self._device = device
        self._pool_and_stream: tuple[Any, torch.cuda.Stream] | None = None

    def __call__(self) -> CudaGraph:
        """Return an empty graph; the first call makes the pool, and the stream that graphs are captured on.

        Raises:
            CannotCaptureError: if the device has less memory left than a pass takes: graphs keep theirs for good, and
                passes that run eagerly need theirs beside it.
        """
        if self._pool_and_stream is None:
            # Asked once: later graphs find their room in the pool of the first one.
            _require_room(self._device)
            self._pool_and_stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(self._device)
        return CudaGraph(*self._pool_and_stream)


def _require_room(device: torch.device) -> None:
    free_bytes, _ = torch.cuda.mem_get_info(device)
    # What passes so far took at most, beside what is there between them.
    pass_bytes = torch.cuda.max_memory_allocated(device) - torch.cuda.memory_allocated(device)
    if free_bytes < pass_bytes:
        raise CannotCaptureError(
            f"the GPU has {free_bytes >> 20} MiB left, of {pass_bytes >> 20} MiB that a pass takes"
        )


class CudaGraph:
    """One graph.

    Args:
        pool: memory pool in which its intermediate results lie.
        stream: stream to capture on; it is used for nothing else, so that what is allocated there is safe from reuse.
    """

    def __init__(self, pool: Any, stream: torch.cuda.Stream) -> None:
        """Make an empty graph."""
        self._pool, self._stream = pool, stream
        self._graph = torch.cuda.CUDAGraph()

    def warm_up(self, run: Callable[[], None]) -> None:
        """Run on the stream that will capture, as libraries set themselves up stream by stream."""
        current = torch.cuda.current_stream(self._stream.device)
        # Each stream waits for the other: the warm-up reads what was launched before it, and what follows reads its
        # results.
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                for _ in range(_NUM_WARM_UPS):
                    run()
        finally:
            current.wait_stream(self._stream)

    def capture(self, run: Callable[[], None]) -> None:
        """Record a call.

        Raises:
            RuntimeError: if it does what cannot be recorded, such as waiting for the device.
        """
        # The outer block brings the stream back even where ending the capture raises. Other threads may go on calling
        # CUDA meanwhile: new tasks arrive on them.
        with torch.cuda.stream(self._stream):
            with torch.cuda.graph(self._graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                run()

    def replay(self) -> None:
        """Launch on the current stream."""
        self._graph.replay()
