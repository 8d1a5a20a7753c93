"""The part `device` of `benchmarks.gpu`, and what the report says of the machine."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks import stored
from benchmarks.gpu.report import Row
from benchmarks.gpu.settings import Settings
from benchmarks.kernels.timing import copy_rate, interleaved_us


def device_part(settings: Settings) -> Iterator[Row]:
    """Copy and product rates, and clocks."""
    yield "copy", {"bytes_per_s": copy_rate(settings.device)}
    size = 64 if settings.is_rehearsal else 8192
    a, b, out = (torch.randn(size, size, device=settings.device, dtype=settings.dtype) for _ in range(3))
    us = interleaved_us({"mm": lambda _: torch.mm(a, b, out=out)}, settings.device, calls=4, rounds=5)["mm"]
    yield f"product of {size}", {"us": us, "flops_per_s": 2 * size**3 / us * 1e6}
    yield "clocks after it", {"nvidia-smi": nvidia_smi("clocks.sm,clocks.mem,clocks.max.sm,power.draw,temperature.gpu")}


def versions(device: torch.device) -> dict[str, Any]:
    """Return what the machine and its software are."""
    found: dict[str, Any] = {"cpu": stored.cpu_name(), "cuda": torch.version.cuda}
    found |= stored.versions(("triton", "trl", "liger-kernel", "numpy"))
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
