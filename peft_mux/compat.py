"""What differs between installations: names of Python versions, and which packages there are."""

from __future__ import annotations

import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, version

if sys.version_info >= (3, 11):
    from enum import StrEnum
else:
    from enum import Enum

    class StrEnum(str, Enum):
        """String enumeration whose members print as their values."""

        __str__ = str.__str__


__all__ = ["StrEnum", "installed_version"]


@cache
def installed_version(package: str) -> str | None:
    """Return the version of a package; `None` where it is not installed, as a checkout that runs as it is.

    Args:
        package: name of the distribution, such as "peft-mux".
    """
    try:
        return version(package)
    except PackageNotFoundError:
        return None
