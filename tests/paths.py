"""Where tests read."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""Of the repository."""

SHARED_DATA = ROOT.parent / "shared" / "data"
"""Real inputs that may be next to the repository."""
