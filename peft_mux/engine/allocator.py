"""Memory of a process: its limit, its current and peak usage, and keeping freed memory for reuse.

`keeping_freed_memory` keeps freed memory in the process, in huge pages, during training on a CPU.

A pass allocates its activations and frees them in its backward. By default glibc returns the freed top of the heap, and
every block that was mapped separately, to the system, so that each pass causes a page fault per 4 KiB again. Also,
products over 4 KiB pages suffer from TLB misses; Linux uses 2 MiB pages if a program requests them (docs/log.md).
Results do not change. Other C libraries and systems are not affected.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import torch

try:
    import resource
except ImportError:  # Windows
    resource = None

_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_NEVER = -1
_DEFAULT_TRIM_THRESHOLD, _DEFAULT_MMAP_MAX = 128 * 2**10, 65_536
_MADV_HUGEPAGE = 14
_HUGE_PAGE_BYTES = 2 * 2**20


def host_memory_bytes() -> int | None:
    """Return the host's memory, or the limit of this process's container or job; `None` if neither is known.

    Limits are read from the control group of this process and its ancestors, which exist only on Linux.
    """
    try:
        total = psutil.virtual_memory().total
    except (psutil.Error, OSError):
        return None
    # Lines of `number:controllers:path`.
    lines = _text_of(_OWN_GROUPS).splitlines()
    limits = [total]
    for controllers, path in [line.split(":", 2)[1:] for line in lines if line.count(":") >= 2]:
        if controllers == "":  # version 2
            top, name = _GROUPS, "memory.max"
        elif "memory" in controllers.split(","):
            top, name = _GROUPS / "memory", "memory.limit_in_bytes"
        else:
            continue
        # In a container the path may be the host's; then only the container's own group is visible, at the root.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            text = _text_of(top.joinpath(*parts[:depth], name)).strip()
            if text.isdecimal() and int(text) > 0:  # "max" is no limit
                limits.append(int(text))
    return min(limits)


def memory_now(device: torch.device) -> tuple[int, int] | None:
    """Return the bytes held now and those of the device; `None` if unknown.

    Args:
        device: a GPU, for its allocated memory, or a CPU, for the resident memory of this process.
    """
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device), torch.cuda.get_device_properties(device).total_memory
    total = host_memory_bytes()
    try:
        return None if total is None else (psutil.Process().memory_info().rss, total)
    except (psutil.Error, OSError):
        return None


def private_bytes() -> int:
    """Return the bytes that this process holds on the host, without libraries and other files; 0 if unknown."""
    with suppress(psutil.Error, OSError):
        memory = psutil.Process().memory_info()
        return memory.rss - getattr(memory, "shared", 0)
    return 0


def use_expandable_segments() -> None:
    """Let the CUDA allocator grow its segments, unless the user has set its options.

    Passes of unequal sizes may leave gaps otherwise: on an H100, runs whose tensors took 54 to 60 GB reserved 83 to 84
    (`docs/log.md`). Not on Windows, which has no such segments.
    """
    if any(os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
        return
    apply = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    if sys.platform == "linux":
        apply("expandable_segments:True")


def peak_bytes(device: torch.device | None = None) -> int:
    """Return the peak memory of this process in bytes, on its GPU or else on the host; 0 if unknown.

    Args:
        device: the training device; by default a GPU if the process uses one.
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


def device_words(device: torch.device) -> str:
    """Return the device of this process in words."""
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        return f"{torch.cuda.get_device_name(device)}, {total / 2**30:.2f} GiB"
    return f"{device.type}, {torch.get_num_threads()} thread{'s' if torch.get_num_threads() > 1 else ''}"


def _text_of(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return ""


@contextmanager
def keeping_freed_memory(device: torch.device) -> Iterator[None]:
    """Keep freed memory in the process during the `with` block, and return it to the system at the end.

    Args:
        device: the training device; without effect unless it is a CPU.
    """
    library: Any = ctypes.CDLL(None) if device.type == "cpu" and sys.platform.startswith("linux") else None
    if library is None or not (hasattr(library, "gnu_get_libc_version") and hasattr(library, "mallopt")):
        yield
        return
    # Both are needed: a separately mapped block is always returned when it is freed. Raising the mapping threshold is
    # not enough: glibc allows 32 MiB at most, and logits of a large vocabulary are larger.
    try:
        library.mallopt(_M_MMAP_MAX, 0)
        library.mallopt(_M_TRIM_THRESHOLD, _NEVER)
        _ask_for_huge_pages(library)
        yield
    finally:
        library.mallopt(_M_MMAP_MAX, _DEFAULT_MMAP_MAX)
        library.mallopt(_M_TRIM_THRESHOLD, _DEFAULT_TRIM_THRESHOLD)
        library.malloc_trim(0)


def _ask_for_huge_pages(library: Any) -> None:
    """Let the heap grow in huge pages, up to half of the machine's memory; failures are ignored.

    The heap grows by a block that is freed without being written to, so it takes no physical memory. Nothing is done on
    systems that count reserved addresses as memory (overcommit is off).
    """
    assert resource is not None, "every Unix has it"
    limits = (resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    # Without a text it is not known how the system counts.
    if any(limit != resource.RLIM_INFINITY for limit in limits) or _text_of(_OVERCOMMIT).strip() in ("", "2"):
        return
    num_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    library.malloc.restype = library.sbrk.restype = ctypes.c_void_p
    library.free.argtypes = (ctypes.c_void_p,)
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    block = library.malloc(ctypes.c_size_t(num_bytes))
    if block is None:
        return
    start, end = -(-block // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES, library.sbrk(ctypes.c_ssize_t(0))
    library.free(block)
    # Blocks that are not on the heap, as in a thread's own arena, lie behind the end of it.
    if start < end:
        library.madvise(start, end - start, _MADV_HUGEPAGE)
