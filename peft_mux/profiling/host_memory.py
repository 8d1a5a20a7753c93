"""How much memory of the host this process may have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil

_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")


def host_memory_bytes() -> int | None:
    """Return the host's memory, or what the container or job of this process is given of it; `None` if nobody knows."""
    try:
        total = psutil.virtual_memory().total
    except (psutil.Error, OSError):
        return None
    return min([total, *_group_limits(_GROUPS, _OWN_GROUPS)])


def _group_limits(groups: Path, own_groups: Path) -> Iterator[int]:
    """Give the limits of the control groups that this process is in, and of those around them; Linux alone has any.

    Args:
        groups: where the kernel shows control groups, those of version 1 by controller.
        own_groups: the file that says which groups this process is in: lines of `number:controllers:path`.
    """
    try:
        lines = own_groups.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return
    for controllers, path in [line.split(":", 2)[1:] for line in lines if line.count(":") >= 2]:
        if controllers == "":  # version 2
            top, name = groups, "memory.max"
        elif "memory" in controllers.split(","):
            top, name = groups / "memory", "memory.limit_in_bytes"
        else:
            continue
        # Within a container the path may be that of the host, of which the container's own group alone is seen, on top.
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for depth in range(len(parts) + 1):
            yield from _limit(top.joinpath(*parts[:depth], name))


def _limit(file: Path) -> Iterator[int]:
    try:
        text = file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return
    if text.isdecimal() and int(text) > 0:  # "max" is no limit
        yield int(text)
