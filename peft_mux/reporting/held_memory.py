"""The most memory that this process has held."""

from __future__ import annotations

import sys

import torch

try:
    import resource
except ImportError:  # Windows has none
    resource = None


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
