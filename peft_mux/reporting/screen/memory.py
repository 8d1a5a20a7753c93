"""How much memory this process holds now, for those who look on, and the most that it has held."""

from __future__ import annotations

import sys
from collections.abc import Callable

import psutil
import torch

from peft_mux.profiling.host_memory import host_memory_bytes

try:
    import resource
except ImportError:  # Windows has none
    resource = None


def memory_now(device: torch.device) -> Callable[[], tuple[int, int] | None]:
    """Return a function that gives the bytes held now and those of the device; `None` where they are not known.

    Args:
        device: a GPU, whose allocated memory counts, or else the host, with all that this process holds of it.
    """

    def of_gpu() -> tuple[int, int]:
        return torch.cuda.memory_allocated(device), torch.cuda.get_device_properties(device).total_memory

    process = psutil.Process()

    def of_host() -> tuple[int, int] | None:
        total = host_memory_bytes()
        try:
            return None if total is None else (process.memory_info().rss, total)
        except (psutil.Error, OSError):
            return None

    return of_gpu if device.type == "cuda" else of_host


def peak_bytes(device: torch.device | None = None) -> int:
    """Return the most bytes that this process has held: of its GPU, else of the host; 0 where nobody knows.

    Args:
        device: the device that it trains on; by default a GPU where it uses one.
    """
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_initialized() else "cpu")
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if resource is None:
        return 0
    # Kilobytes on Linux, bytes on macOS.
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
