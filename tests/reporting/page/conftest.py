"""Tests of the page look at what is drawn."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True, scope="module")
def _shortcuts() -> None:
    """Let pictures be drawn, in place of the fixture of all other tests."""
