"""The part `device` of `benchmarks.gpu`, and what the report says of the machine."""

from __future__ import annotations

import contextlib
import platform
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks.gpu.report import Deadline, Row
from benchmarks.gpu.settings import Settings
from benchmarks.kernels.problem import Problem, Shape
from benchmarks.kernels.timing import copy_rate, interleaved_us


def device_part(settings: Settings, deadline: Deadline) -> Iterator[Row]:
    """Clocks, copy and product rates, and what beta = 1 costs."""
    yield "copy", {"bytes_per_s": copy_rate(settings.device)}
    size = 64 if settings.is_rehearsal else 8192
    a, b, out = (torch.randn(size, size, device=settings.device, dtype=settings.dtype) for _ in range(3))
    us = interleaved_us({"mm": lambda _: torch.mm(a, b, out=out)}, settings.device, calls=4, rounds=5)["mm"]
    yield f"product of {size}", {"us": us, "flops_per_s": 2 * size**3 / us * 1e6}
    yield "clocks after it", {"nvidia-smi": nvidia_smi("clocks.sm,clocks.mem,clocks.max.sm,power.draw,temperature.gpu")}
    for num_tokens in (16, 32) if settings.is_rehearsal else (1024, 4096, 16384):
        if not deadline.has():
            yield "note", "time is up: not all beta = 1 products were timed"
            return
        yield f"beta of {num_tokens} rows", _beta_cost(settings, num_tokens, 64 if settings.is_rehearsal else 4096)


def versions(device: torch.device) -> dict[str, Any]:
    """Return what the machine and its software are."""
    from importlib import metadata

    found: dict[str, Any] = {"python": platform.python_version(), "cuda": torch.version.cuda}
    for name in ("torch", "triton", "transformers", "peft", "accelerate", "trl", "liger-kernel", "numpy"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found |= {
            "gpu": properties.name,
            "driver": nvidia_smi("driver_version"),
            "capability": f"{properties.major}.{properties.minor}",
            "memory_bytes": properties.total_memory,
            "l2_bytes": properties.L2_cache_size,
            "multiprocessors": properties.multi_processor_count,
        }
    return found


def nvidia_smi(query: str) -> str:
    """Return what `nvidia-smi` answers, or why it does not."""
    try:
        command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError) as error:
        return f"unknown: {type(error).__name__}"


def _beta_cost(settings: Settings, num_tokens: int, width: int) -> dict[str, float]:
    """Time `out = x W^T` against `out += x W^T`, with inputs that do not stay in the L2."""
    shape = Shape(width, (width,), num_tokens, 1, 8)
    problem = Problem(shape, settings.device, settings.dtype)
    out = torch.zeros(num_tokens, width, device=settings.device, dtype=settings.dtype)

    def without(call: int) -> None:
        x, _, (weight,) = problem.inputs(call)
        torch.mm(x, weight.t(), out=out)

    def with_beta(call: int) -> None:
        x, _, (weight,) = problem.inputs(call)
        torch.addmm(out, x, weight.t(), out=out)

    steps: dict[str, Callable[[int], Any]] = {"beta_0": without, "beta_1": with_beta}
    calls = len(problem.copies)
    times = interleaved_us(steps, settings.device, calls=calls, rounds=11)
    return {f"{name}_us": us for name, us in times.items()} | {
        "cost_percent": 100 * (times["beta_1"] / times["beta_0"] - 1)
    }
