"""Keeps freed memory in the process while a CPU trains: the C library else gives it back after every pass.

A pass allocates its activations and frees them in its backward. glibc returns a freed top of the heap, and every block
above its mmap threshold, to the system, which hands out zeroed pages again at the next pass: a page fault for every
4 KiB of it, each time (docs/log.md). Nothing here changes what is computed, and other C libraries are left alone.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NEVER = -1
_LARGEST_MMAP_THRESHOLD = 32 * 2**20
"""What glibc allows at most on 64 bits; larger blocks are mapped and unmapped by themselves in any case."""
_DEFAULT = 128 * 2**10


@contextmanager
def keeping_freed_memory(device: torch.device) -> Iterator[None]:
    """Let the process keep what it frees for the time of the `with` block, and give it back at the end.

    Args:
        device: that trains; only on a CPU does memory come from the C library.
    """
    library = _glibc() if device.type == "cpu" else None
    if library is None:
        yield
        return
    # Both are needed: a block above the first is mapped by itself and goes back when it is freed, whatever the second
    # says.
    library.mallopt(_M_MMAP_THRESHOLD, _LARGEST_MMAP_THRESHOLD)
    library.mallopt(_M_TRIM_THRESHOLD, _NEVER)
    try:
        yield
    finally:
        library.mallopt(_M_TRIM_THRESHOLD, _DEFAULT)
        library.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    """Return the C library where it is glibc."""
    if not sys.platform.startswith("linux"):
        return None
    library = ctypes.CDLL(None)
    return library if hasattr(library, "gnu_get_libc_version") and hasattr(library, "mallopt") else None
