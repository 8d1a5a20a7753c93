"""How much memory this process holds now, for those who look on."""

from __future__ import annotations

from collections.abc import Callable

import psutil
import torch


def memory_now(device: torch.device) -> Callable[[], tuple[int, int] | None]:
    """Return a function that gives the bytes held now and those of the device; `None` where they are not known.

    Args:
        device: a GPU, whose allocated memory counts, or else the host, with all that this process holds of it.
    """

    def of_gpu() -> tuple[int, int]:
        return torch.cuda.memory_allocated(device), torch.cuda.get_device_properties(device).total_memory

    process = psutil.Process()

    def of_host() -> tuple[int, int] | None:
        try:
            return process.memory_info().rss, psutil.virtual_memory().total
        except (psutil.Error, OSError):
            return None

    return of_gpu if device.type == "cuda" else of_host
