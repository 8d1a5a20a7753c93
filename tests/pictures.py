"""Pictures of losses take a tenth of what a short run takes, so tests of other things have empty ones."""

from __future__ import annotations

import base64
from typing import Any

import pytest

from peft_mux.reporting import page as plots

_EMPTY = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
)
"""A PNG of one point."""


def draw_none(patch: pytest.MonkeyPatch) -> None:
    """Write empty pictures from now on.

    Args:
        patch: what puts pictures back.
    """

    def empty(figure: Any, kind: str) -> bytes:
        return _EMPTY

    patch.setattr(plots, "_draw", lambda *given: None)
    patch.setattr(plots, "_image", empty)
