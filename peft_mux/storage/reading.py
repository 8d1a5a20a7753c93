"""Reading what may have been put in the place of a file: a pipe would hang whoever opens it, a device never end."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading; a link is followed, anything but a regular file refused.

    Raises:
        OSError: if it cannot be opened, or is a folder, a pipe, a socket or a device.
    """
    # A pipe without a writer is opened at once so, instead of waiting for one.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    require_regular(descriptor, path)
    return os.fdopen(descriptor, "rb")


def read_regular(path: Path) -> bytes:
    """Return the content of a regular file.

    Raises:
        OSError: if it cannot be read, or is a folder, a pipe, a socket or a device.
    """
    with open_regular(path) as file:
        return file.read()


def require_regular(descriptor: int, path: Path) -> None:
    """Close an open file that is none.

    Raises:
        OSError: naming the path, if it is a folder, a pipe, a socket or a device.
    """
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"{path} is no regular file")
