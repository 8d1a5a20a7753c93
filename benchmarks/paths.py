"""Where benchmarks read and write."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
"""Root folder of the repository."""

RESULTS = ROOT / "benchmarks" / "results"
"""Folder of the results that are kept, as JSON and pictures."""

SHARED_DATA = ROOT.parent / "shared" / "data"
"""Real inputs that may be next to the repository."""
