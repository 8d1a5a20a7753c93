"""How the GPU benchmarks take times: interleaved rounds, medians, CUDA graphs, and the copy rate to compare with."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.harness import rotated

Call = Callable[[int], Any]
"""Work to time; it gets the number of the call, by which inputs rotate."""


def interleaved_us(steps: dict[str, Call], device: torch.device, *, calls: int, rounds: int) -> dict[str, float]:
    """Return the median microseconds of a call of each, over interleaved rounds of `calls` calls."""
    for step in steps.values():
        step(0)
    spent: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(rounds):
        for name in rotated(list(steps), turn):
            spent[name].append(_elapsed_us(steps[name], device, calls) / calls)
    return {name: statistics.median(values) for name, values in spent.items()}


def _elapsed_us(step: Call, device: torch.device, calls: int) -> float:
    if device.type != "cuda":
        start_s = time.perf_counter()
        for call in range(calls):
            step(call)
        return (time.perf_counter() - start_s) * 1e6
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for call in range(calls):
        step(call)
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def captured(step: Call, calls: int) -> Callable[[int], None]:
    """Return a function that replays `calls` calls as one CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in range(3):
            step(call)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in range(calls):
            step(call)
    return lambda _: graph.replay()


def copy_rate(device: torch.device, num_bytes: int = 2**30) -> float:
    """Return the bytes per second of a device-to-device copy, read and written bytes both counted."""
    source = torch.zeros(num_bytes if device.type == "cuda" else 2**20, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    us = interleaved_us({"copy": lambda _: target.copy_(source)}, device, calls=5, rounds=5)["copy"]
    return 2 * source.numel() / us * 1e6
