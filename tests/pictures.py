"""Pictures of losses take a tenth of what a short run takes, so tests of other things have empty ones."""

from __future__ import annotations

import base64

import pytest

from peft_mux.reporting import page
from peft_mux.trainer import run

_EMPTY = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNgAAAAAgABSK+kcQAAAABJRU5ErkJggg=="
)
"""A PNG of one point."""


def draw_none(patch: pytest.MonkeyPatch) -> None:
    """Write empty pictures from now on.

    Args:
        patch: what puts pictures back.
    """

    for module in (page, run):
        patch.setattr(module, "draw_losses", lambda tasks, kind="png": _EMPTY)
