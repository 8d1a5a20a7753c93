"""The few names that differ between the Python versions we run on."""

from __future__ import annotations

import sys

if sys.version_info >= (3, 11):
    from enum import StrEnum
else:
    from enum import Enum

    class StrEnum(str, Enum):
        """String enumeration whose members print as their values."""

        __str__ = str.__str__


__all__ = ["StrEnum"]
